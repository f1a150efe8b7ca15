"""Files written in one go: every byte, its checksum, and what the file system refuses."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing.disk import SequentialFile, read_error, replace_text, write_error
from megatron.core.errors import DamagedCheckpointError, StorageError

SIZES = [0, 1, 4095, 4096, 4097, 10_000, 3 * 8192 + 5]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CHUNK_BYTES", 8192)


def parts(size: int) -> list[np.ndarray]:
    values = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return [values[: size // 3], values[size // 3 : size // 2], values[size // 2 :]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["direct", "cached", "refused late"])
def test_what_is_appended_is_in_the_file(tmp_path: Path, size: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "cached":
        monkeypatch.setattr(disk, "_DIRECT", 0)
    real_write = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if os.get_blocking(descriptor) and getattr(file, "_is_direct", False):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, data)

    expected = parts(size)
    with SequentialFile(tmp_path / "f", size) as file:
        if how == "refused late":
            monkeypatch.setattr(disk.os, "write", write)
        for part in expected:
            assert file.append(part) == zlib.crc32(part.tobytes())
    assert file.num_bytes == size
    assert (tmp_path / "f").read_bytes() == b"".join(part.tobytes() for part in expected)


def test_writes_that_stop_short_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(disk.os, "write", lambda descriptor, data: real_write(descriptor, data[:4096]))
    values = np.arange(40_000, dtype=np.uint8)
    with SequentialFile(tmp_path / "f") as file:
        file.append(values)
    assert (tmp_path / "f").read_bytes() == values.tobytes()


def write_eight_parts(path: Path) -> None:
    with SequentialFile(path) as file:
        for _ in range(8):
            file.append(np.zeros(5000, dtype=np.uint8))


def test_a_refusal_reaches_the_writer(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            write_eight_parts(tmp_path / "f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fail_within(path: Path) -> None:
    with SequentialFile(path) as file:
        file.append(b"abc")
        raise KeyError


def test_an_error_of_the_caller_closes_the_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyError):
        fail_within(tmp_path / "f")
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_and_the_folders_of_new_names_are_forced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[tuple[Path, bytes]] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        forced.append((path, b"" if path.is_dir() else path.read_bytes()))

    monkeypatch.setattr(disk.os, "fsync", fsync)
    with SequentialFile(tmp_path / "f") as file:
        file.append(b"abc")
    replace_text(tmp_path / "pointer", tmp_path / ".pointer", "3")
    assert forced == [(tmp_path / "f", b"abc"), (tmp_path / ".pointer", b"3"), (tmp_path, b"")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "pointer"]


def test_an_error_says_the_reason_and_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage._replace(free=7))
    path = tmp_path / "f"
    assert str(write_error(path, full, 5)) == (
        f"cannot write {path}: No space left on device; 5 bytes are needed for it, 7 are free"
    )
    assert str(write_error(path, full)) == f"cannot write {path}: No space left on device, 7 are free"
    assert str(write_error(path, OSError("it is shorter"))) == f"cannot write {path}: it is shorter, 7 are free"
    away = read_error("f", OSError(errno.ESTALE, os.strerror(errno.ESTALE)), "; lost: a")
    assert isinstance(away, StorageError)
    assert str(away) == "f: Stale file handle; start again when the file system answers"
    damaged = read_error("f", OSError(errno.EIO, os.strerror(errno.EIO)), "; lost: a")
    assert isinstance(damaged, DamagedCheckpointError)
    assert str(damaged) == "f: Input/output error; lost: a"
