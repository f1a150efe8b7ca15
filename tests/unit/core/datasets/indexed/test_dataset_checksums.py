from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.indexed_dataset import (
    Block,
    IndexedDatasetBuilder,
    checksum_blocks,
    checksums_path,
    verify_checksums,
)
from megatron.core.errors import DataError


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
