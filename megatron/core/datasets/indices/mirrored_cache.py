"""An index cache that all machines share through an object store, beside one on each machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.core.object_store import ObjectPath, UploadedFile, fetch

_CHUNK_BYTES = 16 << 20


class CacheMirror:
    """Fetch the files of an index from a folder of a store, and put new ones there, their description last.

    What goes wrong is said in a line: an index that cannot be shared is built by each machine.
    """

    def __init__(self, folder: ObjectPath, copies: Path, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._copies = copies
        self._report = report

    def fetch(self, described: Path, files: Mapping[str, Path]) -> Path | None:
        """Return a folder of this machine with an index's files under their names; None where the store has none."""
        objects = [self._folder / path.name for path in (described, *files.values())]
        try:
            return fetch(objects, self._copies)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(f"WARNING: index cache {self._folder} cannot be read ({error}); building the index")
            return None

    def put(self, described: Path, files: Mapping[str, Path]) -> None:
        """Copy an index's files into the store."""
        try:
            for path in (*files.values(), described):
                target = self._folder / path.name
                target.retry(lambda path=path, target=target: _upload(path, target))  # type: ignore[misc]
        except OSError as error:
            self._report(
                f"WARNING: index cache {self._folder} cannot be written ({error}); every machine builds its own"
            )


def _upload(path: Path, target: ObjectPath) -> None:
    with open(path, "rb") as source, UploadedFile(target, path.stat().st_size) as file:
        while chunk := source.read(_CHUNK_BYTES):
            file.append(chunk)
