"""Token files: what is written is what is read, its checksums are kept, and what is damaged is named."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.indexed_dataset import (
    DTYPE_CODES,
    Block,
    IndexedDataset,
    IndexedDatasetBuilder,
    checksum_blocks,
    checksums_path,
    optimal_dtype,
    replace_tokens,
    verify_checksums,
    write_checksums,
)
from megatron.core.errors import DataError
from tests.unit.core.datasets.oracles import copy_documents

GOLDEN = Path(__file__).parents[3] / "golden" / "data"

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
        with pytest.raises(DataError, match="token 65536 does not fit in uint16"):
            builder.add_document([3, 65536], [2])
        with pytest.raises(DataError, match="token -1 does not fit"):
            builder.add_document([3, -1], [2])
        with pytest.raises(DataError, match="lengths sum to 3, but the document has 2"):
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
    with pytest.raises(DataError, match=r"does not belong to its \.idx: it has 18 bytes, but its index describes 16"):
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
    message = (
        r"corpus.jsonl is raw text, not a tokenized data set; pass --train-data .*/corpus.jsonl \(--valid-data, "
        r"--test-data\), or tokenize it with tools/preprocess_data.py and pass PREFIX_text_document"
    )
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / given)


@pytest.mark.parametrize("given", ["corpus", "corpus_text_document.bin", "corpus_text_document.idx"])
def test_a_name_next_to_a_data_set_is_answered_with_its_prefix(given: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus_text_document")
    with pytest.raises(DataError, match=f"{tmp_path / given}.idx does not exist; did you mean {prefix}[?]"):
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
    with pytest.raises(DataError, match="its document indices do not increase from 0"):
        IndexedDataset(tmp_path / "data").verify_structure()


def test_the_largest_and_the_smallest_token_of_a_type_are_stored(tmp_path: Path) -> None:
    for dtype in (np.uint8, np.int8, np.uint16, np.int16):
        limits = np.iinfo(dtype)
        with IndexedDatasetBuilder(tmp_path / "data", dtype) as builder:
            builder.add_document([limits.min, limits.max])
            builder.finalize()
        assert IndexedDataset(tmp_path / "data")[0].tolist() == [limits.min, limits.max]


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a data set of 300 bytes of tokens in blocks of 128."""
    monkeypatch.setattr(indexed_dataset, "CHECKSUM_BLOCK_BYTES", 128)
    prefix = tmp_path / "data"
    with IndexedDatasetBuilder(prefix, "u2") as builder:
        for length in (40, 0, 110):
            builder.add_document(np.arange(length))
        builder.finalize()
    indexed_dataset.write_checksums(prefix)
    return prefix


def test_an_intact_data_set_has_no_damage(prefix: Path) -> None:
    stored = json.loads(checksums_path(prefix).read_text())
    assert stored["bin"]["block_bytes"] == [128, 128, 44]
    assert list(verify_checksums(prefix)) == []
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["data.bin", "data.checksums.json", "data.idx"]


def test_every_flip_is_named(prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        path = Path(f"{prefix}{suffix}")
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :])
            (damage,) = verify_checksums(prefix)
            assert damage.path == path
            assert damage.start <= position < damage.stop <= damage.start + 128
        path.write_bytes(whole)


def test_two_flips_in_two_blocks_are_two_damages(prefix: Path) -> None:
    path = Path(f"{prefix}.bin")
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    data[299] ^= 128
    path.write_bytes(data)
    assert [(damage.start, damage.stop) for damage in verify_checksums(prefix)] == [(0, 128), (256, 300)]


def test_sizes_are_checked(prefix: Path) -> None:
    path = Path(f"{prefix}.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    (damage,) = verify_checksums(prefix)
    assert str(damage) == f"{path}: bytes 200 to 300: missing: the file ends after 200 of 300 bytes"
    path.write_bytes(whole + b"xy")
    (damage,) = verify_checksums(prefix)
    assert str(damage) == f"{path}: bytes 300 to 302: 2 bytes too many"
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(verify_checksums(prefix))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 1, "algorithm": "crc32", "bin": {"block_bytes": [1], "crc32": []}}',
        *(
            f'{{"format": 1, "algorithm": "crc32", "bin": {{"block_bytes": [{size}], "crc32": ["0"]}}, '
            '"idx": {"block_bytes": [], "crc32": []}}'
            for size in ("-1", "true", '"1"', "1.0")
        ),
    ],
)
def test_a_damaged_checksum_file_is_named(prefix: Path, content: str) -> None:
    checksums_path(prefix).write_text(content)
    with pytest.raises(DataError, match=r"data\.checksums\.json is damaged"):
        list(verify_checksums(prefix))
    checksums_path(prefix).unlink()
    with pytest.raises(DataError, match="does not exist"):
        list(verify_checksums(prefix))


def test_a_data_set_that_is_written_again_loses_its_old_checksums(prefix: Path) -> None:
    with IndexedDatasetBuilder(prefix, "u2") as builder:
        builder.add_document([1])
        builder.finalize()
    assert not checksums_path(prefix).exists()


def test_data_in_parts_has_the_blocks_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "CHECKSUM_BLOCK_BYTES", 4)
    assert [block.num_bytes for block in checksum_blocks(b"abcdefghi")] == [4, 4, 1]
    assert checksum_blocks(b"123456789"[:0]) == []
    monkeypatch.setattr(indexed_dataset, "CHECKSUM_BLOCK_BYTES", 9)
    assert checksum_blocks(b"123456789") == [Block(9, 0xCBF43926)]


def test_progress_counts_every_byte(prefix: Path) -> None:
    whole = 300 + Path(f"{prefix}.idx").stat().st_size
    for do in (
        lambda read: list(verify_checksums(prefix, read)),
        lambda read: indexed_dataset.write_checksums(prefix, read=read),
    ):
        told: list[int] = []
        do(told.append)
        assert sum(told) == whole
        assert max(told) == 128


def test_checksums_are_on_the_disk_before_they_get_their_name(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: dict[int, int] = {}
    replaced: list[Path] = []
    real_replace = os.replace

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        on_disk[status.st_ino] = status.st_size

    def replace(source: Path, target: Path) -> None:
        assert on_disk[os.stat(source).st_ino] == os.stat(source).st_size > 0
        replaced.append(target)
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    indexed_dataset.write_checksums(prefix)
    assert len(replaced) == 1


def test_nothing_is_left_of_checksums_that_cannot_be_written(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: Path, target: Path) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(DataError, match="cannot be written: disk is full"):
        indexed_dataset.write_checksums(prefix)
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["data.bin", "data.checksums.json", "data.idx"]
