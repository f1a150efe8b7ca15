"""Durable writes of files and folders (fsync), direct I/O for large files, storage errors, and CRC-32.

A CRC is linear: the register of a whole, started at zero, is the exclusive or of the registers of its parts, each
padded with zeros for the bytes of the other parts. So ranks that read different parts of a stored tensor can verify
its single checksum together.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import CheckpointError, DamagedCheckpointError, InputError, StorageError
from megatron.core.object_store import ObjectPath, ObjectStoreError, reason_of

CHUNK_BYTES = 16 * 1024 * 1024
_ALIGNMENT = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux only
_UNREACHABLE = (errno.ETIMEDOUT, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNREFUSED)
"""Error codes of a file system whose server is unreachable: NFS, or a file system in user space."""


class CheckpointWriteError(CheckpointError):
    """Failed write of a checkpoint; earlier checkpoints are still in place."""


class SequentialFile:
    """Append to a new file with direct I/O, and sync it to disk when the context exits.

    Bytes are collected in one of two aligned buffers while a second thread writes the other one to disk. The page cache
    would copy each byte once more, keep the unused copy in memory, and start to write only when it is full or when the
    file is synced. On a file system without direct I/O, ordinary writes are used.

    No method holds the GIL for more than a few calls, so that other threads can work meanwhile.
    """

    def __init__(self, path: Path, expected_bytes: int = CHUNK_BYTES) -> None:
        self.num_bytes = 0
        self._descriptor, self._is_direct = _open_new(path)
        size = max(min(-(-expected_bytes // _ALIGNMENT) * _ALIGNMENT, CHUNK_BYTES), _ALIGNMENT)
        # Anonymous mappings are page-aligned, and their memory is returned to the system as a whole.
        self._buffers = [np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8) for _ in range(2)]
        self._num_gathered = 0
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint disk")
        self._writing: Future[None] | None = None

    def __enter__(self) -> SequentialFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the remaining bytes, sync the file and close it; after an error only close it."""
        try:
            if kind is None:
                self._hand_over()
                self._wait()
                os.fsync(self._descriptor)
        finally:
            self._disk.shutdown()
            os.close(self._descriptor)

    def append(self, data: NDArray[np.uint8] | bytes) -> int:
        """Append the bytes and return their CRC-32; an error of an earlier write may be raised here.

        Raises:
            OSError: the file cannot be written.
        """
        source = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
        crc = start = 0
        while start < source.size:
            buffer = self._buffers[0]
            count = min(buffer.size - self._num_gathered, source.size - start)
            part = buffer[self._num_gathered : self._num_gathered + count]
            np.copyto(part, source[start : start + count])
            crc = zlib.crc32(part.data, crc)
            self._num_gathered += count
            start += count
            if self._num_gathered == buffer.size:
                self._hand_over()
        self.num_bytes += source.size
        return crc

    def _hand_over(self) -> None:
        """Start writing the filled buffer, and collect in the other one."""
        self._wait()
        full = self._buffers[0].data[: self._num_gathered]
        self._writing = self._disk.submit(self._write, full)
        self._buffers.reverse()
        self._num_gathered = 0

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, data: memoryview) -> None:
        while data:
            aligned = len(data) // _ALIGNMENT * _ALIGNMENT
            if self._is_direct and not aligned:
                self._write_through_cache()
            try:
                count = os.write(self._descriptor, data[:aligned] if self._is_direct else data)
            except OSError as failure:
                if failure.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._write_through_cache()  # the file was opened for direct I/O but rejects it
                continue
            data = data[count:]
            if count % _ALIGNMENT:
                self._write_through_cache()

    def _write_through_cache(self) -> None:
        if self._is_direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
            self._is_direct = False


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries (new files, renames) to disk; a no-op for object stores."""
    if isinstance(folder, ObjectPath):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file and sync it to disk."""
    if isinstance(path, ObjectPath):
        path.write_bytes(text.encode())
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, hidden: Path, text: str) -> None:
    """Replace a small file atomically: on file systems, by writing to ``hidden`` and renaming it.

    Raises:
        OSError: the file system reports an error.
    """
    if isinstance(path, ObjectPath):
        write_text(path, text)
        return
    write_text(hidden, text)
    os.rename(hidden, path)
    sync_folder(path.parent)


def write_error(path: Path, failure: OSError, needed_bytes: int = 0) -> CheckpointWriteError:
    """Build the error for a failed write: the path, the reason, the bytes needed and the bytes free."""
    need = f"; it needs {needed_bytes} bytes" if needed_bytes else ""
    try:
        free = "" if isinstance(path, ObjectPath) else f", but {shutil.disk_usage(path.parent).free} bytes are free"
    except OSError:
        free = ""
    return CheckpointWriteError(f"cannot write {path}: {reason_of(failure)}{need}{free}")


def read_error(message: str, failure: OSError, consequence: str = "") -> InputError:
    """Build the error for a failed read: damage, unless the file system or object store cannot be reached.

    ``message`` precedes the reason; ``consequence`` follows it if the file is damaged.
    """
    if isinstance(failure, ObjectStoreError) and not isinstance(failure, FileNotFoundError):
        return failure
    reason = reason_of(failure)
    if failure.errno in _UNREACHABLE:
        return StorageError(f"{message}: {reason}; restart when the file system is available")
    return DamagedCheckpointError(f"{message}: {reason}{consequence}")


def _open_new(path: Path) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, 0o666), True
        except OSError as failure:
            if failure.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
    return os.open(path, flags, 0o666), False


_POLYNOMIAL = 0xEDB88320
_ONES = 0xFFFFFFFF
_ONE = 1 << 31
"""The polynomial 1: a register's highest bit is the coefficient of x**0."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    return f"{zlib.crc32(data):08x}"


def partial_checksum(runs: Iterable[tuple[int, memoryview]], num_bytes: int) -> int:
    """Return the contribution of runs, given as (offset, bytes), to the CRC-32 of ``num_bytes`` that contain them.

    Runs are in order and do not overlap. Many equal gaps between them, as between columns of a matrix, are cheap.
    """
    register, position = 0, 0
    for start, data in runs:
        if register and start != position:
            first, second, third, fourth = _zeros_tables(start - position)
            register = (
                first[register & 0xFF]
                ^ second[register >> 8 & 0xFF]
                ^ third[register >> 16 & 0xFF]
                ^ fourth[register >> 24]
            )
        register = zlib.crc32(data, register ^ _ONES) ^ _ONES
        position = start + len(data)
    return _multiply(register, _power(num_bytes - position))


def join_checksums(parts: Iterable[int], num_bytes: int) -> str:
    """Return the CRC-32 of the whole, as eight hex digits, from the contributions of all its parts."""
    register = _multiply(_ONES, _power(num_bytes)) ^ _ONES
    for part in parts:
        register ^= part
    return f"{register:08x}"


@functools.lru_cache(maxsize=256)
def _zeros_tables(count: int) -> tuple[tuple[int, ...], ...]:
    """Return the effect of ``count`` zero bytes on a register, as one table for each of its four bytes."""
    factor = _power(count)
    bits = [_multiply(1 << bit, factor) for bit in range(32)]
    tables = []
    for first_bit in range(0, 32, 8):
        table = [0]
        for bit in range(first_bit, first_bit + 8):
            table += [entry ^ bits[bit] for entry in table]
        tables.append(tuple(table))
    return tuple(tables)


def _power(num_bytes: int) -> int:
    """Return x to the power of the number of bits in ``num_bytes``, modulo the polynomial."""
    result = _ONE
    for exponent in range(num_bytes.bit_length()):
        if num_bytes >> exponent & 1:
            result = _multiply(result, _square(exponent))
    return result


@functools.cache
def _square(exponent: int) -> int:
    """Return the factor by which appending ``2**exponent`` zero bytes multiplies a register."""
    if exponent == 0:
        return _ONE >> 8
    half = _square(exponent - 1)
    return _multiply(half, half)


def _multiply(left: int, right: int) -> int:
    """Multiply two registers as polynomials, modulo the polynomial."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = left << 1 & _ONES
        right = right >> 1 ^ (_POLYNOMIAL if right & 1 else 0)
    return product
