"""Files written in one go: every byte, its checksum, and what the file system refuses."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing.disk import SequentialFile, read_error, replace_text, sync_folder, write_error
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
        f"cannot write {path}: No space left on device; it needs 5 bytes, but 7 bytes are free"
    )
    assert str(write_error(path, full)) == f"cannot write {path}: No space left on device, but 7 bytes are free"
    assert (
        str(write_error(path, OSError("it is shorter"))) == f"cannot write {path}: it is shorter, but 7 bytes are free"
    )
    away = read_error("f", OSError(errno.ESTALE, os.strerror(errno.ESTALE)), "; lost: a")
    assert isinstance(away, StorageError)
    assert str(away) == "f: Stale file handle; restart when the file system is available"
    damaged = read_error("f", OSError(errno.EIO, os.strerror(errno.EIO)), "; lost: a")
    assert isinstance(damaged, DamagedCheckpointError)
    assert str(damaged) == "f: Input/output error; lost: a"


def test_a_written_file_and_a_synced_folder_leave_nothing_open(tmp_path: Path) -> None:
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    with SequentialFile(tmp_path / "f") as file:
        file.append(b"abc")
    sync_folder(tmp_path)
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert set(threading.enumerate()) <= threads


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """List the length of every write and whether it was direct, on a file system that takes all lengths.

    Another flag that changes nothing for a file stands for O_DIRECT.
    """
    found: list[tuple[int, bool]] = []
    real_write = os.write

    def write(descriptor: int, data: memoryview) -> int:
        found.append((len(data), not os.get_blocking(descriptor)))
        return real_write(descriptor, data)

    monkeypatch.setattr(disk, "_DIRECT", os.O_NONBLOCK)
    monkeypatch.setattr(disk.os, "write", write)
    return found


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, []),
        (5, [(5, False)]),
        (4096, [(4096, True)]),
        (4097, [(4096, True), (1, False)]),
        (8192, [(8192, True)]),
        (20_000, [(8192, True), (8192, True), (3616, False)]),
        (24_575, [(8192, True), (8192, True), (4096, True), (4095, False)]),
    ],
)
def test_whole_blocks_are_written_directly_and_the_rest_through_the_cache(
    tmp_path: Path, writes: list[tuple[int, bool]], size: int, expected: list[tuple[int, bool]]
) -> None:
    with SequentialFile(tmp_path / "f") as file:
        file.append(bytes(size))
    assert writes == expected


@pytest.mark.parametrize(
    ("expected_bytes", "gathered"), [(0, 4096), (4096, 4096), (4097, 8192), (8193, 8192), (10**12, 8192)]
)
def test_no_more_is_gathered_than_is_expected_or_a_chunk_has(
    tmp_path: Path, writes: list[tuple[int, bool]], expected_bytes: int, gathered: int
) -> None:
    with SequentialFile(tmp_path / "f", expected_bytes) as file:
        file.append(bytes(16_384))
    assert [length for length, _ in writes] == [gathered] * (16_384 // gathered)


def test_after_a_direct_write_that_stops_within_a_block_the_cache_takes_the_rest(
    tmp_path: Path, writes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = disk.os.write
    monkeypatch.setattr(disk.os, "write", lambda descriptor, data: recorded(descriptor, data[:5000]))
    with SequentialFile(tmp_path / "f") as file:
        file.append(bytes(8192))
    assert writes == [(5000, True), (3192, False)]


@pytest.mark.parametrize(
    ("number", "is_direct", "num_tries"), [(errno.EINVAL, True, 2), (errno.EINVAL, False, 1), (errno.ENOSPC, True, 1)]
)
def test_only_a_direct_write_that_is_invalid_is_tried_again(
    tmp_path: Path, number: int, is_direct: bool, num_tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []

    def refuse(descriptor: int, data: memoryview) -> int:
        tries.append(os.get_blocking(descriptor))
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "_DIRECT", os.O_NONBLOCK if is_direct else 0)
    monkeypatch.setattr(disk.os, "write", refuse)
    with pytest.raises(OSError, match=os.strerror(number)), SequentialFile(tmp_path / "f") as file:
        file.append(bytes(4096))
    assert tries == ([False, True] if num_tries == 2 else [not is_direct])


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def open_plainly(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_NONBLOCK:
            raise OSError(number, os.strerror(number))
        return real_open(path, flags, mode)

    monkeypatch.setattr(disk, "_DIRECT", os.O_NONBLOCK)
    monkeypatch.setattr(disk.os, "open", open_plainly)
    path = tmp_path / "f"
    if number == errno.EACCES:
        with pytest.raises(PermissionError):
            SequentialFile(path)
        return
    path.write_bytes(bytes(99))
    with SequentialFile(path) as file:
        file.append(b"abc")
    assert path.read_bytes() == b"abc"


def test_free_space_is_omitted_if_it_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "f"
    assert str(write_error(path, OSError(errno.EIO, "broken"), 5)) == (f"cannot write {path}: broken; it needs 5 bytes")
