"""Prepare the --save folder when a run starts: which ranks share it, and recovery of an interrupted save."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megatron.checkpoint.checkpoint_folder import TRACKER_FILE, detect_format, iteration_folder, names_iteration
from megatron.checkpoint.load import Log
from megatron.checkpoint.storage import PENDING_TRACKER, publish, recover_objects
from megatron.core.collectives import (
    all_gather_objects,
    any_rank,
    broadcast_object,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from megatron.core.dist_checkpointing.disk import checksum, sync_folder
from megatron.core.dist_checkpointing.index import INDEX_FILE
from megatron.core.errors import CheckpointError, InputError
from megatron.core.object_store import ObjectPath, as_path
from megatron.core.parallel_state import ParallelState
from megatron.training.fault_tolerance.run_lock import RunLock, own_folder

_MARK_SUFFIX = ".shared"
_OLD_MARK_S = 600.0
_SHARED = "an object store has to be the same for all ranks (memory:// is one process's own)"
_LEFTOVER = re.compile(r"\.(iter_\d{7,})(?:\.([0-9a-f]+))?\.(saving|replaced|removing)")
Result = TypeVar("Result")


@dataclass(frozen=True)
class SaveFolders:
    """Say which ranks save into the same folder, as one path can mean a folder of its own on each machine.

    ``leaders[r]`` is the first of the ranks that share the folder of rank ``r``: what has to be done once in a folder
    is done by it. It holds the ``owner`` of the folder, which is the run that ``token`` names.
    """

    leaders: tuple[int, ...]
    token: str = ""
    owner: RunLock | None = None

    @property
    def num_folders(self) -> int:
        return len(set(self.leaders))

    @property
    def is_shared(self) -> bool:
        return self.num_folders == 1

    def is_leader(self, rank: int) -> bool:
        return self.leaders[rank] == rank

    def check_owner(self) -> None:
        """See that the folder is still this run's, where this rank can say so.

        Raises:
            FolderInUseError: another run took it over.
        """
        if self.owner is not None:
            self.owner.check()

    def release(self) -> None:
        """Let another run have the folder."""
        if self.owner is not None:
            self.owner.release()


def one_folder(state: ParallelState) -> SaveFolders:
    """Return what holds where all ranks are known to share their folder."""
    return SaveFolders((0,) * state.world_size)


def prepare_save_directory(directory: str | Path, state: ParallelState, log: Log) -> SaveFolders:
    """Create and own the directory of a run and recover it after an interrupted save; call it before anything loads.

    Returns which ranks share it, found out by files that they put there. Where machines have a file system each, each
    gets the directory, and what one of them published before an interruption the others publish too.

    Raises:
        CheckpointError: it cannot be created or written to. On every rank alike.
        FolderInUseError: another run writes there. On every rank alike.
    """
    directory = as_path(directory)
    folders = _own(directory, _find_folders(directory, state), state, log)
    if not folders.is_shared:
        log(
            f"--save {directory} is a folder of its own for each of {folders.num_folders} machines: the files of a "
            "checkpoint stay where they are written, and all of them are needed to load it"
        )
    lines: list[str] = []

    def bring_in_order() -> None:
        if folders.is_leader(state.rank):
            recover(directory, lines.append)

    _complete_what_others_published(directory, folders, state, lines)
    _on_all_ranks(directory, state, bring_in_order)
    everywhere = all_gather_objects(lines, state.world) if any_rank(bool(lines), state.world) else []
    for rank, found in enumerate(everywhere):
        for line in found:
            log(line if rank == 0 else f"rank {rank}: {line}")
    return folders


def recover(directory: Path, log: Callable[[str], None]) -> None:
    """Complete or undo what an interrupted save left in a directory; log what was done, one line each.

    A checkpoint that was complete but not yet in the tracker file is entered there; one that was about to be
    replaced is put back; everything else that is half done is removed.
    """
    if isinstance(directory, ObjectPath):
        recover_objects(directory, log)
        return
    if not directory.is_dir():
        return
    pending = directory / PENDING_TRACKER
    for entry in sorted(directory.iterdir()):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is None:
            continue
        final = directory / match.group(1)
        if match.group(3) == "replaced" and not final.exists():
            os.rename(entry, final)
            pending.unlink(missing_ok=True)
            log(f"put back {final}, which an interrupted save was about to replace")
        else:
            shutil.rmtree(entry)
            log(f"removed {entry}, left by an interrupted save")
    if pending.exists():
        text = pending.read_text(encoding="utf-8", errors="replace") if pending.is_file() else ""
        if names_iteration(text) and detect_format(iteration_folder(directory, int(text))) is not None:
            os.rename(pending, directory / TRACKER_FILE)
            log(f"entered iteration {text}, saved completely before an interruption, in {directory / TRACKER_FILE}")
        else:
            pending.unlink()
    sync_folder(directory)


def _own(directory: Path, folders: SaveFolders, state: ParallelState, log: Log) -> SaveFolders:
    """Own each of the folders, or none."""
    owned: list[RunLock] = []

    def own() -> None:
        if folders.is_leader(state.rank):
            owned.append(own_folder(directory, folders.token, "a training run", log))
            _remove_old_marks(directory)

    try:
        _on_all_ranks(directory, state, own)
    except InputError:
        for owner in owned:
            owner.release()
        raise
    return replace(folders, owner=owned[0] if owned else None)


def _find_folders(directory: Path, state: ParallelState) -> SaveFolders:
    token: str = broadcast_object(secrets.token_hex(4), state.world)

    def mark(rank: int) -> Path:
        return directory / f".{token}.{rank:06d}{_MARK_SUFFIX}"

    def enter_first() -> None:
        if state.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            mark(0).touch()

    def enter() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        mark(state.rank).touch()

    def first_rank_seen() -> int:
        return min(int(path.name.split(".")[2]) for path in directory.glob(f".{token}.*{_MARK_SUFFIX}"))

    _on_all_ranks(directory, state, enter_first)
    sees_first = _on_all_ranks(directory, state, mark(0).exists)
    leaders = [0] * state.world_size
    if any_rank(not sees_first, state.world):
        _on_all_ranks(directory, state, enter)
        leaders = all_gather_objects(_on_all_ranks(directory, state, first_rank_seen), state.world)
    mark(state.rank).unlink(missing_ok=True)
    folders = SaveFolders(tuple(leaders), token)
    if isinstance(directory, ObjectPath) and not folders.is_shared:
        other = leaders.index(next(leader for leader in leaders if leader))
        raise CheckpointError(f"--save {directory}: rank {other} does not see what rank 0 wrote there; {_SHARED}")
    strays = [rank for rank, leader in enumerate(leaders) if not folders.is_leader(leader)]
    error = None
    if strays:
        error = CheckpointError(
            f"--save {directory}: rank {strays[0]} sees the file that rank {leaders[strays[0]]} put there, which "
            "itself sees that of another; give --save a folder that a machine either shares or has to itself"
        )
    raise_on_all_ranks(error, state.world)
    return folders


def _remove_old_marks(directory: Path) -> None:
    """Remove what killed runs left of their marks; another run may be looking for its own at this moment."""
    for path in directory.glob(f".*{_MARK_SUFFIX}"):
        try:
            if time.time() - path.stat().st_mtime > _OLD_MARK_S:
                path.unlink()
        except FileNotFoundError:
            continue


@dataclass(frozen=True)
class SealedSave:
    """Name a save that was written completely and not published: the run that wrote it, its index's checksum."""

    token: str
    index: str


def sealed_iterations(directory: Path) -> dict[int, SealedSave]:
    """Return the iterations that were written completely and not published."""
    found: dict[int, SealedSave] = {}
    for entry in sorted(directory.glob(".iter_*.saving")):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is not None and (entry / INDEX_FILE).exists():
            index = checksum((entry / INDEX_FILE).read_bytes())
            found[int(match.group(1).removeprefix("iter_"))] = SealedSave(match.group(2) or "", index)
    return found


def index_checksum(directory: Path, iteration: int) -> str | None:
    """Return the checksum of a published checkpoint's index, or None where there is none."""
    path = iteration_folder(directory, iteration) / INDEX_FILE
    return checksum(path.read_bytes()) if path.exists() else None


def _complete_what_others_published(
    directory: Path, folders: SaveFolders, state: ParallelState, lines: list[str]
) -> None:
    """Publish here what was complete everywhere and, when the run was interrupted, published on some machines only."""
    if folders.is_shared:
        return
    is_leader = folders.is_leader(state.rank)
    sealed = sealed_iterations(directory) if is_leader else {}
    in_question = sorted({iteration for found in all_gather_objects(sealed, state.world) for iteration in found})
    published = {iteration: index_checksum(directory, iteration) for iteration in in_question} if is_leader else {}
    everywhere = all_gather_objects(published, state.world)

    def complete() -> None:
        for iteration, save in sealed.items():
            if any(found.get(iteration) == save.index for found in everywhere):
                publish(directory, iteration, save.token)
                lines.append(f"published iteration {iteration} in {directory}, as other machines did before")

    _on_all_ranks(directory, state, complete)


def _on_all_ranks(directory: Path, state: ParallelState, action: Callable[[], Result]) -> Result:
    """Return what the action returns on this rank; every rank learns whether a file system refused one."""

    def attempt() -> Result:
        try:
            return action()
        except OSError as failure:
            where = "" if state.rank == 0 else f" on rank {state.rank}"
            raise CheckpointError(f"cannot prepare {directory}{where}: {failure.strerror}; change --save") from failure

    return run_on_all_ranks(attempt, state.world)
