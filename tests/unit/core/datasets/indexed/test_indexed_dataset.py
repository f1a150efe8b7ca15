"""Token files: what is written is what is read, what is damaged is named."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import (
    DTYPE_CODES,
    IndexedDataset,
    IndexedDatasetBuilder,
    optimal_dtype,
    replace_tokens,
    write_checksums,
)
from megatron.core.errors import DataError
from tests.unit.core.datasets.indexed.document_copy import copy_documents

GOLDEN = Path(__file__).parents[4] / "golden" / "data"

DOCUMENTS = [([5, 6, 7], [2, 1]), ([], [0]), ([9, 1, 2, 3], [4]), ([8], [1])]


def write(prefix: Path, dtype: str = "u2", modes: bool = False) -> Path:
    with IndexedDatasetBuilder(prefix, dtype, modes) as builder:
        for tokens, lengths in DOCUMENTS:
            builder.add_document(np.array(tokens, np.int64), lengths, [len(lengths)] * len(lengths) if modes else ())
        builder.finalize()
    return prefix


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("code", sorted(DTYPE_CODES))
def test_round_trip_in_every_dtype(code: int, mapped: bool, tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", DTYPE_CODES[code].str, modes=code % 2 == 0)
    dataset = IndexedDataset(prefix, mmap_bin_files=mapped)
    assert dataset.dtype == DTYPE_CODES[code]
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (5, 4, 8)
    assert [dataset[i].tolist() for i in range(5)] == [[5, 6], [7], [], [9, 1, 2, 3], [8]]
    assert dataset.get(3, 1).tolist() == [1, 2, 3]
    assert dataset.get(3, offset=2, length=1).tolist() == [2]
    assert dataset.document_indices.tolist() == [0, 2, 3, 4, 5]
    assert dataset.sequence_pointers.tolist() == [n * dataset.dtype.itemsize for n in (0, 2, 3, 3, 7)]
    assert (None if dataset.sequence_modes is None else dataset.sequence_modes.tolist()) == (
        [2, 2, 1, 1, 1] if code % 2 == 0 else None
    )
    dataset.verify_structure()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("name", ["a_u16", "b_i32", "c_multi"])
def test_writes_the_bytes_that_megatron_writes(name: str, tmp_path: Path) -> None:
    source = IndexedDataset(GOLDEN / name)
    builder = IndexedDatasetBuilder(tmp_path / name, source.dtype)
    copy_documents(GOLDEN / name, builder)
    builder.finalize()
    for suffix in (".bin", ".idx"):
        original = (GOLDEN / f"{name}{suffix}").read_bytes()
        assert (tmp_path / f"{name}{suffix}").read_bytes() == original


def test_tokens_are_on_the_disk_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: dict[int, int] = {}
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def replace(source: str | Path, target: str | Path) -> None:
        assert on_disk[os.stat(source).st_ino] == os.stat(source).st_size, target
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write(tmp_path / "data")
    assert IndexedDataset(tmp_path / "data").num_tokens == 8


def test_empty_dataset(tmp_path: Path) -> None:
    IndexedDatasetBuilder(tmp_path / "empty", np.int32).finalize()
    dataset = IndexedDataset(tmp_path / "empty")
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)


def test_nothing_is_left_of_an_abandoned_writer(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        builder.add_document([1, 2], [2])
        assert not (tmp_path / "data.bin").exists()
    assert list(tmp_path.iterdir()) == []


def test_no_hidden_file_is_left_of_a_writer_that_cannot_publish_its_index(tmp_path: Path) -> None:
    (tmp_path / "data.idx").mkdir()
    with IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        builder.add_document([1, 2], [2])
        with pytest.raises(DataError, match="cannot be written"):
            builder.finalize()
    assert {path.name for path in tmp_path.iterdir()} <= {"data.bin", "data.idx"}


def test_builder_refuses_what_it_cannot_store(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        with pytest.raises(DataError, match="token 65536 does not fit uint16"):
            builder.add_document([3, 65536], [2])
        with pytest.raises(DataError, match="token -1 does not fit"):
            builder.add_document([3, -1], [2])
        with pytest.raises(DataError, match="lengths sum to 3, the document has 2"):
            builder.add_document([3, 4], [3])
    with pytest.raises(DataError, match="complex"):
        IndexedDatasetBuilder(tmp_path / "data", "c16")
    with pytest.raises(DataError, match="cannot be written"):
        IndexedDatasetBuilder(tmp_path / "missing-folder" / "data", "u2")


def test_optimal_dtype() -> None:
    assert [optimal_dtype(size).name for size in (50257, 65499, 65500, None)] == ["uint16", "uint16", "int32", "int32"]


@pytest.mark.parametrize("mapped", [True, False])
def test_pickled_copy_reads_again(mapped: bool, tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "data"), mmap_bin_files=mapped)
    payload = pickle.dumps(dataset)
    assert len(payload) < 300
    assert pickle.loads(payload).get(3).tolist() == [9, 1, 2, 3]


def one_line(error: DataError) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_missing_files_are_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    (tmp_path / "data.bin").unlink()
    with pytest.raises(DataError, match=r"data\.bin does not exist"):
        IndexedDataset(prefix)
    with pytest.raises(DataError, match=r"other\.idx does not exist"):
        IndexedDataset(tmp_path / "other")


def test_every_truncation_is_found(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    for suffix in (".idx", ".bin"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError) as caught:
                IndexedDataset(prefix)
            assert str(path) in one_line(caught.value)
        path.write_bytes(whole)
    assert len(IndexedDataset(prefix)) == 5


def test_longer_bin_does_not_belong_to_its_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    with open(tmp_path / "data.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"does not belong to its \.idx: it has 18 bytes, its index describes 16"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [(0, b"X", "not an index file"), (9, b"\x02", "format version 2"), (17, b"\x09", "dtype code 9")],
)
def test_wrong_headers_are_named(offset: int, value: bytes, words: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    content = bytearray((tmp_path / "data.idx").read_bytes())
    content[offset : offset + 1] = value
    (tmp_path / "data.idx").write_bytes(content)
    with pytest.raises(DataError, match=words):
        IndexedDataset(prefix)


@pytest.mark.parametrize("mapped", [True, False])
def test_flipped_index_bytes_give_an_error_or_data_of_the_file(mapped: bool, tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    whole = (tmp_path / "data.idx").read_bytes()
    present = set(np.fromfile(tmp_path / "data.bin", np.uint16).tolist())
    outcomes = {"refused": 0, "read": 0}
    for offset in range(len(whole)):
        for bit in (0x01, 0x80):
            flipped = bytearray(whole)
            flipped[offset] ^= bit
            (tmp_path / "data.idx").write_bytes(flipped)
            try:
                dataset = IndexedDataset(prefix, mmap_bin_files=mapped)
                for i in range(len(dataset)):
                    tokens = dataset.get(i).tolist()
                    assert dataset.dtype != np.uint16 or present.issuperset(tokens)
                dataset.verify_structure()
                outcomes["read"] += 1
            except DataError as error:
                one_line(error)
                outcomes["refused"] += 1
    assert outcomes["refused"] > 0.8 * 2 * len(whole)


def test_reads_outside_a_sequence_are_refused(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(tmp_path / "data"))
    for arguments in ((5,), (-1,), (3, 5), (3, -1), (3, 2, 3), (3, 0, -1)):
        with pytest.raises(DataError):
            dataset.get(*arguments)


def test_header_has_the_documented_layout(tmp_path: Path) -> None:
    write(tmp_path / "data")
    content = (tmp_path / "data.idx").read_bytes()
    assert content[:9] == b"MMIDIDX\0\0"
    assert struct.unpack_from("<QBQQ", content, 9) == (1, 8, 5, 5)
    assert len(content) == 34 + 5 * 4 + 5 * 8 + 5 * 8
    assert os.path.getsize(tmp_path / "data.bin") == 16


@pytest.mark.parametrize("given", ["corpus.jsonl", "corpus"])
def test_raw_text_is_named_with_the_command_that_tokenizes_it(given: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    command = (
        "python tools/preprocess_data.py --input .*/corpus.jsonl --output-prefix corpus .* give corpus_text_document"
    )
    with pytest.raises(
        DataError, match=f"corpus.jsonl is raw text, not a tokenized data set; tokenize it first: {command}"
    ):
        IndexedDataset(tmp_path / given)


def test_replaced_tokens_leave_no_index_and_no_checksums_of_the_old_ones(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data")
    write_checksums(prefix)
    tokens = tmp_path / "new tokens"
    tokens.write_bytes(b"abcd")
    replace_tokens(prefix, tokens)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"data.bin": b"abcd"}


def test_nothing_is_added_to_an_abandoned_data_set(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        builder.add_document([1, 2])
    with pytest.raises(ValueError, match="closed file"):
        builder.add_document([3])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("place", "value"), [(0, 1), (1, 3)])
def test_documents_that_do_not_rise_from_0_are_named(place: int, value: int, tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "data", np.uint16) as builder:
        for _ in range(2):
            builder.add_document([1])
        builder.finalize()
    path = tmp_path / "data.idx"
    index = bytearray(path.read_bytes())
    start = len(index) - 8 * (3 - place)
    index[start : start + 8] = value.to_bytes(8, "little")
    path.write_bytes(index)
    with pytest.raises(DataError, match="its document indices do not rise from 0"):
        IndexedDataset(tmp_path / "data").verify_structure()


def test_the_largest_and_the_smallest_token_of_a_type_are_stored(tmp_path: Path) -> None:
    for dtype in (np.uint8, np.int8, np.uint16, np.int16):
        limits = np.iinfo(dtype)
        with IndexedDatasetBuilder(tmp_path / "data", dtype) as builder:
            builder.add_document([limits.min, limits.max])
            builder.finalize()
        assert IndexedDataset(tmp_path / "data")[0].tolist() == [limits.min, limits.max]
