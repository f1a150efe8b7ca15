"""Samples of a GPT data set: masks, positions, padding, and those that Megatron built from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset, make_sample
from megatron.core.datasets.gpt_dataset_config import SPLIT_NAMES, Blend, GPTDatasetConfig, parse_split
from megatron.core.datasets.index_builder import IndexBuilder, NumpyIndexBuilder, select_index_builder
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError, DataError
from tests.unit.core.datasets.oracles import dense_attention_mask


def open_text(
    tmp_path: Path, documents: list[list[int]], num_samples: int | None, split_name: str = "train", **options: object
) -> GPTDataset:
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()
    config = GPTDatasetConfig(**({"sequence_length": 4, "mock": True} | options))  # type: ignore[arg-type]
    dataset = IndexedDataset(tmp_path / "text")
    cache = IndexCache(None, print)
    return GPTDataset(dataset, range(len(dataset)), num_samples, split_name, config, NumpyIndexBuilder(), cache)


def test_samples_overlap_by_one_token_and_cover_the_epoch(tmp_path: Path) -> None:
    dataset = open_text(tmp_path, [list(range(10, 20)), [30, 31, 32], [], [40]], None)
    stream = [token for i in dataset.document_index for token in dataset.indexed_dataset[int(i)].tolist()]
    assert len(dataset) == 3  # 14 tokens: 1 + 3 * 4, one is left over
    by_place = {int(dataset.shuffle_index[i]): dataset[i] for i in range(3)}
    for place, sample in by_place.items():
        assert sample["tokens"].tolist() == stream[4 * place : 4 * place + 4]
        assert sample["labels"].tolist() == stream[4 * place + 1 : 4 * place + 5]
        assert sample["loss_mask"].tolist() == [1, 1, 1, 1]
        assert sample["position_ids"].tolist() == [0, 1, 2, 3]
        assert "document_ids" not in sample
    for index in (-1, 3):
        with pytest.raises(IndexError, match=f"^sample {index} of 3$"):
            dataset[index]


def test_a_short_last_validation_sample_is_padded(tmp_path: Path) -> None:
    options = {"drop_last_partial_validation_sequence": False}
    dataset = open_text(tmp_path, [list(range(1, 12))], None, "valid", **options)
    assert len(dataset) == 3
    (last,) = (dataset[i] for i in range(3) if dataset.shuffle_index[i] == 2)
    assert last["tokens"].tolist() == [9, 10, 11, 0]
    assert last["labels"].tolist() == [10, 11, 0, 0]
    assert last["loss_mask"].tolist() == [1, 1, 0, 0]
    assert len(open_text(tmp_path, [list(range(1, 12))], None, "train", **options)) == 2


def test_epochs_repeat_the_text_and_are_described(tmp_path: Path) -> None:
    dataset = open_text(tmp_path, [list(range(1, 10))], 11)
    assert dataset.usage.num_epochs == 5  # 45 tokens, 11 samples; 4 epochs give 8
    assert len(dataset) == 11
    assert dataset.usage.describe() == (
        f"train data {tmp_path / 'text'}: need 11 samples, have 2 in one epoch, reading 5 epochs"
    )
    with pytest.raises(DataError, match="no tokens"):
        open_text(tmp_path, [[], []], 3)


EOD = 7


@pytest.mark.parametrize("with_ends", [True, False])
@pytest.mark.parametrize("flags", range(8))
def test_resets_against_a_slow_definition(flags: int, with_ends: bool) -> None:
    config = GPTDatasetConfig(
        sequence_length=23,
        mock=True,
        eod_token_id=EOD,
        reset_position_ids=bool(flags & 1),
        reset_attention_mask=bool(flags & 2),
        eod_mask_loss=bool(flags & 4),
    )
    random = np.random.RandomState(flags)
    text = random.randint(0, 9, size=24).astype(np.int64)
    text[text == EOD] = 8
    if with_ends:
        text[[0, 5, 6, 13, 22, 23]] = EOD
    positions, ones = np.arange(23), np.ones(23, np.float32)
    sample = make_sample(text, 24, config, positions, ones)
    document, position = 0, 0
    documents, expected_positions = [], []
    for token in text[:-1].tolist():
        documents.append(document)
        expected_positions.append(position)
        document, position = (document + 1, 0) if token == EOD else (document, position + 1)
    assert sample["position_ids"].tolist() == (expected_positions if flags & 1 else list(range(23)))
    assert ("document_ids" in sample) == bool(flags & 2)
    if flags & 2:
        assert sample["document_ids"].tolist() == documents
        mask = dense_attention_mask(sample["document_ids"])
        for row in range(23):
            for column in range(23):
                assert mask[row, column] == (column > row or documents[row] != documents[column])
    assert sample["loss_mask"].tolist() == [0.0 if flags & 4 and token == EOD else 1.0 for token in text[:-1].tolist()]
    assert positions.tolist() == list(range(23))
    assert ones.tolist() == [1.0] * 23


def test_resets_need_an_end_of_document_token() -> None:
    with pytest.raises(ConfigurationError, match="no end-of-document token, which --reset-position-ids needs"):
        GPTDatasetConfig(sequence_length=4, mock=True, reset_position_ids=True)


def test_shared_arrays_cannot_be_written_to(tmp_path: Path) -> None:
    sample = open_text(tmp_path, [list(range(1, 10))], None)[0]
    for name in ("loss_mask", "position_ids"):
        with pytest.raises(ValueError, match="read-only"):
            sample[name][0] = 5  # type: ignore[literal-required]


def test_mock_data_is_a_function_of_seed_split_and_index() -> None:
    config = GPTDatasetConfig(sequence_length=50, mock=True, vocab_size=97, eod_token_id=96)
    one, two = MockGPTDataset(11, "train", config), MockGPTDataset(30, "train", config)
    assert len(one) == 11
    assert all(one[i]["tokens"].tolist() == two[i]["tokens"].tolist() for i in range(11))
    other_split = MockGPTDataset(11, "valid", config)
    assert any(one[i]["tokens"].tolist() != other_split[i]["tokens"].tolist() for i in range(11))
    with pytest.raises(IndexError):
        one[11]


def test_mock_data_can_be_learned() -> None:
    config = GPTDatasetConfig(sequence_length=50, mock=True, vocab_size=97, eod_token_id=96)
    dataset = MockGPTDataset(40, "train", config)
    followers: dict[int, set[int]] = {}
    for i in range(40):
        sample = dataset[i]
        assert 0 <= int(sample["tokens"].min()) <= int(sample["labels"].max()) < 97
        for token, label in zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True):
            if token != 96 and label != 96:
                followers.setdefault(token, set()).add(label)
    assert len(followers) > 80
    assert all(len(labels) == 1 for labels in followers.values())
    assert any(96 in dataset[i]["tokens"] for i in range(40))


@pytest.mark.parametrize(
    ("row", "split_name", "is_damage"),
    [(0, "train", True), (2, "train", True), (0, "valid", True), (1, "valid", True), (2, "valid", False)],
)
def test_only_the_last_validation_sample_may_be_short(
    row: int, split_name: str, is_damage: bool, tmp_path: Path
) -> None:
    options = {"drop_last_partial_validation_sequence": False}
    dataset = open_text(tmp_path, [list(range(1, 14))], None, split_name, **options)
    assert len(dataset) == 3
    dataset.sample_index[row + 1] = dataset.sample_index[row]
    (index,) = np.flatnonzero(dataset.shuffle_index == row).tolist()
    if is_damage:
        with pytest.raises(DataError, match=f"sample {index} of .* is out of range: the index in memory is damaged"):
            dataset[index]
    else:
        assert dataset[index]["loss_mask"].tolist() == [0, 0, 0, 0]


def test_an_index_is_not_built_from_damaged_lengths(tmp_path: Path) -> None:
    open_text(tmp_path, [[1, 2, 3, 4, 5], [6, 7, 8]], None)
    index = bytearray((tmp_path / "text.idx").read_bytes())
    index[34:42] = np.array([6, 3], "<i4").tobytes()
    (tmp_path / "text.idx").write_bytes(index)
    dataset, config = IndexedDataset(tmp_path / "text"), GPTDatasetConfig(sequence_length=4, mock=True)
    with pytest.raises(DataError, match="damaged at sequence 1"):
        GPTDataset(dataset, range(2), None, "train", config, NumpyIndexBuilder(), IndexCache(None, print))


@pytest.mark.parametrize(("vocab_size", "num_words"), [(None, 1023), (5000, 1023), (40, 39)])
def test_mock_data_walks_through_at_most_1024_words(vocab_size: int | None, num_words: int) -> None:
    config = GPTDatasetConfig(sequence_length=3000, mock=True, vocab_size=vocab_size, eod_token_id=3)
    dataset = MockGPTDataset(None, "train", config)
    assert len(dataset) == 1024
    words = set(dataset[0]["tokens"].tolist())
    assert words == set(range(num_words + 1))
    with pytest.raises(IndexError, match="sample 1024 of 1024"):
        dataset[1024]


def test_a_vocabulary_of_one_end_token_makes_no_data() -> None:
    with pytest.raises(DataError, match="a vocabulary of 1 ids has no tokens for mock data"):
        MockGPTDataset(1, "train", GPTDatasetConfig(sequence_length=4, mock=True, vocab_size=1, eod_token_id=0))


def test_positions_begin_anew_in_a_short_sample_whose_end_tokens_count() -> None:
    config = GPTDatasetConfig(sequence_length=5, mock=True, eod_token_id=EOD, reset_position_ids=True)
    text = np.array([1, EOD, 3, 4, 0, 0], np.int64)
    sample = make_sample(text, 4, config, np.arange(5), np.ones(5, np.float32))
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0, 0]
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2]
    assert sample["padding_mask"].tolist() == [False] * 4 + [True]


def test_two_ids_make_mock_data_of_documents_of_16_to_64_tokens() -> None:
    config = GPTDatasetConfig(sequence_length=400, mock=True, vocab_size=2, eod_token_id=1)
    dataset = MockGPTDataset(300, "train", config)
    lengths = set()
    for index in range(len(dataset)):
        sample = dataset[index]
        assert sample["position_ids"].tolist() == list(range(400))
        ends = np.flatnonzero(np.append(sample["tokens"], sample["labels"][-1]) == 1) + 1
        assert np.unique(np.diff(ends, prepend=0)).tolist() == [ends[0]]
        lengths.add(int(ends[0]))
    assert lengths == set(range(16, 65))


BLEND = Blend(("a", "b"), (0.5, 2.0))


@pytest.mark.parametrize(
    "fields",
    [
        {"mock": True, "sequence_length": 1},
        {"mock": True, "random_seed": 0},
        {"mock": True, "random_seed": 2**32 - 1},
        {"blend": BLEND, "split": "1"},
        {"blend_per_split": (BLEND, None, None)},
    ],
)
def test_a_description_without_a_problem(fields: dict[str, Any]) -> None:
    GPTDatasetConfig(**({"sequence_length": 4} | fields))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mock": True, "random_seed": -1}, "the seed is -1; set --seed to a value from 0 to 4294967295"),
        ({"mock": True, "random_seed": 2**32}, "the seed is 4294967296"),
        ({}, "0 data sources are set"),
        ({"blend": Blend((), None), "split": "1"}, "a blend has no data sets"),
        ({"blend": Blend(("a", "b"), (1.0,)), "split": "1"}, "a blend has 2 data sets and 1 weights"),
        ({"blend_per_split": (Blend(("a",), (float("inf"),)), None, None)}, "the weight of a is inf"),
    ],
)
def test_a_problem_names_the_flag(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        GPTDatasetConfig(**({"sequence_length": 4} | fields))
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_indices_lie_beside_the_data_or_in_the_cache() -> None:
    config = GPTDatasetConfig(sequence_length=4, blend=BLEND, split="1")
    assert config.index_folder("data/a") == Path("data/cache/GPTDataset_indices")
    assert config.index_folder("data/GPTDataset_indices/a") == Path("data/GPTDataset_indices")
    cached = GPTDatasetConfig(sequence_length=4, blend=BLEND, split="1", path_to_cache="elsewhere")
    assert cached.index_folder("data/a") == Path("elsewhere")


GOLDEN = Path(__file__).parents[3] / "golden" / "data"
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
