"""Last good checkpoints: marked when the iterations after them were finite, and kept by retention."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from megatron.checkpoint.checkpoint_folder import TRACKER_FILE, iteration_folder, saved_iterations
from megatron.core.dist_checkpointing.disk import replace_text

KNOWN_FILE = "known_to_train.json"


def is_known(directory: Path, iteration: int) -> bool:
    return (iteration_folder(directory, iteration) / KNOWN_FILE).is_file()


def newest_known(directory: Path, iterations: Collection[int] | None = None) -> int | None:
    """Return the newest checkpoint that is known to train, of all or of those given; None where there is none."""
    candidates = saved_iterations(directory) if iterations is None else iterations
    return max((iteration for iteration in candidates if is_known(directory, iteration)), default=None)


def mark_known(directory: Path, iteration: int, num_finite: int) -> None:
    """Mark a published checkpoint as known to train, by a small file in its folder that is complete or absent.

    Raises:
        OSError: the file system refuses.
    """
    folder = iteration_folder(directory, iteration)
    hidden = folder / f".{KNOWN_FILE}"
    text = json.dumps({"iteration": iteration, "finite_iterations_after": num_finite}) + "\n"
    replace_text(folder / KNOWN_FILE, hidden, text)


def point_tracker(directory: Path, iteration: int) -> None:
    """Let the tracker file name an older checkpoint, which a run has gone back to.

    Raises:
        OSError: the file system refuses.
    """
    replace_text(directory / TRACKER_FILE, directory / f".{TRACKER_FILE}.rewound", str(iteration))


class ValidationWindow:
    """Count the finite iterations after each checkpoint of a run, the one that it was resumed from included.

    A checkpoint is due to be marked when ``needed`` iterations in a row after it were finite.
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self._waiting: set[int] = set()
        self._num_finite = 0
        self._iteration = 0

    @property
    def waiting(self) -> frozenset[int]:
        return frozenset(self._waiting)

    def begin(self, iteration: int) -> None:
        """Wait for the iterations after a checkpoint."""
        self._waiting.add(iteration)

    def observe(self, iteration: int, is_finite: bool) -> list[int]:
        """Take note of an iteration that ended, and return the checkpoints that are due now."""
        self._num_finite = self._num_finite + 1 if is_finite and iteration == self._iteration + 1 else int(is_finite)
        self._iteration = iteration
        if self._num_finite < self.needed:
            return []
        return sorted(saved for saved in self._waiting if saved <= iteration - self.needed)

    def settle(self, iteration: int) -> None:
        """Wait no longer for a checkpoint."""
        self._waiting.discard(iteration)

    def go_back(self, iteration: int) -> None:
        """Forget the checkpoints after an iteration that the run has gone back to."""
        self._waiting = {saved for saved in self._waiting if saved <= iteration}
        self._num_finite, self._iteration = 0, iteration
