"""Whether a checkpoint is whole, as far as names and sizes of its files tell: no shard is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.checkpoint_folder import FORMAT_NAMES, detect_format
from megatron.core.dist_checkpointing.index import INDEX_FILE, CheckpointIndex, read_index
from megatron.core.errors import CheckpointError
from megatron.pictures.files_read import FilesRead

_MOST_NAMED = 3


@dataclass(frozen=True)
class CheckpointHealth:
    """Say in words how a checkpoint is, and whether it is as its index says."""

    words: str
    is_whole: bool = True


class HealthChecks:
    """Compare checkpoints with their indices; an index is read again where it has changed."""

    def __init__(self) -> None:
        self._sizes = FilesRead(lambda path: _sizes_of(path.parent))

    def of(self, folder: Path) -> CheckpointHealth:
        """Return the health of one iteration's folder.

        Of the native format the index must be there with its own checksum, and each shard that it names with its size.
        """
        try:
            found = detect_format(folder)
            if found not in ("native", None):
                return CheckpointHealth(f"{FORMAT_NAMES[found]}, which has no checksums: not checked")
            return self._of_native(folder)
        except OSError as error:
            return CheckpointHealth(f"cannot be looked at: {error.strerror or error}", is_whole=False)

    def _of_native(self, folder: Path) -> CheckpointHealth:
        try:
            sizes = self._sizes.of(folder / INDEX_FILE)
        except FileNotFoundError:
            return CheckpointHealth(f"no {INDEX_FILE}: not finished, or damaged", is_whole=False)
        if isinstance(sizes, str):
            return CheckpointHealth(sizes, is_whole=False)
        problems = [problem for name, size in sizes.items() if (problem := _problem(folder / name, size)) is not None]
        if problems:
            more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
            return CheckpointHealth(f"{', '.join(problems[:_MOST_NAMED])}{more}", is_whole=False)
        shards = "1 shard has its size" if len(sizes) == 1 else f"{len(sizes)} shards have their sizes"
        return CheckpointHealth(f"whole: the index has its checksum, {shards}")


def _sizes_of(folder: Path) -> Mapping[str, int] | str:
    """Return the size of each shard that an index names, or what is wrong with the index."""
    try:
        index: CheckpointIndex = read_index(folder)
    except CheckpointError as error:
        return str(error)
    if not index.is_intact:
        return f"{INDEX_FILE} was changed after it was written"
    return {name: file.num_bytes for name, file in index.files.items()}


def _problem(path: Path, size: int) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None if found == size else f"{path.name} has {found} of {size} bytes"
