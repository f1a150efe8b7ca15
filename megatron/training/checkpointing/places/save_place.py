"""Where a run's checkpoints appear, and by what: a rename in a folder, or the index as the last object of a store.

Everything here runs on one rank; nothing communicates.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.core.dist_checkpointing.disk import sync_folder
from megatron.core.dist_checkpointing.index import CheckpointIndex, write_index
from megatron.core.object_store import ObjectPath
from megatron.training.checkpointing.places.object_place import ObjectPlace
from megatron.training.checkpointing.publication import (
    Retention,
    create_saving_folder,
    publish,
    remove_expired,
    saving_folder,
)


class SavePlace(Protocol):
    """Take the files of a save, make a checkpoint of them that is there as a whole or not at all, and remove others."""

    @property
    def tag(self) -> str:
        """Return what keeps the names of this save's shards apart from others'; nothing where a folder does."""

    def folder(self, iteration: int) -> Path:
        """Return where the files of an iteration are written."""
        ...

    def create(self, iteration: int) -> None:
        """Prepare for the files of an iteration."""

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Add the index to files that are all written."""

    def publish(self, iteration: int) -> None:
        """Make the checkpoint the one that is loaded next.

        Raises:
            OSError: what was published before is still in place.
        """

    def give_up(self, iteration: int) -> None:
        """Remove what there is of a save that failed; fail in silence."""

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Remove what the retention rule gives up; see `Retention.expired_of`."""
        ...


@dataclass(frozen=True)
class LocalPlace:
    """Write into a hidden folder and rename it."""

    directory: Path
    token: str

    @property
    def tag(self) -> str:
        """Return nothing: each save has a folder of its own."""
        return ""

    def folder(self, iteration: int) -> Path:
        """Return the hidden folder."""
        return saving_folder(self.directory, iteration, self.token)

    def create(self, iteration: int) -> None:
        """Make the hidden folder."""
        create_saving_folder(self.directory, iteration, self.token)

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Write the index into the hidden folder."""
        folder = self.folder(iteration)
        write_index(folder, index)
        sync_folder(folder)

    def publish(self, iteration: int) -> None:
        """Rename the folder, then let the tracker file name it."""
        publish(self.directory, iteration, self.token)

    def give_up(self, iteration: int) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self.folder(iteration), ignore_errors=True)

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Hide folders by a rename and remove them."""
        return remove_expired(self.directory, newest, retention, self.token)


def place_of(directory: Path, token: str, number: int) -> SavePlace:
    """Return where the save of this ``number`` by the run that ``token`` names goes."""
    if isinstance(directory, ObjectPath):
        return ObjectPlace(directory, f"{token}-{number}")
    return LocalPlace(directory, token)
