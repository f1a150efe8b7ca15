"""Save a run: the content of a checkpoint, and how ranks write and publish it, with the tokenizer's files.

When a run starts, the --save folder is prepared: the ranks that share it are determined, and an interrupted save is
recovered.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.checkpoint.checkpoint_folder import (
    PENDING_TRACKER,
    TRACKER_FILE,
    Retention,
    SavePlace,
    detect_format,
    iteration_folder,
    names_iteration,
    place_of,
    publish,
    recover_objects,
)
from megatron.checkpoint.formats.huggingface import MODEL_RECORD
from megatron.checkpoint.formats.megatron import (
    FLOAT8_SCALING,
    TorchDistShare,
    TorchShare,
    plan_torch_dist_share,
    plan_torch_share,
)
from megatron.checkpoint.train_state import TrainProgress
from megatron.config import CheckpointConfig
from megatron.core.collectives import (
    all_gather_objects,
    any_rank,
    broadcast_object,
    raise_on_all_ranks,
    run_on_all_ranks,
)
from megatron.core.console import Log
from megatron.core.dist_checkpointing import (
    INDEX_FILE,
    BackgroundTask,
    CheckpointState,
    RankShare,
    SavePlan,
    SavePlanner,
    ShardedTensor,
    StagingArea,
    WrittenShare,
    build_index,
    checksum,
    encode_common,
    float8_tensors,
    model_tensors,
    optimizer_tensors,
    rng_tensors,
    sync_folder,
    take_share,
    write_error,
)
from megatron.core.errors import CheckpointError, InputError, MegatronError, TokenizerError
from megatron.core.object_store import ObjectPath, as_path
from megatron.core.parallel_state import ParallelState, gather_from_world
from megatron.core.tokenizers import TOKENIZER_FOLDER
from megatron.training.fault_tolerance import RunLock, own_folder

_MARK_SUFFIX = ".shared"
_OLD_MARK_S = 600.0
_SHARED = "all ranks must use the same object store (memory:// exists only within one process)"
_LEFTOVER = re.compile(r"\.(iter_\d{7,})(?:\.([0-9a-f]+))?\.(saving|replaced|removing)")


@dataclass(frozen=True)
class SaveFolders:
    """Ranks that save to the same folder, since one path may be a separate folder on each node.

    ``leaders[r]`` is the first of the ranks that share the folder of rank ``r``, and does the work that is done once
    per folder. It holds the ``owner`` lock of the folder for the run with this ``token``.
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
        """Check that this run still owns the folder, if this rank holds the lock.

        Raises:
            FolderInUseError: another run took the folder over.
        """
        if self.owner is not None:
            self.owner.check()

    def release(self) -> None:
        """Release the folder for other runs."""
        if self.owner is not None:
            self.owner.release()


def one_folder(state: ParallelState) -> SaveFolders:
    """Return the folders of a run whose ranks are known to share one folder."""
    return SaveFolders((0,) * state.world_size)


def prepare_save_directory(directory: str | Path, state: ParallelState, log: Log) -> SaveFolders:
    """Create and lock a run's directory, and recover it after an interrupted save; call this before anything is loaded.

    Returns which ranks share it, determined with marker files. If each node has its own file system, each gets the
    directory, and a checkpoint that some nodes published before an interruption is published on the others too.

    Raises:
        CheckpointError: the directory cannot be created or written to. Raised on every rank.
        FolderInUseError: another run writes to the directory. Raised on every rank.
    """
    directory = as_path(directory)
    folders = _own(directory, _find_folders(directory, state), state, log)
    if not folders.is_shared:
        log(
            f"--save {directory} is a separate folder on each of {folders.num_folders} nodes: each node keeps the "
            "files that it writes, and loading the checkpoint needs the files of all nodes"
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
    """Complete or undo an interrupted save in a directory; log one line per action.

    The tracker file is updated for a checkpoint that was complete but not yet in it. A checkpoint that was about to be
    replaced is restored. All other unfinished files are removed.
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
            log(f"restored {final}, which an interrupted save was about to replace")
        else:
            shutil.rmtree(entry)
            log(f"removed {entry}, left by an interrupted save")
    if pending.exists():
        text = pending.read_text(encoding="utf-8", errors="replace") if pending.is_file() else ""
        if names_iteration(text) and detect_format(iteration_folder(directory, int(text))) is not None:
            os.rename(pending, directory / TRACKER_FILE)
            log(
                f"wrote iteration {text}, which was saved completely before an interruption, to "
                f"{directory / TRACKER_FILE}"
            )
        else:
            pending.unlink()
    sync_folder(directory)


def _own(directory: Path, folders: SaveFolders, state: ParallelState, log: Log) -> SaveFolders:
    """Lock all of the folders, or none."""
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
            f"--save {directory}: rank {strays[0]} sees the file of rank {leaders[strays[0]]} there, but rank "
            f"{leaders[strays[0]]} sees the file of a third rank; use a --save folder that is either shared by all "
            "nodes or separate on each node"
        )
    raise_on_all_ranks(error, state.world)
    return folders


def _remove_old_marks(directory: Path) -> None:
    """Remove old marker files of killed runs; recent ones may belong to a starting run."""
    for path in directory.glob(f".*{_MARK_SUFFIX}"):
        try:
            if time.time() - path.stat().st_mtime > _OLD_MARK_S:
                path.unlink()
        except FileNotFoundError:
            continue


@dataclass(frozen=True)
class SealedSave:
    """Save that was completely written but not published: the token of its run, and its index's checksum."""

    token: str
    index: str


def sealed_iterations(directory: Path) -> dict[int, SealedSave]:
    """Return the iterations that were completely written but not published."""
    found: dict[int, SealedSave] = {}
    for entry in sorted(directory.glob(".iter_*.saving")):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is not None and (entry / INDEX_FILE).exists():
            index = checksum((entry / INDEX_FILE).read_bytes())
            found[int(match.group(1).removeprefix("iter_"))] = SealedSave(match.group(2) or "", index)
    return found


def index_checksum(directory: Path, iteration: int) -> str | None:
    """Return the checksum of a published checkpoint's index, or None if there is none."""
    path = iteration_folder(directory, iteration) / INDEX_FILE
    return checksum(path.read_bytes()) if path.exists() else None


def _complete_what_others_published(
    directory: Path, folders: SaveFolders, state: ParallelState, lines: list[str]
) -> None:
    """Publish checkpoints that other nodes published before an interruption, and this node only wrote completely."""
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
                lines.append(f"published iteration {iteration} in {directory}, as other nodes already did")

    _on_all_ranks(directory, state, complete)


def _on_all_ranks(directory: Path, state: ParallelState, action: Callable[[], Result]) -> Result:
    """Return this rank's result of the action; raise on every rank if the file system failed on any rank."""

    def attempt() -> Result:
        try:
            return action()
        except OSError as failure:
            where = "" if state.rank == 0 else f" on rank {state.rank}"
            raise CheckpointError(f"cannot prepare {directory}{where}: {failure.strerror}; change --save") from failure

    return run_on_all_ranks(attempt, state.world)


def write_tokenizer_files(folder: Path, write_tokenizer: Callable[[Path], None] | None) -> str | None:
    """Write the tokenizer to a checkpoint's folder; on a tokenizer error return the reason and keep the checkpoint.

    Raises:
        CheckpointWriteError: writing to the file system failed.
    """
    if write_tokenizer is None:
        return None
    tokenizer = folder / TOKENIZER_FOLDER
    if isinstance(folder, ObjectPath):
        return _upload_tokenizer(tokenizer, write_tokenizer)
    try:
        tokenizer.mkdir()
        write_tokenizer(tokenizer)
        for path in tokenizer.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(tokenizer)
    except TokenizerError as failure:
        shutil.rmtree(tokenizer, ignore_errors=True)
        return str(failure)
    except OSError as failure:
        raise write_error(tokenizer, failure) from failure
    return None


def _upload_tokenizer(target: Path, write_tokenizer: Callable[[Path], None]) -> str | None:
    """Write the tokenizer to a local folder, and copy its files to the object store."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as name:
        local = Path(name) / TOKENIZER_FOLDER
        local.mkdir()
        try:
            write_tokenizer(local)
            for path in local.iterdir():
                (target / path.name).write_bytes(path.read_bytes())
        except TokenizerError as failure:
            return str(failure)
        except OSError as failure:
            raise write_error(target, failure) from failure
    return None


def warn_of_missing_tokenizer(warnings: Sequence[str | None], log: Log) -> bool:
    """Return whether any node could not record the tokenizer, and log it."""
    found = list(filter(None, warnings))
    if found:
        log(f"WARNING: the checkpoint is saved without its tokenizer: {found[0]}")
    return bool(found)


_THREAD_NAME = "checkpoint writer"
Result = TypeVar("Result")
Share = TypeVar("Share", TorchShare, TorchDistShare)


@dataclass(frozen=True, kw_only=True)
class CommonState:
    """Plain values that a run saves in addition to its tensors.

    ``config`` is the configuration as JSON values, ``scheduler`` the scheduler's state, ``model_record`` the record of
    the Hugging Face folder that the model was imported from. ``write_tokenizer`` writes the tokenizer's files to a
    given folder. The first rank of each folder calls it in the writer thread.
    """

    progress: TrainProgress
    config: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    model_record: Mapping[str, Any] | None = None
    write_tokenizer: Callable[[Path], None] | None = None


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """Destination of a run's checkpoints, and the roles of its ranks.

    The ``planner`` caches the plan of the native format between saves. With an ``area`` the tensors are first copied to
    it, and may change after the first step. The run does not remove checkpoints of the iterations ``kept``. Retention
    also keeps the oldest checkpoint ``on_trial``, which is not yet validated. ``number`` counts the run's saves.
    """

    directory: Path
    folders: SaveFolders
    state: ParallelState
    options: CheckpointConfig
    log: Log
    planner: SavePlanner
    area: StagingArea | None = None
    kept: frozenset[int] = frozenset()
    on_trial: frozenset[int] = frozenset()
    number: int = 0

    @property
    def is_leader(self) -> bool:
        return self.folders.is_leader(self.state.rank)

    @property
    def place(self) -> SavePlace:
        """Return the destination of this save."""
        return place_of(self.directory, self.folders.token, self.number)

    def saving_folder(self, iteration: int) -> Path:
        return self.place.folder(iteration)


def save_in_steps(tensors: CheckpointState, common: CommonState, target: SaveContext) -> Iterator[BackgroundTask[Any]]:
    """Save a checkpoint in collective steps, each after the previous tasks have ended on all ranks.

    Yields this rank's task between two steps. Only the steps communicate, so that the caller chooses their thread. Only
    the tasks access the shards, so that training can continue during them.

    Raises:
        CheckpointWriteError: the checkpoint could not be written. Raised on every rank.
    """
    directory, iteration = target.directory, common.progress.iteration
    content = _plain_content(tensors, common, target)
    target.log(f"saving checkpoint at iteration {iteration:7d} to {directory}")
    try:
        run_on_all_ranks(lambda: _create_folder(target, iteration), target.state.world)
        if target.options.ckpt_format == "torch":
            yield from _torch_steps(tensors, common, target, content)
        elif target.options.ckpt_format == "torch_dist":
            yield from _torch_dist_steps(tensors, common, target, content)
        else:
            yield from _native_steps(tensors, common, target, content)
    except MegatronError:
        if target.is_leader:
            target.place.give_up(iteration)
        raise
    target.log(f"  successfully saved checkpoint at iteration {iteration:7d} to {directory}")
    removing = BackgroundTask(lambda: apply_retention(target, iteration), _THREAD_NAME)
    yield removing
    for warning in filter(None, _results(removing, target.state)):
        target.log(warning)


def _native_steps(
    tensors: CheckpointState, common: CommonState, target: SaveContext, content: Mapping[str, Any]
) -> Iterator[BackgroundTask[Any]]:
    """Write and publish a checkpoint in the native format."""
    state, iteration = target.state, common.progress.iteration
    folder = target.saving_folder(iteration)
    described = _described(tensors, target)
    plan = target.planner.plan(described)
    share = take_share(plan, described, state.rank, state.world_size, target.place.tag)
    if target.area is not None:
        share = share.staged(target.area)
    write_tokenizer = common.write_tokenizer if target.is_leader else None
    writing = BackgroundTask(lambda: _write(folder, share, write_tokenizer), _THREAD_NAME)
    yield writing
    written = _results(writing, state)
    shares = [share for share, _ in written]
    if warn_of_missing_tokenizer([warning for _, warning in written], target.log):
        content = {**content, "tokenizer": None}
    if not target.folders.is_shared:
        # Every node writes the index.
        plan, shares, content = broadcast_object((plan, shares, content), state.world)
    finishing = BackgroundTask(lambda: _finish_folder(target, iteration, plan, shares, content), _THREAD_NAME)
    yield finishing
    _results(finishing, state)
    if not target.folders.is_shared:
        # Every node now has the complete index, so that any of them can complete the checkpoint.
        publishing = BackgroundTask(lambda: _publish(target, iteration), _THREAD_NAME)
        yield publishing
        _results(publishing, state)


def _planned_share(
    plan: Callable[
        [Path, Mapping[str, Any], Sequence[ShardedTensor], Mapping[str, torch.Tensor], ParallelState], Share
    ],
    tensors: CheckpointState,
    target: SaveContext,
    content: Mapping[str, Any],
    folder: Path,
) -> Share:
    """Plan this rank's writes in one of Megatron-LM's formats, staged if training continues meanwhile."""
    rng = {} if target.options.no_save_rng else tensors.rng
    if tensors.float8 is not None:
        content = {**content, FLOAT8_SCALING: {n: each.clone() for n, each in tensors.float8.tensors().items()}}
    share = plan(folder, content, _saved_state(tensors, target), rng, target.state)
    return share if target.area is None else share.staged(target.area)


def _torch_steps(
    tensors: CheckpointState, common: CommonState, target: SaveContext, content: Mapping[str, Any]
) -> Iterator[BackgroundTask[Any]]:
    """Write and publish a checkpoint in Megatron-LM's ``torch`` format."""
    iteration = common.progress.iteration
    folder = target.saving_folder(iteration)
    share = _planned_share(plan_torch_share, tensors, target, content, folder)
    write_tokenizer = common.write_tokenizer if target.is_leader else None
    recording = BackgroundTask(lambda: write_tokenizer_files(folder, write_tokenizer), _THREAD_NAME)
    yield recording
    warn_of_missing_tokenizer(_results(recording, target.state), target.log)
    for work in (
        share.create,
        share.add,
        share.finish,
        lambda: _publish(target, iteration),
    ):
        task = BackgroundTask(work, _THREAD_NAME)
        yield task
        _results(task, target.state)


def _torch_dist_steps(
    tensors: CheckpointState, common: CommonState, target: SaveContext, content: Mapping[str, Any]
) -> Iterator[BackgroundTask[Any]]:
    """Write and publish a checkpoint in Megatron-LM's ``torch_dist`` format."""
    iteration = common.progress.iteration
    folder = target.saving_folder(iteration)
    share = _planned_share(plan_torch_dist_share, tensors, target, content, folder)
    write_tokenizer = common.write_tokenizer if target.is_leader else None
    writing = BackgroundTask(lambda: (share.write(), write_tokenizer_files(folder, write_tokenizer)), _THREAD_NAME)
    yield writing
    results = _results(writing, target.state)
    warn_of_missing_tokenizer([warning for _, warning in results], target.log)

    def finish() -> None:
        if target.is_leader:
            share.complete([entry for entries, _ in results for entry in entries])
        _publish(target, iteration)

    finishing = BackgroundTask(finish, _THREAD_NAME)
    yield finishing
    _results(finishing, target.state)


def _plain_content(tensors: CheckpointState, common: CommonState, target: SaveContext) -> dict[str, Any]:
    """Return a copy of the current shared state.

    Raises:
        TypeError: a value is not plain data; nothing has been written yet.
    """
    optimizer = None if target.options.no_save_optim else tensors.optimizer
    content = {
        "progress": {name: value for name, value in dataclasses.asdict(common.progress).items() if value is not None},
        "config": common.config,
        "layout": target.state.sizes.record(),
        "optimizer": None if optimizer is None else optimizer.scalar_state(),
        "scheduler": None if optimizer is None else common.scheduler,
        "tokenizer": None if common.write_tokenizer is None else TOKENIZER_FOLDER,
    }
    if common.model_record is not None:
        content[MODEL_RECORD] = common.model_record
    copy: dict[str, Any] = json.loads(encode_common(content))
    return copy


def _described(tensors: CheckpointState, target: SaveContext) -> list[ShardedTensor]:
    rng = {} if target.options.no_save_rng else tensors.rng
    described = _saved_state(tensors, target) + rng_tensors(rng, target.state)
    return described + float8_tensors(tensors.float8, target.state)


def _saved_state(tensors: CheckpointState, target: SaveContext) -> list[ShardedTensor]:
    described = model_tensors(tensors.models)
    if tensors.optimizer is not None and not target.options.no_save_optim:
        described += optimizer_tensors(tensors.optimizer)
    return described


def _create_folder(target: SaveContext, iteration: int) -> None:
    if target.is_leader:
        try:
            target.folders.check_owner()
            target.place.create(iteration)
        except OSError as failure:
            raise write_error(target.saving_folder(iteration), failure) from failure


def _write(
    folder: Path, share: RankShare, write_tokenizer: Callable[[Path], None] | None
) -> tuple[WrittenShare, str | None]:
    warning = write_tokenizer_files(folder, write_tokenizer)
    return share.write(folder), warning


def _finish_folder(
    target: SaveContext, iteration: int, plan: SavePlan, shares: Sequence[WrittenShare], content: Mapping[str, Any]
) -> None:
    """Write the index, and publish it if all ranks share the folder."""
    if not target.is_leader:
        return
    folder = target.saving_folder(iteration)
    try:
        target.place.finish(iteration, build_index(plan, shares, content, target.place.tag))
        if not target.folders.is_shared:
            # So that the hidden folder is found again after an interruption.
            sync_folder(target.directory)
    except OSError as failure:
        raise write_error(folder / INDEX_FILE, failure) from failure
    if target.folders.is_shared:
        _publish(target, iteration)


def _publish(target: SaveContext, iteration: int) -> None:
    if target.is_leader:
        try:
            target.folders.check_owner()
            target.place.publish(iteration)
        except OSError as failure:
            raise write_error(iteration_folder(target.directory, iteration), failure) from failure


def apply_retention(target: SaveContext, iteration: int) -> str | None:
    """Remove checkpoints according to the retention rule after a save; return a warning if that fails."""
    if target.is_leader:
        options = target.options
        retention = Retention(options.num_newest_kept, options.kept_multiple, target.kept, target.on_trial)
        try:
            target.folders.check_owner()
            target.place.remove_expired(iteration, retention)
        except OSError as error:
            return f"WARNING: could not remove an old checkpoint in {target.directory}: {error.strerror}"
    return None


def _results(task: BackgroundTask[Result], state: ParallelState) -> list[Result]:
    """Return the results of all ranks' tasks in rank order on the first rank; an empty list on the others.

    Raises:
        MegatronError: a task failed. Raised on every rank.
    """
    return gather_from_world(run_on_all_ranks(task.result, state.world), state)
