"""Save a run: what goes into a checkpoint, and how it is written and published."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.index import encode_common
from megatron.core.dist_checkpointing.serialization import raise_on_all_ranks, save_tensors
from megatron.core.dist_checkpointing.state_dict import (
    RunTensors,
    describe_layout,
    model_tensors,
    optimizer_tensors,
    rng_tensors,
)
from megatron.core.dist_checkpointing.storage import sync_folder
from megatron.core.errors import CheckpointError, MegatronError
from megatron.core.parallel_state import ParallelState
from megatron.training.checkpoint_choice import Log
from megatron.training.checkpoint_directory import (
    create_saving_folder,
    publish,
    remove_expired,
    saving_folder,
)
from megatron.training.config.checkpoint_config import CheckpointConfig
from megatron.training.train_state import TrainProgress

TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class CommonState:
    """Hold the plain values that a run saves beside its tensors.

    ``config`` is the configuration as JSON values, ``scheduler`` the scheduler's state. ``write_tokenizer`` is given
    a folder to leave the tokenizer's files in; rank 0 calls it.
    """

    progress: TrainProgress
    config: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    write_tokenizer: Callable[[Path], None] | None = None


def save_checkpoint(
    directory: str | Path,
    tensors: RunTensors,
    common: CommonState,
    state: ParallelState,
    options: CheckpointConfig,
    log: Log,
) -> None:
    """Save a checkpoint, collectively: it appears under its name only when all of all ranks is on disk.

    Raises:
        CheckpointError: it could not be written, on every rank alike; what was saved before is still in place.
    """
    directory = Path(directory)
    iteration = common.progress.iteration
    optimizer = None if options.no_save_optim else tensors.optimizer
    rng = {} if options.no_save_rng else tensors.rng
    content = {
        "progress": dataclasses.asdict(common.progress),
        "config": common.config,
        "layout": describe_layout(state),
        "optimizer": None if optimizer is None else optimizer.scalar_state(),
        "scheduler": None if optimizer is None else common.scheduler,
        "tokenizer": None if common.write_tokenizer is None else TOKENIZER_FOLDER,
    }
    encode_common(content)  # a value that is not plain data must fail before anything is written
    described = model_tensors(tensors.models) + rng_tensors(rng, state)
    if optimizer is not None:
        described += optimizer_tensors(optimizer)

    log(f"saving checkpoint at iteration {iteration:7d} to {directory}")
    try:
        _on_first_rank(state, f"cannot create a folder in {directory}", lambda: _begin(directory, common))
        save_tensors(saving_folder(directory, iteration), described, content, state.world)
        _on_first_rank(state, f"cannot publish in {directory}", lambda: publish(directory, iteration))
    except CheckpointError:
        if state.world.is_first:
            shutil.rmtree(saving_folder(directory, iteration), ignore_errors=True)
        raise
    log(f"  successfully saved checkpoint at iteration {iteration:7d} to {directory}")
    if state.world.is_first:
        _apply_retention(directory, iteration, options, log)


def _begin(directory: Path, common: CommonState) -> None:
    folder = create_saving_folder(directory, common.progress.iteration)
    if common.write_tokenizer is None:
        return
    tokenizer = folder / TOKENIZER_FOLDER
    tokenizer.mkdir()
    common.write_tokenizer(tokenizer)
    for path in tokenizer.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(tokenizer)


def _on_first_rank(state: ParallelState, complaint: str, action: Callable[[], None]) -> None:
    """Run an action on rank 0 and let every rank learn whether the file system refused it."""
    error: MegatronError | None = None
    if state.world.is_first:
        try:
            action()
        except OSError as failure:
            error = CheckpointError(f"{complaint}: {failure.strerror or failure}")
        except MegatronError as failure:
            error = failure
    raise_on_all_ranks(error, state.world)


def _apply_retention(directory: Path, iteration: int, options: CheckpointConfig, log: Log) -> None:
    try:
        remove_expired(directory, iteration, options.keep_last, options.keep_every)
    except OSError as error:
        log(f"WARNING: could not remove an old checkpoint in {directory}: {error.strerror}")
