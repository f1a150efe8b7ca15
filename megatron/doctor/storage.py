"""File systems of a run's folders: kind, space, speed, and whether they do what checkpoints and data rely on."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron.doctor.finding import Finding, judge

_GIB = 2**30
_MIB = 2**20
PROBE_BYTES = 64 * _MIB
_MIN_FREE_GIB = 20.0
_MIN_WRITE_MIB_S = 100.0
_KINDS = {
    "tmpfs": "it is memory, and empty after a restart",
    "ramfs": "it is memory, and empty after a restart",
    "overlay": "it is the container's own layer, and goes with the container",
}


def examine_save(folder: Path, mounts: str) -> Iterator[Finding]:
    """Yield how well the folder of ``--save`` takes checkpoints; files of a probe are gone afterwards."""
    subject = f"--save {folder}"
    try:
        place = _existing(folder)
    except OSError as error:
        text = f"cannot be made: {error.strerror}: {error.filename}"
        yield Finding("wrong", subject, text, "change --save, or the rights of the folders above it")
        return
    kind = file_system_of(place, mounts)
    yield judge(subject, kind in _KINDS, f"on {kind}" + _reason(kind), "save to a disk that stays")
    free = shutil.disk_usage(place).free
    yield judge(
        subject,
        free < _MIN_FREE_GIB * _GIB,
        f"{free / _GIB:.1f} GiB free",
        "make room: a checkpoint takes 14 to 18 bytes a parameter, and one more is there while it is replaced",
    )
    try:
        yield from _probe(place, subject)
    except OSError as error:
        yield Finding("wrong", subject, f"cannot be written: {error}", "change --save, or the rights of the folder")


def examine_data(prefix: str, mounts: str) -> Iterator[Finding]:
    """Yield whether the token files of a prefix of ``--data-path`` can be mapped into memory."""
    subject = f"--data-path {prefix}"
    paths = [Path(prefix + suffix) for suffix in (".bin", ".idx")]
    remedy = "give the prefix of the two files that tools/preprocess_data.py writes"
    try:
        missing = [path.name for path in paths if not path.is_file()]
        empty = [path.name for path in paths if path.name not in missing and not path.stat().st_size]
    except OSError as error:
        yield Finding("wrong", subject, f"cannot be looked at: {error.strerror}", remedy)
        return
    if missing or empty:
        texts = [(missing, f"not found in {paths[0].parent}"), (empty, "without content")]
        text = "; ".join(f"{' and '.join(names)} {problem}" for names, problem in texts if names)
        yield Finding("wrong", subject, text, remedy)
        return
    try:
        for path in paths:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                content[-1]
    except (OSError, ValueError) as error:
        yield Finding("wrong", subject, f"cannot be mapped: {error}", "copy the data to another file system")
        return
    size = sum(path.stat().st_size for path in paths)
    yield Finding("ok", subject, f"{size / _GIB:.2f} GiB on {file_system_of(paths[0], mounts)}, can be mapped")


def file_system_of(path: Path, mounts: str) -> str:
    """Return the kind of the file system of a path, by the text of ``/proc/mounts``."""
    target = str(path.resolve())
    kind, longest = "an unknown file system", -1
    for line in mounts.splitlines():
        _, point, name, *_ = line.split()
        # The kernel writes a space in a name as its octal code.
        point = point.replace("\\040", " ")
        if len(point) >= longest and (target == point or target.startswith(point.rstrip("/") + "/")):
            kind, longest = name, len(point)
    return kind


def _reason(kind: str) -> str:
    return f": {_KINDS[kind]}" if kind in _KINDS else ""


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists.

    Raises:
        OSError: a file or a link to nothing is in its way, or nobody can tell whether it is there.
    """
    for place in (folder.absolute(), *folder.absolute().parents):
        try:
            is_folder = stat.S_ISDIR(place.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                raise FileNotFoundError(errno.ENOENT, "a link to a folder that is not there", str(place)) from None
            continue
        if not is_folder:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(place))
        return place.resolve()
    raise AssertionError("the root is there")


def _probe(place: Path, subject: str) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as name:
        written, published = Path(name) / "written", Path(name) / "published"
        block = os.urandom(_MIB)
        start = time.perf_counter()
        with written.open("wb") as file:
            for _ in range(PROBE_BYTES // _MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        speed = PROBE_BYTES / _MIB / (time.perf_counter() - start)
        text = f"writes {speed:.0f} MiB/s with fsync, {PROBE_BYTES // _MIB} MiB"
        yield judge(subject, speed < _MIN_WRITE_MIB_S, text, "saves will wait for it: take a faster disk")
        published.write_bytes(b"old")
        os.replace(written, published)
        is_whole = not written.exists() and published.stat().st_size == PROBE_BYTES
        text = "a rename takes the place of a file" if is_whole else "a rename did not take the place of a file"
        yield judge(subject, not is_whole, text, "checkpoints are published by renaming: take another disk", "wrong")
        with published.open("rb") as read, mmap.mmap(read.fileno(), 0, access=mmap.ACCESS_READ) as content:
            is_same = content[:_MIB] == block
        text = "a file can be mapped" if is_same else "a mapped file is not what was written"
        yield judge(subject, not is_same, text, "checkpoints are read by mapping: take another disk", "wrong")
