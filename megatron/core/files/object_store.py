"""The objects of a store such as S3, through fsspec: listed, read by ranges, written whole, created once, deleted.

fsspec and the package of a store are imported when the first URL is used, here alone. Credentials and endpoints come
from where that package finds them (environment, its own files, the machine's role), never from a URL or a flag.
"""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.core.errors import StorageError

PACKAGES: Mapping[str, str] = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "memory": "fsspec", "file": "fsspec"}
"""The schemes of URLs, and the package that each needs."""

PART_BYTES = 8 << 20
"""A longer range is read as several at a time."""
_MOST_PARTS = 9000
_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_CONDITION_FAILED = ("PreconditionFailed", "ConditionNotMet", "conditionNotMet", "BlobAlreadyExists")
_SECRET = re.compile(r"//[^/\s@]*@|\?\S+|(?i:secret|signature|password|credential|token|key)\S*\s*[=:]\s*\S+")
_LONGEST_REASON = 300
Result = TypeVar("Result")


class ObjectStoreError(StorageError, OSError):
    """Report what a store did not do; ``strerror`` says why in one line, without what may be a credential."""

    def __str__(self) -> str:
        """Return the object and the reason."""
        return f"{self.filename}: {self.strerror}"


class ObjectMissingError(ObjectStoreError, FileNotFoundError):
    """Report an object, or a bucket, that is not there."""


class ObjectExistsError(ObjectStoreError, FileExistsError):
    """Report an object that was to be created and is there already."""


class ObjectRefusedError(ObjectStoreError, PermissionError):
    """Report that the store does not let this user have its way."""


@dataclass(frozen=True)
class ObjectEntry:
    """Name one thing below a folder; ``num_bytes`` is None for a folder."""

    name: str
    num_bytes: int | None


class ObjectStore:
    """Offer the objects of one file system of fsspec, by URL; failures that may pass are tried again for 15 seconds.

    Raises:
        ObjectStoreError: any other failure.
    """

    def __init__(self, file_system: Any, scheme: str) -> None:
        self._files = file_system
        self._scheme = scheme

    def attempt(self, url: str, action: Callable[[], Result]) -> Result:
        """Return what an action on an object returns, tried again where it fails for a reason that may pass.

        Raises:
            ObjectStoreError: it failed for good.
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
        """Return what is directly below a folder, by name; nothing where there is no such folder."""
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
        """Return whether there is anything below a folder."""
        try:
            return str(self._info(url)["type"]) == "directory"
        except FileNotFoundError:
            return False

    def modified(self, url: str) -> float:
        """Return when an object was last written, by the store's clock, in seconds since 1970."""
        return float(self.attempt(url, lambda: self._files.modified(self._key(url))).timestamp())

    def read(self, url: str, start: int, end: int) -> bytes:
        """Return the bytes of an object from ``start`` to before ``end``, fewer where it is shorter."""
        cuts = [*range(start, end, PART_BYTES), end]
        return b"".join(self.read_ranges(url, list(itertools.pairwise(cuts))))

    def read_ranges(self, url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of several ranges of an object, which are asked for at the same time."""
        if not ranges:
            return []
        key = self._key(url)
        starts, ends = (list(bounds) for bounds in zip(*ranges))
        found: list[bytes] = self.attempt(
            url, lambda: self._files.cat_ranges([key] * len(starts), starts, ends, on_error="raise")
        )
        return found

    def put(self, url: str, data: bytes) -> None:
        """Write an object as a whole; one that is there is replaced."""
        self.attempt(url, lambda: self._files.pipe_file(self._key(url), data))

    def create(self, url: str, data: bytes) -> None:
        """Write an object that is not there yet; of several who try, one succeeds.

        Raises:
            FileExistsError: there is one.
        """
        try:
            self.attempt(url, lambda: self._create(self._key(url), data))
        except FileExistsError:
            # An answer may have been lost: then the object of the second attempt is that of the first.
            if self.size(url) != len(data) or self.read(url, 0, len(data)) != data:
                raise ObjectExistsError(errno.EEXIST, "it is there already", url) from None

    def upload(self, url: str, num_bytes: int) -> Any:
        """Return a file to write an object of about ``num_bytes`` into, which appears when it is closed."""
        block_bytes = max(2 * PART_BYTES, -(-num_bytes // _MOST_PARTS))
        return self._files.open(self._key(url), "wb", block_size=block_bytes)

    def delete(self, url: str) -> None:
        """Delete an object, if it is there."""
        try:
            self.attempt(url, lambda: self._files.rm_file(self._key(url)))
        except FileNotFoundError:
            return

    def delete_folder(self, url: str) -> None:
        """Delete everything below a folder, if there is anything."""

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
            # Their pipe_file looks first and writes then; these open a new file or fail.
            with self._files.open(key, "xb", **({"data": data} if self._scheme == "memory" else {})) as file:
                if self._scheme == "file":
                    file.write(data)
            return
        self._files.pipe_file(key, data, mode="create")

    def _key(self, url: str) -> str:
        return str(self._files._strip_protocol(url))


def open_store(url: str) -> ObjectStore:
    """Return the store that a URL is in.

    Raises:
        StorageError: the package that it needs is missing, or has no conditional writes.
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
        raise StorageError(f"{package} {version} cannot create an object only once; install {package}>={oldest}")
    return ObjectStore(file_system, scheme)


def missing_package(scheme: str, reason: str = "") -> str:
    """Return the line that says which package a URL needs, and how to get it."""
    detail = f" ({reason})" if reason else ""
    return f"{scheme}:// needs the package {PACKAGES[scheme]}, which cannot be imported{detail}; run: pip install " + (
        f"{PACKAGES[scheme]}"
    )


def reason_of(error: BaseException) -> str:
    """Return why something failed in one line, without what may be a credential."""
    if isinstance(error, FileNotFoundError):
        text = os.strerror(errno.ENOENT)  # what stores add is the object's name
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
        return ObjectExistsError(errno.EEXIST, "it is there already", url)
    if isinstance(error, PermissionError):
        return ObjectRefusedError(errno.EACCES, reason_of(error), url)
    return ObjectStoreError(errno.EIO, reason_of(error), url)


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would end the same."""
    lacks_credentials = "Credential" in type(error).__name__
    return isinstance(error, (*_FINAL, ValueError, TypeError)) or lacks_credentials or _condition_failed(error)


def _condition_failed(error: Exception) -> bool:
    # s3fs knows Amazon's answer; of other stores it passes the text on, and the code is in what it was told.
    return any(name in str(each) for each in (error, error.__cause__) for name in _CONDITION_FAILED)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
