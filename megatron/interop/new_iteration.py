"""The folder of an iteration's checkpoint, and the tracker file that names it; how a conversion writes both.

Importing this module imports no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from megatron.core.dist_checkpointing.disk import sync_folder, write_text
from megatron.core.errors import CheckpointError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
Directory = TypeVar("Directory", bound=Path)


def iteration_folder(directory: Directory, iteration: int) -> Directory:
    """Return the folder of an iteration's checkpoint."""
    return directory / f"iter_{iteration:07d}"


@contextmanager
def new_iteration(directory: Path, iteration: int | Literal["release"], needed: str) -> Iterator[Path]:
    """Make the folder of an iteration to write into; the tracker file names it when all of that is on disk.

    ``needed`` says how many bytes the files take.

    Raises:
        CheckpointError: the file system refuses, or the folder exists.
    """
    folder = directory / iteration if isinstance(iteration, str) else iteration_folder(directory, iteration)
    try:
        folder.mkdir(parents=True)
        yield folder
        sync_folder(folder)
        write_text(directory / TRACKER_FILE, str(iteration))
        sync_folder(directory)
    except OSError as error:
        free = shutil.disk_usage(directory).free if directory.is_dir() else 0
        raise CheckpointError(
            f"cannot write {error.filename or folder}: {error.strerror}; {needed} bytes are needed in all, "
            f"{free} are free"
        ) from error
