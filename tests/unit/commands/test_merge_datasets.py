from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.cli import merge_datasets
from megatron.cli.merge_datasets import merge
from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, checksums_path, verify_checksums
from megatron.core.errors import DataError
from tests.unit.core.datasets.indexed.document_copy import copy_documents


def write_parts(folder: Path, modes: bool, dtypes: tuple[str, ...] = ("u2", "u2", "u2", "u2")) -> list[Path]:
    """Write data sets of 0 to 12 documents of several sequences each."""
    folder.mkdir()
    draw = np.random.default_rng(2)
    prefixes = []
    for number, (dtype, num_documents) in enumerate(zip(dtypes, (7, 0, 12, 1))):
        prefixes.append(folder / f"part{number}")
        with IndexedDatasetBuilder(prefixes[-1], dtype, modes) as builder:
            for _ in range(num_documents):
                lengths = draw.integers(0, 9, draw.integers(0, 4)).tolist()
                tokens = draw.integers(0, 1000, sum(lengths))
                builder.add_document(tokens, lengths, [length % 3 for length in lengths] if modes else ())
            builder.finalize()
    return prefixes


@pytest.mark.parametrize("modes", [False, True])
def test_the_same_as_adding_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: bool) -> None:
    prefixes = write_parts(tmp_path / "parts", modes)
    with IndexedDatasetBuilder(tmp_path / "expected", "u2", modes) as builder:
        for prefix in prefixes:
            copy_documents(prefix, builder)
        builder.finalize()
    for piece_length in (5, 1 << 20):
        for module in (indexed_dataset, merge_datasets):
            monkeypatch.setattr(module, "PIECE_LENGTH", piece_length)
        merge(tmp_path / "parts", tmp_path / "merged", multimodal=modes)
        for suffix in (".bin", ".idx"):
            merged, expected = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("merged", "expected"))
            assert merged == expected
        assert list(verify_checksums(tmp_path / "merged")) == []
    merge(tmp_path / "parts", tmp_path / "merged", with_checksums=False)
    assert not checksums_path(tmp_path / "merged").exists()


def test_what_does_not_fit_together(tmp_path: Path) -> None:
    write_parts(tmp_path / "dtypes", False, ("u2", "u2", "i4", "u2"))
    with pytest.raises(DataError, match=r"part2 holds int32 tokens and .*part0 holds uint16"):
        merge(tmp_path / "dtypes", tmp_path / "out")
    write_parts(tmp_path / "plain", False)
    with pytest.raises(DataError, match=r"--multimodal: .*part0 has no sequence modes"):
        merge(tmp_path / "plain", tmp_path / "out", multimodal=True)
    with pytest.raises(DataError, match="cannot be written"):
        merge(tmp_path / "plain", tmp_path / "missing" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dtypes", "plain"]
