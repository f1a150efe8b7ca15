"""Load a run: which checkpoint, when one may be loaded, and what it fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import whole_tensor
from megatron.core.dist_checkpointing.serialization import load_index, load_tensors
from megatron.core.dist_checkpointing.state_dict import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    RunTensors,
    describe_layout,
    empty_rng,
    model_tensors,
    optimizer_tensors,
    rng_prefix,
)
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import ParallelState, describe_parallel_state
from megatron.training.checkpoint_choice import (
    Log,
    agree_on_candidates,
    agree_on_required_candidates,
    first_undamaged,
    report_missing,
)
from megatron.training.config.checkpoint_config import CheckpointConfig
from megatron.training.config_changes import compare_configs
from megatron.training.train_state import TrainProgress


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Hold what a load gives beside the tensors that it filled in place.

    ``scheduler`` is None where the optimizer's state was not loaded, ``rng`` where the streams stay as they were
    seeded. ``config`` is the configuration that the checkpoint was saved with.
    """

    folder: Path
    progress: TrainProgress
    config: Mapping[str, Any]
    optimizer_loaded: bool
    scheduler: Mapping[str, Any] | None
    rng: Mapping[str, torch.Tensor] | None


def load_checkpoint(
    directory: str | Path,
    tensors: RunTensors,
    state: ParallelState,
    options: CheckpointConfig,
    config: Mapping[str, Any],
    log: Log,
    verify: bool = True,
) -> LoadedCheckpoint | None:
    """Fill a run's tensors in place from the newest complete checkpoint that the tracker file points at.

    A damaged checkpoint is passed over for the next older one, unless ``options.ckpt_step`` names it. Returns None,
    after a warning, where the directory holds no tracker file. ``config`` is the run's own configuration; differences
    are logged. Without ``verify`` checksums are not compared.

    Raises:
        CheckpointError: there is none and ``options.exit_on_missing_checkpoint``; it is of another model; all are
            damaged. On every rank alike.
    """
    directory = Path(directory)
    folders = agree_on_candidates(directory, options.ckpt_step, state)
    if not folders:
        report_missing(directory, options.exit_on_missing_checkpoint, log)
        return None

    def load(folder: Path) -> LoadedCheckpoint:
        return _load_folder(folder, tensors, state, options, config, log, verify)

    loaded = first_undamaged(folders, load, log)
    log(f"  successfully loaded checkpoint from {directory} at iteration {loaded.progress.iteration}")
    return loaded


def load_model_weights(
    directory: str | Path,
    models: Sequence[torch.nn.Module],
    state: ParallelState,
    log: Log,
    ckpt_step: int | None = None,
    verify: bool = True,
    allow_cast: bool = False,
) -> Path:
    """Fill the models' weights in place and return the folder that they came from.

    With ``allow_cast`` weights stored in another dtype are converted.

    Raises:
        CheckpointError: there is no checkpoint, it is of another model, or all are damaged.
    """

    def load(folder: Path) -> Path:
        index = load_index(folder, state.world, verify)
        wanted = model_tensors(models)
        load_tensors(folder, index, wanted, (MODEL_PREFIX,), state.world, verify, allow_cast)
        return folder

    return first_undamaged(agree_on_required_candidates(Path(directory), ckpt_step, state), load, log)


def read_common(directory: str | Path, ckpt_step: int | None = None, log: Log = print) -> dict[str, Any]:
    """Return the plain values of a checkpoint: progress, config, layout, optimizer, scheduler, tokenizer.

    ``folder`` (a Path) is added, and ``tokenizer`` is the Path of the tokenizer's files or None. Only this process
    reads; nothing communicates.

    Raises:
        CheckpointError: there is no checkpoint, or all are damaged.
    """
    alone = describe_parallel_state(0, 1)

    def load(folder: Path) -> dict[str, Any]:
        common = dict(load_index(folder, alone.world).common)
        tokenizer = common["tokenizer"]
        return common | {"folder": folder, "tokenizer": None if tokenizer is None else folder / tokenizer}

    return first_undamaged(agree_on_required_candidates(Path(directory), ckpt_step, alone), load, log)


def _load_folder(
    folder: Path,
    tensors: RunTensors,
    state: ParallelState,
    options: CheckpointConfig,
    config: Mapping[str, Any],
    log: Log,
    verify: bool,
) -> LoadedCheckpoint:
    index = load_index(folder, state.world, verify)
    common = index.common
    _compare_configuration(folder, common["config"], config, log)
    optimizer = None if options.finetune or options.no_load_optim else tensors.optimizer
    if optimizer is not None and common["optimizer"] is None:
        raise CheckpointError(
            f"checkpoint {folder} holds no optimizer state; add --no-load-optim to begin with a new one, or --finetune"
        )
    described, namespaces = model_tensors(tensors.models), [MODEL_PREFIX]
    if optimizer is not None:
        described += optimizer_tensors(optimizer)
        namespaces.append(OPTIMIZER_PREFIX)
    rng = None if options.finetune or options.no_load_rng else _matching_rng(index, tensors, state, log)
    if rng is not None:
        described += [whole_tensor(rng_prefix(state) + name, tensor) for name, tensor in rng.items()]
    load_tensors(folder, index, described, namespaces, state.world, verify)
    if optimizer is not None:
        optimizer.load_scalar_state(dict(common["optimizer"]))
    return LoadedCheckpoint(
        folder=folder,
        progress=TrainProgress() if options.finetune else TrainProgress(**common["progress"]),
        config=common["config"],
        optimizer_loaded=optimizer is not None,
        scheduler=None if optimizer is None else common["scheduler"],
        rng=rng,
    )


def _compare_configuration(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any], log: Log) -> None:
    changes = compare_configs(old, new)
    if changes.shape:
        fields = "".join(f"\n  {change}" for change in changes.shape)
        raise CheckpointError(f"checkpoint {folder} is of another model (checkpoint -> this run):{fields}")
    for change in changes.other:
        log(f"configuration changed since the checkpoint: {change}")


def _matching_rng(
    index: CheckpointIndex, tensors: RunTensors, state: ParallelState, log: Log
) -> dict[str, torch.Tensor] | None:
    """Return room for the stored streams where they fit this run, else None, having said why."""
    layout = describe_layout(state)
    stored = empty_rng(index, state)
    shapes = {name: tensor.shape for name, tensor in tensors.rng.items()}
    if index.common["layout"] != layout:
        old = index.common["layout"]
        changed = [axis for axis in layout if old.get(axis) != layout[axis]]
        reason = "layout: " + ", ".join(f"{axis} {old.get(axis)} -> {layout[axis]}" for axis in changed)
    elif not stored:
        reason = "the checkpoint holds no state of them"
    elif {name: tensor.shape for name, tensor in stored.items()} != shapes:
        reason = f"the checkpoint's are {sorted(stored)}, of another device or program than this run's {sorted(shapes)}"
    else:
        return stored
    log(f"random number streams start from the seed again: {reason}")
    return None
