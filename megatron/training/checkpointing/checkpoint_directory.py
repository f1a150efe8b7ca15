"""The folder that a run saves into: publication by rename, recovery and retention.

Everything here runs on one rank; nothing communicates.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing.index_file import INDEX_FILE
from megatron.core.dist_checkpointing.storage import checksum, sync_folder, write_text
from megatron.interop.megatron_torch.rank_files import is_megatron_torch
from megatron.interop.torch_dist.folder_files import is_torch_dist
from megatron.training.checkpointing.checkpoint_folders import TRACKER_FILE, iteration_folder, saved_iterations

_PENDING_TRACKER = f".{TRACKER_FILE}.pending"
_LEFTOVER = re.compile(r"\.(iter_\d{7,})\.(saving|replaced|removing)")


def saving_folder(directory: Path, iteration: int) -> Path:
    """Return the hidden folder that an iteration's checkpoint is written into before it is published."""
    return directory / f".iter_{iteration:07d}.saving"


def create_saving_folder(directory: Path, iteration: int) -> Path:
    """Create the empty hidden folder for a save, and the directory itself where it is not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = saving_folder(directory, iteration)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def publish(directory: Path, iteration: int) -> None:
    """Give the hidden folder of a finished save its name, then point the tracker file at it.

    The tracker's new text waits beside it under a hidden name before the folder is renamed, so that a process killed
    between the two renames is told apart from a user who points the tracker at an older checkpoint.

    Raises:
        OSError: the file system refused; what was published before is still in place.
    """
    final = iteration_folder(directory, iteration)
    pending = directory / _PENDING_TRACKER
    replaced = directory / f".{final.name}.replaced"
    try:
        write_text(pending, str(iteration))
        if final.exists():
            os.rename(final, replaced)
        os.rename(saving_folder(directory, iteration), final)
    except OSError:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        pending.unlink(missing_ok=True)
        raise
    sync_folder(directory)
    os.rename(pending, directory / TRACKER_FILE)
    sync_folder(directory)


def sealed_iterations(directory: Path) -> dict[int, str]:
    """Return the iterations that were written completely and not published, each with the checksum of its index."""
    found: dict[int, str] = {}
    for entry in sorted(directory.glob(".iter_*.saving")):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is not None and (entry / INDEX_FILE).exists():
            found[int(match.group(1).removeprefix("iter_"))] = checksum((entry / INDEX_FILE).read_bytes())
    return found


def index_checksum(directory: Path, iteration: int) -> str | None:
    """Return the checksum of a published checkpoint's index, or None where there is none."""
    path = iteration_folder(directory, iteration) / INDEX_FILE
    return checksum(path.read_bytes()) if path.exists() else None


def recover(directory: Path, log: Callable[[str], None]) -> None:
    """Bring a directory in order after a save that was interrupted; say what was done, one line each.

    A checkpoint that was complete but not yet in the tracker file is entered there; one that was about to be
    replaced is put back; everything else that is half done is removed.
    """
    if not directory.is_dir():
        return
    pending = directory / _PENDING_TRACKER
    for entry in sorted(directory.iterdir()):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is None:
            continue
        final = directory / match.group(1)
        if match.group(2) == "replaced" and not final.exists():
            os.rename(entry, final)
            pending.unlink(missing_ok=True)
            log(f"put back {final}, which an interrupted save was about to replace")
        else:
            shutil.rmtree(entry)
            log(f"removed {entry}, left by an interrupted save")
    if pending.exists():
        text = pending.read_text(encoding="utf-8")
        if text.isdigit() and _format_of(iteration_folder(directory, int(text))) is not None:
            os.rename(pending, directory / TRACKER_FILE)
            log(f"entered iteration {text}, saved completely before an interruption, in {directory / TRACKER_FILE}")
        else:
            pending.unlink()
    sync_folder(directory)


def expired_iterations(iterations: list[int], newest: int, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Return which iterations the retention rule gives up after ``newest`` was saved.

    Iterations beyond ``newest`` (of a run that was since rolled back) are left alone.
    """
    if keep_last is None:
        return []
    older = sorted(iteration for iteration in iterations if iteration <= newest)
    return [
        iteration
        for iteration in older[: max(len(older) - keep_last, 0)]
        if not (keep_every and iteration % keep_every == 0) and iteration != newest
    ]


def remove_expired(directory: Path, newest: int, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Remove the checkpoints that the retention rule gives up, and return their iterations.

    A checkpoint of the same iteration that ``newest`` took the place of goes too.

    Each is hidden by a rename first, so that no half-removed checkpoint can be loaded. Folders in another format
    than the one of ``newest`` are left alone.
    """
    found = {iteration: _format_of(iteration_folder(directory, iteration)) for iteration in saved_iterations(directory)}
    alike = [iteration for iteration, kind in found.items() if kind is not None and kind == found.get(newest)]
    expired = expired_iterations(alike, newest, keep_last, keep_every)
    hidden = [directory / f".{iteration_folder(directory, newest).name}.replaced"]
    for iteration in expired:
        folder = iteration_folder(directory, iteration)
        hidden.append(directory / f".{folder.name}.removing")
        os.rename(folder, hidden[-1])
    for folder in hidden:
        if folder.exists():
            shutil.rmtree(folder)
    return expired


def _format_of(folder: Path) -> str | None:
    """Return the format of a published checkpoint that this program writes, or None."""
    if (folder / INDEX_FILE).exists():
        return "native"
    if is_torch_dist(folder):
        return "torch_dist"
    return "torch" if is_megatron_torch(folder) else None
