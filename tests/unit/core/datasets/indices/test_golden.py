"""Every index and sample is identical to the ones that Megatron built from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.gpt_dataset_config import SPLIT_NAMES, Blend, GPTDatasetConfig, parse_split
from megatron.core.datasets.index_builder import IndexBuilder, NumpyIndexBuilder, select_index_builder
from tests.unit.core.datasets.samples.dense_mask import dense_attention_mask

GOLDEN = Path(__file__).parents[4] / "golden" / "data"
META: dict[str, Any] = json.loads((GOLDEN / "golden_meta.json").read_text())


def to_blend(value: Any) -> Blend | None:
    if value is None:
        return None
    prefixes, weights = value
    return Blend(tuple(str(GOLDEN / prefix) for prefix in prefixes), None if weights is None else tuple(weights))


def to_config(case: dict[str, Any], cache: Path) -> GPTDatasetConfig:
    values = dict(case["config"])
    # Megatron's alone: here a mask is never made densely.
    values.pop("create_attention_mask")
    blend, per_split = values.pop("blend", None), values.pop("blend_per_split", None)
    return GPTDatasetConfig(
        **values,
        blend=to_blend(blend),
        blend_per_split=None if per_split is None else tuple(to_blend(each) for each in per_split),
        path_to_cache=str(cache),
        eod_token_id=0,
        vocab_size=100000,
    )


def assert_same_indices(dataset: GPTDataset, meta: dict[str, Any], arrays: Any, key: str) -> None:
    assert len(dataset) == meta["len"]
    assert [dataset.sequences.start, dataset.sequences.stop] == meta["docs"]
    for name in ("document_index", "sample_index", "shuffle_index"):
        built = getattr(dataset, name)
        np.testing.assert_array_equal(built, arrays[f"{key}/{name}"])
        assert built.dtype == arrays[f"{key}/{name}"].dtype == meta["dtypes"][name]


def assert_same_samples(dataset: GPTDataset | BlendedDataset, arrays: Any, key: str) -> None:
    for i, tokens in enumerate(arrays[f"{key}/tokens"]):
        sample = dataset[i]
        assert sample["tokens"].dtype == sample["labels"].dtype == np.int64
        np.testing.assert_array_equal(sample["tokens"], tokens)
        np.testing.assert_array_equal(sample["labels"], arrays[f"{key}/labels"][i])
    for i, loss_mask in enumerate(arrays.get(f"{key}/loss_mask", ())):
        sample = dataset[i]
        np.testing.assert_array_equal(sample["loss_mask"], loss_mask)
        np.testing.assert_array_equal(sample["position_ids"], arrays[f"{key}/position_ids"][i])
        packed = np.packbits(dense_attention_mask(sample["document_ids"]), axis=-1)
        np.testing.assert_array_equal(packed[None], arrays[f"{key}/attention_mask_packed"][i])


@pytest.mark.default(14)
@pytest.mark.parametrize("builder_name", ["compiled", "NumPy"])
@pytest.mark.parametrize("case_name", sorted(META))
def test_indices_and_samples_are_identical(case_name: str, builder_name: str, tmp_path: Path) -> None:
    builder: IndexBuilder = NumpyIndexBuilder() if builder_name == "NumPy" else select_index_builder(print)
    if builder.name != builder_name:
        pytest.skip("the C++ extension is not built: run python setup.py build_ext --inplace")
    case, arrays = META[case_name], np.load(GOLDEN / f"golden_{case_name}.npz")
    config = to_config(case, tmp_path)
    for _ in ("built", "read from the cache"):
        splits = BlendedDatasetBuilder(config, tuple(case["sizes"]), print, builder).build()
        for name in SPLIT_NAMES:
            dataset, meta = getattr(splits, name), case[name]
            if meta["kind"] == "GPT":
                assert_same_indices(dataset, meta, arrays, name)
            else:
                assert len(dataset) == meta["len"]
                for index in ("dataset_index", "dataset_sample_index"):
                    np.testing.assert_array_equal(getattr(dataset, index), arrays[f"{name}/{index}"])
                    assert getattr(dataset, index).dtype == arrays[f"{name}/{index}"].dtype
                for number, (part, part_meta) in enumerate(zip(dataset.datasets, meta["sub"], strict=True)):
                    assert_same_indices(part, part_meta, arrays, f"{name}/ds{number}")
                    assert_same_samples(part, arrays, f"{name}/ds{number}")
            assert_same_samples(dataset, arrays, name)


def test_split_shares_are_identical() -> None:
    checked = 0
    for case in META.values():
        if case["split_matrix"] is None:
            continue
        shares = parse_split(case["config"]["split"])
        bounds = np.array(case["split_matrix"])
        assert np.cumsum(shares).tolist() == bounds[:, 1].tolist()
        checked += 1
    assert checked == 7
