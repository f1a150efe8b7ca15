"""Publication of a save by rename, and retention of the checkpoints before it.

Everything here runs on one rank; nothing communicates.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.last_good import newest_known
from megatron.core.dist_checkpointing.disk import sync_folder, write_text
from megatron.interop.checkpoint_format import detect_format
from megatron.interop.new_iteration import TRACKER_FILE, iteration_folder
from megatron.training.checkpointing.folder import saved_iterations

PENDING_TRACKER = f".{TRACKER_FILE}.pending"


def saving_folder(directory: Path, iteration: int, token: str = "") -> Path:
    """Return the hidden folder that an iteration's checkpoint is written into before it is published.

    The ``token`` of a run keeps what it writes apart from what another one does.
    """
    return _hidden(directory, iteration, token, "saving")


def _hidden(directory: Path, iteration: int, token: str, state: str) -> Path:
    return directory / ".".join(("", iteration_folder(directory, iteration).name, *filter(None, (token,)), state))


def create_saving_folder(directory: Path, iteration: int, token: str = "") -> Path:
    """Create the empty hidden folder for a save, and the directory itself where it is not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = saving_folder(directory, iteration, token)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def publish(directory: Path, iteration: int, token: str = "") -> None:
    """Give the hidden folder of a run's finished save its name, then point the tracker file at it.

    The tracker's new text waits beside it under a hidden name before the folder is renamed, so that a process killed
    between the two renames is told apart from a user who points the tracker at an older checkpoint.

    Raises:
        OSError: the file system refused; what was published before is still in place.
    """
    final = iteration_folder(directory, iteration)
    pending = directory / PENDING_TRACKER
    replaced = _hidden(directory, iteration, token, "replaced")
    try:
        write_text(pending, str(iteration))
        if final.exists():
            os.rename(final, replaced)
        os.rename(saving_folder(directory, iteration, token), final)
    except OSError:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        pending.unlink(missing_ok=True)
        raise
    sync_folder(directory)
    os.rename(pending, directory / TRACKER_FILE)
    sync_folder(directory)


def expired_iterations(
    iterations: list[int],
    newest: int,
    keep_last: int | None,
    keep_every: int | None,
    kept: Collection[int | None] = (),
) -> list[int]:
    """Return which iterations the retention rule gives up after ``newest`` was saved.

    Those to be ``kept`` stay. Iterations beyond ``newest`` (of a run that was since rolled back) are left alone.
    """
    if keep_last is None:
        return []
    older = sorted(iteration for iteration in iterations if iteration <= newest)
    return [
        iteration
        for iteration in older[: max(len(older) - keep_last, 0)]
        if not (keep_every and iteration % keep_every == 0) and iteration not in (newest, *kept)
    ]


@dataclass(frozen=True)
class Retention:
    """Say which checkpoints of a run go: all but the ``keep_last`` newest, where it is given, and every ``keep_every``.

    Those of the iterations ``kept`` stay and do not count. The oldest one ``on_trial`` may become the next that is
    known to train, and stays too.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    kept: Collection[int] = ()
    on_trial: Collection[int] = ()

    def expired_of(self, directory: Path, newest: int) -> list[int]:
        """Return the iterations of the checkpoints in a folder that go after ``newest`` was saved.

        The newest one that is known to train stays, and so do folders in another format than the one of ``newest``.
        """
        folders = {iteration: iteration_folder(directory, iteration) for iteration in saved_iterations(directory)}
        found = {iteration: detect_format(folder) for iteration, folder in folders.items()}
        alike = [
            iteration
            for iteration, kind in found.items()
            if kind is not None and kind == found.get(newest) and iteration not in self.kept
        ]
        known = newest_known(directory, [iteration for iteration in alike if iteration <= newest])
        next_known = min((iteration for iteration in alike if iteration in self.on_trial), default=None)
        return expired_iterations(alike, newest, self.keep_last, self.keep_every, (known, next_known))


def remove_expired(directory: Path, newest: int, retention: Retention, token: str = "") -> list[int]:
    """Remove the checkpoints that the retention rule gives up, and return their iterations.

    A checkpoint of the same iteration that ``newest`` has replaced is removed too. Each is hidden by a rename first, so
    that no half-removed checkpoint can be loaded.
    """
    expired = retention.expired_of(directory, newest)
    hidden = [_hidden(directory, newest, token, "replaced")]
    for iteration in expired:
        hidden.append(_hidden(directory, iteration, token, "removing"))
        os.rename(iteration_folder(directory, iteration), hidden[-1])
    for folder in hidden:
        if folder.exists():
            shutil.rmtree(folder)
    return expired
