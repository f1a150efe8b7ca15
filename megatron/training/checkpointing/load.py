"""Load a run: which checkpoint, when one may be loaded, and what it fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.train_state import TrainProgress
from megatron.config.training_config import CheckpointConfig
from megatron.core.collectives import raise_on_all_ranks
from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.load import LoadedTensors, Progress, untold
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict import (
    MODEL_PREFIX,
    RunTensors,
    average_choice,
    model_tensors,
    optimizer_tensors,
)
from megatron.core.dist_checkpointing.validation import STRICT, STRICTNESS, Strictness
from megatron.core.distributed.weight_checks import not_finite
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.object_store import as_path, local_copy
from megatron.core.parallel_state import ParallelState, describe_parallel_state
from megatron.interop.checkpoint_format import detect_format
from megatron.interop.huggingface.model_record import MODEL_RECORD
from megatron.interop.torchtitan.told_settings import describe_told
from megatron.training.checkpointing.choice import (
    Log,
    agree_on_candidates,
    agree_on_required_candidates,
    first_undamaged,
    refuse_random_weights,
    warn_of_random_weights,
)
from megatron.training.checkpointing.config_changes import (
    ConfigChange,
    compare_configs,
    refuse_other_adapters,
    without_new_adapters,
)
from megatron.training.checkpointing.folder import iteration_of_folder
from megatron.training.checkpointing.native import is_release, open_stored
from megatron.training.checkpointing.precision import MAIN_PREFIX, choose_float8, plan_precision
from megatron.training.checkpointing.rng import choose_streams


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Hold what a load gives beside the tensors that it filled in place.

    ``begins_anew`` says that the weights alone count, of a release or with ``--finetune``. ``scheduler`` is None where
    the optimizer's state was not loaded. ``rng`` holds the random number streams that go
    on, for `RngStreams.resume`; it is None where all stay as they were seeded. ``config`` is the configuration that
    the checkpoint was saved with, ``model_record`` what it says of the Hugging Face folder that the model came from.
    """

    folder: Path
    progress: TrainProgress
    config: Mapping[str, Any]
    begins_anew: bool
    optimizer_loaded: bool
    scheduler: Mapping[str, Any] | None
    rng: Mapping[str, torch.Tensor] | None
    model_record: Mapping[str, Any] | None = None


def load_checkpoint(
    directory: str | Path,
    tensors: RunTensors,
    state: ParallelState,
    options: CheckpointConfig,
    config: Mapping[str, Any],
    log: Log,
    check_schedule: Callable[[Mapping[str, Any]], None] = lambda state: None,
    told: Progress = untold,
) -> LoadedCheckpoint | None:
    """Fill a run's tensors in place from the newest complete checkpoint that the tracker file points at.

    The directory may also be a checkpoint itself. A damaged checkpoint is passed over for the next older one, unless
    ``options.ckpt_step`` names it. Returns None, after a warning, where there is none and the run may start from random
    weights. ``config`` is the run's own configuration; differences are logged. ``check_schedule`` is called with the
    scheduler's state before any tensor is read, and may refuse it. ``told`` learns how far the reading is.

    Raises:
        CheckpointError: there is none and random weights are not meant; it is of another model; all are damaged. On
            every rank alike.
    """
    directory = as_path(directory)
    folders = agree_on_candidates(directory, options.ckpt_step, state, log)
    if not folders:
        refuse_random_weights(directory, options, state)
        warn_of_random_weights(directory, log)
        return None

    filled: set[str] = set()

    def load(folder: Path) -> LoadedCheckpoint:
        log(_describe_choice(directory, folder))
        return _load_folder(folder, tensors, state, options, config, log, filled, check_schedule, told)

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
    told: Progress = untold,
) -> Path:
    """Fill the models' weights in place and return the folder that they came from.

    With ``allow_cast`` weights stored in another dtype are converted. ``told`` learns how far the reading is.

    Raises:
        CheckpointError: there is no checkpoint, it is of another model, or all are damaged.
    """

    def load(folder: Path) -> Path:
        stored = open_stored(folder, state, verify)
        stored.load(model_tensors(models), (MODEL_PREFIX,), allow_cast=allow_cast, progress=told)
        return folder

    return first_undamaged(agree_on_required_candidates(as_path(directory), ckpt_step, state, log), load, log)


def read_common(directory: str | Path, ckpt_step: int | None = None, log: Log = print) -> dict[str, Any]:
    """Return the plain values of a checkpoint: progress, config, layout, optimizer, scheduler, tokenizer.

    ``folder`` (a Path) is added, and ``tokenizer`` is the Path of the tokenizer's files or None. Only this process
    reads; nothing communicates.

    Raises:
        CheckpointError: there is no checkpoint, or all are damaged.
    """
    alone = describe_parallel_state(0, 1)

    def load(folder: Path) -> dict[str, Any]:
        common = dict(open_stored(folder, alone).index.common)
        tokenizer = common["tokenizer"]
        return common | {"folder": folder, "tokenizer": None if tokenizer is None else local_copy(folder / tokenizer)}

    return first_undamaged(agree_on_required_candidates(as_path(directory), ckpt_step, alone, log), load, log)


def _load_folder(
    folder: Path,
    tensors: RunTensors,
    state: ParallelState,
    options: CheckpointConfig,
    config: Mapping[str, Any],
    log: Log,
    filled: set[str],
    check_schedule: Callable[[Mapping[str, Any]], None],
    told: Progress,
) -> LoadedCheckpoint:
    """Load one folder. ``filled`` collects the tensors that a damaged one may have filled before it was given up."""
    verify, strictness = options.verify_checkpoint, STRICTNESS[options.dist_ckpt_strictness]
    stored = open_stored(folder, state, verify, config.get("model"))
    log(f" checkpoint version {stored.version}")
    begins_anew = options.finetune or is_release(folder)
    common = stored.index.common
    changes = _compare_configuration(folder, stored.config, config, strictness)
    refuse_other_adapters(folder, stored.config, config)
    optimizer = None if begins_anew or options.no_load_optim else tensors.optimizer
    if optimizer is not None and common["optimizer"] is None:
        raise CheckpointError(
            f"checkpoint {folder} holds no optimizer state; add --no-load-optim to begin with a new one, or --finetune"
        )
    if optimizer is not None and common["scheduler"] is not None:
        check_schedule(common["scheduler"])
    progress = TrainProgress() if begins_anew else _progress_of(folder, common)
    described, namespaces = model_tensors(tensors.models), [MODEL_PREFIX]
    described = without_new_adapters(described, folder, stored.index.tensors, config, begins_anew)
    if optimizer is not None:
        averages = average_choice(optimizer_tensors(optimizer), stored.index)
        described += averages.tensors
        namespaces += averages.namespaces
    change = plan_precision(described, namespaces, stored.index, state)
    described = list(change.tensors)
    if optimizer is not None and strictness.allows_missing:
        _check_main_params(folder, described, stored.index, state)
    choice = None
    if not begins_anew and not options.no_load_rng:
        choice = choose_streams(stored.index, tensors.rng, state, progress.iteration)
        described += choice.tensors
    scaling = choose_float8(stored.index, None if begins_anew else tensors.float8, state)
    described += scaling.tensors
    if strictness.allows_missing:
        _check_untouched(folder, described, stored.index, filled, state)
        filled.update(stored.index.tensors)
    loaded = stored.load(described, change.namespaces, strictness, change.is_needed, told)
    _check_finite(folder, described, state)
    if detect_format(folder) == "torchtitan":
        log(describe_told(config["model"], folder))
    for field in changes:
        log(f"configuration changed since the checkpoint: {field}")
    if change.line is not None:
        log(change.line)
    _report_misfits(loaded, strictness, log)
    for line in (None if choice is None else choice.line, scaling.line):
        if line is not None:
            log(line)
    if tensors.float8 is not None:
        tensors.float8.loaded()
    if optimizer is not None:
        scalars = dict(common["optimizer"])
        if change.is_needed:
            # A loss scale belongs to a precision.
            scalars["grad_scaler"] = optimizer.scalar_state()["grad_scaler"]
        optimizer.load_scalar_state(scalars)
        if averages.line is not None:
            log(averages.line)
            optimizer.restart_average()
    return LoadedCheckpoint(
        folder=folder,
        progress=progress,
        config=stored.config,
        begins_anew=begins_anew,
        optimizer_loaded=optimizer is not None,
        scheduler=None if optimizer is None else common["scheduler"],
        rng=None if choice is None else choice.streams,
        model_record=common.get(MODEL_RECORD),
    )


def _progress_of(folder: Path, common: Mapping[str, Any]) -> TrainProgress:
    try:
        return TrainProgress(**common["progress"])
    except TypeError as error:
        raise DamagedCheckpointError(f"{folder}: what it records of its run's progress is none ({error})") from error


def _describe_choice(directory: Path, folder: Path) -> str:
    """Return Megatron's line on what is about to be loaded."""
    iteration = iteration_of_folder(folder)
    if iteration is None:
        return f" loading release checkpoint from {directory}"
    return f" loading checkpoint from {directory} at iteration {iteration}"


def _compare_configuration(
    folder: Path, old: Mapping[str, Any], new: Mapping[str, Any], strictness: Strictness
) -> tuple[ConfigChange, ...]:
    """Return what differs and is no reason to refuse the checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    changes = compare_configs(old, new)
    refused = (*changes.shape, *changes.weights) if strictness == STRICT else changes.shape
    if refused:
        fields = "; ".join(f"{change}{_remedy(change)}" for change in refused)
        raise CheckpointError(f"checkpoint {folder} is of another model (checkpoint -> this run): {fields}")
    return (*changes.weights, *changes.other)


def _remedy(change: ConfigChange) -> str:
    """Return what to do about a model with more rows than its tokenizer has tokens, as published ones often have."""
    if change.field != "model.vocab_size" or change.old <= change.new:
        return ""
    return f" (if only the tokenizer is smaller than the model, add --extra-vocab-size {change.old - change.new})"


def _check_main_params(
    folder: Path, tensors: Sequence[ShardedTensor], index: CheckpointIndex, state: ParallelState
) -> None:
    """Refuse to leave a main parameter at its initial value where its weight is loaded: training would undo the load.

    Raises:
        CheckpointError: the checkpoint holds weights without their main parameters. On every rank alike.
    """
    prefix = MAIN_PREFIX
    lost = [
        tensor.name
        for tensor in tensors
        if tensor.name.startswith(prefix)
        and tensor.name not in index.tensors
        and MODEL_PREFIX + tensor.name.removeprefix(prefix) in index.tensors
    ]
    error = None
    if lost:
        error = CheckpointError(
            f"checkpoint {folder} holds weights without their main parameters ({', '.join(sorted(set(lost))[:4])}"
            f"{'' if len(set(lost)) <= 4 else ' ...'}); add --no-load-optim"
        )
    raise_on_all_ranks(error, state.world)


def _check_untouched(
    folder: Path, tensors: Sequence[ShardedTensor], index: CheckpointIndex, filled: Set[str], state: ParallelState
) -> None:
    """Refuse a checkpoint that lacks a tensor which a damaged one, tried before it, may have filled.

    Such a tensor no longer has its initial value.

    Raises:
        CheckpointError: a tensor that this checkpoint lacks is in the damaged one. On every rank alike.
    """
    lost = sorted({tensor.name for tensor in tensors if tensor.name not in index.tensors and tensor.name in filled})
    error = None
    if lost:
        error = CheckpointError(
            f"checkpoint {folder} lacks {', '.join(lost[:4])}{'' if len(lost) <= 4 else ' ...'}, which the damaged one "
            "after it may have filled in part; name the older one with --ckpt-step to begin from initial values"
        )
    raise_on_all_ranks(error, state.world)


def _check_finite(folder: Path, tensors: Sequence[ShardedTensor], state: ParallelState) -> None:
    """Refuse to train from what is not finite, as from a damaged checkpoint: an older one may be whole.

    Raises:
        DamagedCheckpointError: a tensor holds such values. On every rank alike.
    """
    bad = {id(data) for data in not_finite([tensor.data for tensor in tensors])}
    names = sorted({tensor.name for tensor in tensors if id(tensor.data) in bad})
    error = None
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        error = DamagedCheckpointError(
            f"checkpoint {folder} holds values that are not finite, in {', '.join(names[:4])}{more}; no training can "
            "go on from them: choose an older one with --ckpt-step"
        )
    raise_on_all_ranks(error, state.world)


def _report_misfits(loaded: LoadedTensors, strictness: Strictness, log: Log) -> None:
    if loaded.left_alone:
        log(f"WARNING: the checkpoint lacks {len(loaded.left_alone)} tensors of this run; left at their initial value:")
        for name in loaded.left_alone:
            log(f"    {name}")
    if loaded.passed_over and strictness.lists_unexpected:
        log(f"WARNING: the checkpoint has {len(loaded.passed_over)} tensors that this run lacks:")
        for name in loaded.passed_over:
            log(f"    {name}")
