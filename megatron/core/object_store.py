"""Object stores such as S3 through fsspec: client, object paths, read-ahead, uploads and local copies.

`ObjectPath` is a URL such as s3://bucket/run as a `Path`, so that checkpoint code handles local and remote paths alike.
Only this module imports fsspec and the store's package, when the first URL is used. Credentials and endpoints come from
the package's own sources (environment, configuration files, the node's role), never from a URL or a flag. Importing
this module imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PosixPath
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import StorageError

PACKAGES: Mapping[str, str] = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "memory": "fsspec", "file": "fsspec"}
"""URL schemes and the package that each needs."""

PART_BYTES = 8 << 20
"""Longer ranges are read as several concurrent requests."""
_MOST_PARTS = 9000
_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_CONDITION_FAILED = ("PreconditionFailed", "ConditionNotMet", "conditionNotMet", "BlobAlreadyExists")
_SECRET = re.compile(r"//[^/\s@]*@|\?\S+|(?i:secret|signature|password|credential|token|key)\S*\s*[=:]\s*\S+")
_LONGEST_REASON = 300
Result = TypeVar("Result")


class ObjectStoreError(StorageError, OSError):
    """Failed operation of a store; ``strerror`` is the reason in one line, with possible credentials removed."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class ObjectMissingError(ObjectStoreError, FileNotFoundError):
    """Missing object or bucket."""


class ObjectExistsError(ObjectStoreError, FileExistsError):
    """Object to be created that already exists."""


class ObjectRefusedError(ObjectStoreError, PermissionError):
    """Operation for which the user has no permission."""


@dataclass(frozen=True)
class ObjectEntry:
    """Entry of a folder; ``num_bytes`` is None for a subfolder."""

    name: str
    num_bytes: int | None


class ObjectStore:
    """Objects of one fsspec file system, by URL; transient failures are retried for 15 seconds.

    Raises:
        ObjectStoreError: any other failure.
    """

    def __init__(self, file_system: Any, scheme: str) -> None:
        self._files = file_system
        self._scheme = scheme

    def attempt(self, url: str, action: Callable[[], Result]) -> Result:
        """Return the result of an action on an object; retry it after transient failures.

        Raises:
            ObjectStoreError: the failure is permanent, or the retries are used up.
        """
        for delay_s in (*_DELAYS_S, None):
            try:
                return action()
            except Exception as error:
                if delay_s is None or _is_final(error):
                    raise _as_store_error(error, url) from error
                time.sleep(delay_s * random.uniform(0.5, 1.5))
        raise AssertionError("the last attempt returns or raises")

    def entries(self, url: str) -> list[ObjectEntry]:
        """List the direct entries of a folder by name; return an empty list if there is no such folder."""
        key = self._key(url)

        def list_once() -> list[Mapping[str, Any]]:
            self._files.invalidate_cache()
            return list(self._files.ls(key, detail=True))

        try:
            found = self.attempt(url, list_once)
        except FileNotFoundError:
            return []
        entries = [
            ObjectEntry(
                entry["name"].rstrip("/").rpartition("/")[2],
                None if entry["type"] == "directory" else int(entry["size"]),
            )
            for entry in found
            if entry["name"].rstrip("/") != key.rstrip("/")
        ]
        return sorted(entries, key=lambda entry: entry.name)

    def size(self, url: str) -> int:
        """Return the number of bytes of an object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        info = self._info(url)
        if info["type"] == "directory":
            raise ObjectMissingError(errno.ENOENT, os.strerror(errno.ENOENT), url)
        return int(info["size"])

    def is_folder(self, url: str) -> bool:
        """Return whether a folder has any entries."""
        try:
            return str(self._info(url)["type"]) == "directory"
        except FileNotFoundError:
            return False

    def modified(self, url: str) -> float:
        """Return the time of an object's last write, by the store's clock, in seconds since 1970."""
        return float(self.attempt(url, lambda: self._files.modified(self._key(url))).timestamp())

    def read(self, url: str, start: int, end: int) -> bytes:
        """Return the bytes ``[start, end)`` of an object, fewer if it is shorter."""
        cuts = [*range(start, end, PART_BYTES), end]
        return b"".join(self.read_ranges(url, list(itertools.pairwise(cuts))))

    def read_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges of an object, requested concurrently."""
        if not ranges:
            return []
        key = self._key(url)
        starts, ends = (list(bounds) for bounds in zip(*ranges))
        found: list[bytes] = self.attempt(
            url, lambda: self._files.cat_ranges([key] * len(starts), starts, ends, on_error="raise")
        )
        return found

    def put(self, url: str, data: bytes) -> None:
        """Write a whole object, replacing an existing one."""
        self.attempt(url, lambda: self._files.pipe_file(self._key(url), data))

    def create(self, url: str, data: bytes) -> None:
        """Create a new object; of several concurrent writers, only one succeeds.

        Raises:
            FileExistsError: the object exists.
        """
        try:
            self.attempt(url, lambda: self._create(self._key(url), data))
        except FileExistsError:
            # The response of a first attempt may have been lost: then the object is already the one that we wrote.
            if self.size(url) != len(data) or self.read(url, 0, len(data)) != data:
                raise ObjectExistsError(errno.EEXIST, "it exists already", url) from None

    def upload(self, url: str, num_bytes: int) -> Any:
        """Open an object of about ``num_bytes`` for writing; it becomes visible when the file is closed."""
        block_bytes = max(2 * PART_BYTES, -(-num_bytes // _MOST_PARTS))
        return self._files.open(self._key(url), "wb", block_size=block_bytes)

    def delete(self, url: str) -> None:
        """Delete an object, if it exists."""
        try:
            self.attempt(url, lambda: self._files.rm_file(self._key(url)))
        except FileNotFoundError:
            return

    def delete_folder(self, url: str) -> None:
        """Delete everything below a folder, if it exists."""

        def remove() -> None:
            self._files.invalidate_cache()
            self._files.rm(self._key(url), recursive=True)

        try:
            self.attempt(url, remove)
        except FileNotFoundError:
            return

    def _info(self, url: str) -> Mapping[str, Any]:
        def ask() -> Mapping[str, Any]:
            self._files.invalidate_cache()
            found: Mapping[str, Any] = self._files.info(self._key(url))
            return found

        return self.attempt(url, ask)

    def _create(self, key: str, data: bytes) -> None:
        if self._scheme in ("file", "memory"):
            # pipe_file of these two checks and then writes, which is not atomic; open(..., "xb") is.
            with self._files.open(key, "xb", **({"data": data} if self._scheme == "memory" else {})) as file:
                if self._scheme == "file":
                    file.write(data)
            return
        self._files.pipe_file(key, data, mode="create")

    def _key(self, url: str) -> str:
        return str(self._files._strip_protocol(url))


def open_store(url: str) -> ObjectStore:
    """Return the store of a URL.

    Raises:
        StorageError: the required package is missing, or has no conditional writes.
    """
    scheme = url.partition("://")[0]
    package = PACKAGES[scheme]
    try:
        module = importlib.import_module(package)
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise StorageError(missing_package(scheme, str(error))) from error
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "file":
        options["auto_mkdir"] = True
    try:
        file_system = fsspec.filesystem(scheme, **options)
    except (ValueError, TypeError, OSError) as error:
        raise StorageError(f"{scheme}:// cannot be used: {reason_of(error)}") from error
    version = getattr(module, "__version__", "0")
    oldest = {"s3fs": "2025.2", "gcsfs": "2025.2", "adlfs": "2024.12"}.get(package)
    if oldest is not None and _numbers(version) < _numbers(oldest):
        raise StorageError(f"{package} {version} cannot create an object atomically; install {package}>={oldest}")
    return ObjectStore(file_system, scheme)


def missing_package(scheme: str, reason: str = "") -> str:
    """Return the message that names the package that a URL needs and how to install it."""
    detail = f" ({reason})" if reason else ""
    return f"{scheme}:// needs the package {PACKAGES[scheme]}, which cannot be imported{detail}; run: pip install " + (
        f"{PACKAGES[scheme]}"
    )


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure in one line, with possible credentials removed."""
    if isinstance(error, FileNotFoundError):
        text = os.strerror(errno.ENOENT)  # stores add the object's name
    else:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    line = _SECRET.sub(lambda match: "//***@" if match[0].startswith("//") else "***", " ".join(text.split()))
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."


def _as_store_error(error: Exception, url: str) -> ObjectStoreError:
    if isinstance(error, ObjectStoreError):
        return error
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return ObjectMissingError(errno.ENOENT, reason_of(error), url)
    if isinstance(error, FileExistsError) or _condition_failed(error):
        return ObjectExistsError(errno.EEXIST, "it exists already", url)
    if isinstance(error, PermissionError):
        return ObjectRefusedError(errno.EACCES, reason_of(error), url)
    return ObjectStoreError(errno.EIO, reason_of(error), url)


def _is_final(error: Exception) -> bool:
    """Return whether a retry would fail in the same way."""
    lacks_credentials = "Credential" in type(error).__name__
    return isinstance(error, (*_FINAL, ValueError, TypeError)) or lacks_credentials or _condition_failed(error)


def _condition_failed(error: Exception) -> bool:
    # s3fs recognizes Amazon's error; the errors of other stores contain the code in the text of the cause.
    return any(name in str(each) for each in (error, error.__cause__) for name in _CONDITION_FAILED)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


_ALMOST = re.compile(rf"({'|'.join(PACKAGES)}):/?(?!/)", re.IGNORECASE)
_ON_DISK = ("file", "memory")


class ObjectPath(PosixPath):
    """Path of an object, or of a folder of objects, given by its URL.

    It implements the `Path` methods that checkpoints and data need. A folder exists if it has entries, so creating one
    is a no-op. Everything that needs a local file (`open`, `os` and `shutil`) raises an error.

    Raises:
        StorageError: it is used as a local path.
    """

    def __str__(self) -> str:
        """Return the URL."""
        scheme, *names = self.parts
        return f"{scheme}//{'/' if scheme == 'file:' else ''}{'/'.join(names)}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        """Raise, because the object is not a local path."""
        raise StorageError(f"{self} is in an object store, but a local file or folder is needed here")

    @property
    def store(self) -> ObjectStore:
        return open_store(str(self))

    def retry(self, action: Callable[[], Result]) -> Result:
        """Run an action on this object with the retries of `ObjectStore.attempt`."""
        return self.store.attempt(str(self), action)

    def create(self, data: bytes) -> None:
        """Create the object, which must not exist; see `ObjectStore.create`."""
        self.store.create(str(self), data)

    def write_bytes(self, data: Any) -> int:
        """Write the whole object atomically: a reader sees the old or the new contents."""
        self.store.put(str(self), bytes(data))
        return len(data)

    def read_bytes(self) -> bytes:
        """Return the contents of the object."""
        store = self.store
        return store.read(str(self), 0, store.size(str(self)))

    def read_text(self, encoding: str | None = None, errors: str | None = None, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def iterdir(self) -> Iterator[ObjectPath]:  # type: ignore[override]
        """Yield the direct entries, sorted by name."""
        for entry in self.store.entries(str(self)):
            yield self / entry.name

    def glob(self, pattern: str, **_: Any) -> Iterator[ObjectPath]:  # type: ignore[override]
        """Yield the direct entries whose names match a pattern of one level."""
        if not any(sign in pattern for sign in "*?["):
            yield from (path for path in (self / pattern,) if path.exists())
            return
        yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str, **_: Any) -> NoReturn:
        """Raise, because recursive globbing is not supported."""
        self.__fspath__()

    def stat(self, **_: Any) -> os.stat_result:
        """Return the object's size and time of last write."""
        size, seconds = self.store.size(str(self)), self.store.modified(str(self))
        kept = {"st_mtime": seconds, "st_mtime_ns": round(seconds * 1e9)}
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, size, 0, int(seconds), 0), kept)

    def exists(self, **_: Any) -> bool:
        """Return whether there is an object of this name or below it."""
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.store.size(str(self))
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, **_: Any) -> bool:
        return self.store.is_folder(str(self))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: a folder exists as soon as it has an entry."""

    def touch(self, *_: Any, **__: Any) -> None:
        """Write an empty object."""
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; a missing object is not an error."""
        self.store.delete(str(self))

    def remove_folder(self) -> None:
        """Delete everything below this name."""
        self.store.delete_folder(str(self))

    def resolve(self, strict: bool = False) -> ObjectPath:
        return self

    def absolute(self) -> ObjectPath:
        return self


def is_url(text: str) -> bool:
    """Return whether a text is a URL of an object store, even an unsupported one."""
    return "://" in text


def as_path(value: str | Path) -> Path:
    """Convert a text to an `ObjectPath` if it is a URL, otherwise to a local path.

    Raises:
        StorageError: the URL is unusable.
    """
    if isinstance(value, ObjectPath):
        return value
    text = str(value)
    if not is_url(text):
        return Path(value)
    problem = url_problem(text)
    if problem is not None:
        raise StorageError(problem)
    return ObjectPath(text)


def url_problem(text: str) -> str | None:
    """Return what is wrong with a URL, without repeating possible credentials; None if it is usable.

    Local paths are accepted, unless they look like a URL with a missing slash.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return f"{text} lacks a slash; write {text.partition(':')[0].lower()}://" if _ALMOST.match(text) else None
    if scheme not in PACKAGES:
        return f"{scheme[:20]}:// is not a supported object store; supported are s3://, gs:// and az://"
    place = rest.partition("/")[0]
    if "@" in place or ":" in place:
        return (
            f"{scheme}://*** contains a credential or a port; pass these to {PACKAGES[scheme]} in its environment "
            "variables"
        )
    if set(rest) & set("?#*[]\\") or not rest.isprintable():
        return (
            f"{scheme}://{place}/... contains one of ? # * [ ] \\ or an unprintable character; use a folder name "
            "without these"
        )
    if (not place and scheme not in _ON_DISK) or not rest.strip("/"):
        return f"{text} has no {'folder' if scheme in _ON_DISK else 'bucket'}; write {scheme}://BUCKET/FOLDER"
    if {".", ".."} & set(rest.split("/")):
        return f"{text} contains . or .. as a path component, which object names cannot have"
    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        return missing_package(scheme)
    return None


_FIRST_BYTES = 128 * 1024
_MOST_BYTES = 8 << 20
_NUM_WINDOWS = 8


class ReadAheadFile:
    """Read ranges of an object through a cache of a few windows; thread-safe.

    A range outside all windows is read with read-ahead: 128 KiB after a seek, or twice the previous window, at most
    8 MiB, for a sequential read.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.num_bytes = path.store.size(str(path))
        self._windows: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes of a range, fewer if the object ends within it.

        Raises:
            ObjectStoreError: the object cannot be read.
        """
        end = min(start + num_bytes, self.num_bytes)
        if end <= start:
            return b""
        with self._lock:
            ahead = _FIRST_BYTES
            for begin, window in self._windows.items():
                if begin <= start and end <= begin + len(window):
                    self._windows.move_to_end(begin)
                    return window[start - begin : end - begin]
                if begin <= start <= begin + len(window):
                    ahead = max(ahead, min(2 * len(window), _MOST_BYTES))
        # Outside the lock, so that threads that read different ranges wait for the store concurrently.
        window = self._path.store.read(str(self._path), start, min(max(end, start + ahead), self.num_bytes))
        with self._lock:
            self._windows[start] = window
            self._windows.move_to_end(start)
            while len(self._windows) > _NUM_WINDOWS:
                self._windows.popitem(last=False)
        return window[: end - start]


class UploadedFile:
    """Writer of a new object, which appears, and is checked for size, when the context exits without an error.

    The store's package uploads parts as they fill, so that only a few of them are in memory.
    """

    def __init__(self, path: ObjectPath, expected_bytes: int) -> None:
        self.num_bytes = 0
        self._path = path
        self._file = path.store.upload(str(path), expected_bytes)

    def __enter__(self) -> UploadedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the object, or discard it after an error.

        Raises:
            OSError: the store has a different number of bytes than were written.
        """
        if kind is not None:
            self._give_up()
            return
        self._file.close()
        found = self._path.store.size(str(self._path))
        if found != self.num_bytes:
            raise OSError(errno.EIO, f"the store has only {found} of {self.num_bytes} bytes", str(self._path))

    def append(self, data: NDArray[np.uint8] | bytes) -> int:
        """Append the bytes and return their CRC-32."""
        view = memoryview(data) if isinstance(data, bytes) else data.data
        self._file.write(view)
        self.num_bytes += view.nbytes
        return zlib.crc32(view)

    def _give_up(self) -> None:
        """Discard the object and its parts as far as the store allows; closing the file would create the object."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True


_CHUNK_BYTES = 64 << 20
_CACHE = Path("megatron") / "objects"


def local_copy(folder: Path) -> Path:
    """Return a folder on this node, of the same name, with copies of the files directly in ``folder``.

    A local folder is returned unchanged.

    Raises:
        StorageError: the objects cannot be read, or the copies cannot be written.
    """
    if not isinstance(folder, ObjectPath):
        return folder
    try:
        return fetch([path for path in folder.iterdir() if path.is_file()], machine_cache(), folder.name)
    except OSError as error:
        raise StorageError(f"cannot copy {folder} to this node: {error.strerror or error}") from error


def machine_cache() -> Path:
    """Return this user's folder on this node for cached copies of objects."""
    for parent in (Path("~/.cache").expanduser(), Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"):
        folder = parent / _CACHE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise StorageError("this node has no folder for cached objects: neither ~/.cache nor TMPDIR is writable")


def fetch(objects: Sequence[ObjectPath], cache: Path, name: str = "files") -> Path:
    """Return a folder called ``name`` with copies of objects under their own names; one process per node fetches them.

    An object that was rewritten since is fetched again.

    Raises:
        OSError: an object cannot be read, or the folder cannot be written.
    """
    known = [(str(path), status.st_size, status.st_mtime_ns) for path in objects for status in (path.stat(),)]
    folder = cache / hashlib.blake2b(json.dumps([name, *known]).encode(), digest_size=16).hexdigest()
    if folder.is_dir():
        return folder / name
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder / name
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache))
        try:
            (made / name).mkdir()
            for path, (_, num_bytes, _) in zip(objects, known, strict=True):
                _download(path, num_bytes, made / name / path.name)
            os.rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / name


def _download(path: ObjectPath, num_bytes: int, target: Path) -> None:
    store = path.store
    with open(target, "xb") as file:
        for start in range(0, num_bytes, _CHUNK_BYTES):
            file.write(store.read(str(path), start, min(start + _CHUNK_BYTES, num_bytes)))
        if file.tell() != num_bytes:
            raise StorageError(f"{path} has {file.tell()} of {num_bytes} bytes: it changed during the read; retry")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file lock that admits one process per node at a time."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
