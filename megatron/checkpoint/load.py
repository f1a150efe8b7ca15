"""Load a checkpoint into a run: select and open it, check its configuration, and fill the run's state.

All ranks agree on the newest complete checkpoint. Includes precision changes (the source of each tensor) and random
number streams at any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.checkpoint.checkpoint_folder import (
    TRACKER_FILE,
    candidate_folders,
    complete_iterations,
    detect_format,
    holds_tokenizer,
    iteration_folder,
    iteration_of_folder,
    list_some,
    lost_tracker,
    saved_iterations,
    weight_files,
)
from megatron.checkpoint.config_changes import (
    ConfigChange,
    compare_configs,
    refuse_other_adapters,
    without_new_adapters,
)
from megatron.checkpoint.formats import describe_told
from megatron.checkpoint.formats.huggingface import MODEL_RECORD
from megatron.checkpoint.stored_checkpoint import is_release, open_stored
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
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    STRICT,
    STRICTNESS,
    CheckpointIndex,
    CheckpointState,
    Float8Scaling,
    LoadedTensors,
    Progress,
    ShardedTensor,
    Strictness,
    average_choice,
    dtype_name,
    float8_tensors,
    ignore_progress,
    model_tensors,
    optimizer_tensors,
    rng_name,
    whole_tensor,
)
from megatron.core.distributed import not_finite
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.object_store import as_path, local_copy
from megatron.core.parallel_config import GRID_AXES, SIZE_NAMES
from megatron.core.parallel_state import ParallelState, describe_parallel_state
from megatron.core.tensor_parallel import STREAM_AXES

Result = TypeVar("Result")


def agree_on_candidates(directory: Path, ckpt_step: int | None, state: ParallelState, log: Log) -> list[Path]:
    """Return the folders to try, newest first, as rank 0 sees them; empty if there is no checkpoint.

    A warning is logged if the tracker file does not name them.

    Raises:
        CheckpointError: the requested iteration does not exist, or the tracker file is invalid.
    """
    seen = run_on_all_ranks(
        lambda: candidate_folders(directory, ckpt_step) if state.world.is_first else [], state.world
    )
    found: list[Path] = broadcast_object(seen, state.world)
    lost = lost_tracker(directory) if state.world.is_first and found and ckpt_step is None else None
    if lost is not None and found[0] != directory:
        log(f"WARNING: {lost}: loading the newest complete checkpoint in its folder, {found[0].name}")
    if not found:
        _refuse_where_others_have_some(directory, state)
    return found


def _refuse_where_others_have_some(directory: Path, state: ParallelState) -> None:
    here = (directory / TRACKER_FILE).exists() or bool(complete_iterations(directory))
    if any_rank(here, state.world):
        trackers = all_gather_objects(here, state.world)
        raise CheckpointError(
            f"rank {trackers.index(True)} finds checkpoints in {directory}, but rank 0, on a different node, finds "
            "none; restore the folder on rank 0's node, or remove it on the other nodes to start from scratch"
        )


def agree_on_required_candidates(directory: Path, ckpt_step: int | None, state: ParallelState, log: Log) -> list[Path]:
    """Return the folders to try, as rank 0 sees them; at least one.

    Raises:
        CheckpointError: there is no checkpoint. Raised on every rank.
    """
    folders = agree_on_candidates(directory, ckpt_step, state, log)
    if not folders:
        raise CheckpointError(f"{directory} contains no checkpoint: it has no file {TRACKER_FILE}")
    return folders


def refuse_random_weights(directory: Path, options: CheckpointConfig, state: ParallelState) -> None:
    """Raise on every rank if a run would start from random weights although ``--load`` names a checkpoint.

    Rank 0 inspects the folder. Random weights are accepted if the run also saves to the folder, or if the folder has
    only a tokenizer.

    Raises:
        CheckpointError: random weights are not accepted. Raised on every rank.
    """
    reason = _reason_against_random(directory, options) if state.world.is_first else None
    reason = broadcast_object(reason, state.world)
    if reason is not None:
        raise CheckpointError(f"--load {directory} {reason}")


def _reason_against_random(directory: Path, options: CheckpointConfig) -> str | None:
    exists = directory.exists()
    found = f"contains no checkpoint (it has no file {TRACKER_FILE})" if exists else "does not exist"
    broken = [step for step in saved_iterations(directory) if any(iteration_folder(directory, step).iterdir())]
    if broken:
        return (
            f"{found}, but it has incomplete iterations ({list_some(broken)}); restore their missing files, or remove "
            "them to start a new run"
        )
    given = {
        "--exit-on-missing-checkpoint": options.exit_on_missing_checkpoint,
        "--finetune": options.finetune,
        "--use-checkpoint-args": options.use_checkpoint_args and not exists,
        "--no-load-optim": options.no_load_optim and not exists,
    }
    for name, is_given in given.items():
        if is_given:
            return (
                f"{found}, but {name} needs a checkpoint; pass the folder that a run saved to, or the folder of a model"
            )
    weights = weight_files(directory)
    if weights:
        named = ", ".join(weights[:4]) + (" ..." if len(weights) > 4 else "")
        return (
            f"contains weights that cannot be loaded ({named}): the folder has neither the {TRACKER_FILE} of a run nor "
            "the config.json of a Hugging Face model"
        )
    is_own = options.save is not None and as_path(options.save).resolve() == directory.resolve()
    if is_own or holds_tokenizer(directory):
        return None
    return (
        f"{found}; pass the folder that a run saved to, the folder of a model, or the --save folder to start a new run"
    )


def warn_of_random_weights(directory: Path, log: Log, *, is_brief: bool) -> None:
    """Log a warning that a run starts from random weights; with ``is_brief``, a plain line instead of Megatron's."""
    if is_brief:
        log(f" > {directory} has no checkpoint yet: the run starts from random weights")
        return
    log(f"WARNING: could not find the metadata file {directory / TRACKER_FILE}")
    log("    will not load any checkpoints and will start from random")


def first_undamaged(folders: Sequence[Path], load: Callable[[Path], Result], log: Log) -> Result:
    """Return the result of ``load`` for the first undamaged folder, which is the same on every rank.

    Raises:
        CheckpointError: all folders are damaged.
    """
    for folder, older in zip(folders, [*folders[1:], None]):
        try:
            return load(folder)
        except DamagedCheckpointError as error:
            if len(folders) == 1:
                raise
            if older is None:
                raise CheckpointError(f"all {len(folders)} checkpoints are damaged; the oldest: {error}") from error
            log(f"WARNING: checkpoint {folder} is damaged ({_one_line(error)}); falling back to {older}")
    raise AssertionError("there is at least one candidate")


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())


MAIN_PREFIX = OPTIMIZER_PREFIX + "main_param."


@dataclass(frozen=True, eq=False)
class PrecisionChange:
    """A run's tensors under the names of the stored tensors that fill them, and the namespaces that are loaded.

    ``is_needed``, which is the same on every rank, states that some weights are stored in another precision. ``line``
    is its log line.
    """

    tensors: Sequence[ShardedTensor]
    namespaces: Sequence[str]
    is_needed: bool = False
    line: str | None = None


def plan_precision(
    tensors: Sequence[ShardedTensor], namespaces: Sequence[str], index: CheckpointIndex, state: ParallelState
) -> PrecisionChange:
    """Select the stored tensors that fill a run's tensors; collective.

    Weights that are stored in another precision are loaded from the checkpoint's main parameters if it has them.
    Missing main parameters are loaded from weights with the same precision. A main parameter is never loaded from
    rounded values.
    """
    changed = [
        (index.tensors[tensor.name].dtype, dtype_name(tensor.data.dtype))
        for tensor in tensors
        if tensor.name.startswith(MODEL_PREFIX)
        and tensor.name in index.tensors
        and index.tensors[tensor.name].dtype != dtype_name(tensor.data.dtype)
    ]
    if not any_rank(bool(changed), state.world):
        return PrecisionChange(tensors, namespaces)
    renamed = [replace(tensor, name=_origin(tensor, index)) for tensor in tensors]
    has_main_params = any(name.startswith(MAIN_PREFIX) for name in index.tensors)
    if has_main_params:
        namespaces = [MAIN_PREFIX if namespace == MODEL_PREFIX else namespace for namespace in namespaces]
    line = None
    if changed:
        origin = "main parameters" if has_main_params else "weights"
        stored, own = changed[0]
        line = (
            f"precision: the checkpoint's weights are {stored}, this run's {own}: converted from the checkpoint's "
            f"{origin}"
        )
    return PrecisionChange(renamed, namespaces, True, line)


def _origin(tensor: ShardedTensor, index: CheckpointIndex) -> str:
    own = dtype_name(tensor.data.dtype)
    if tensor.name.startswith(MODEL_PREFIX):
        main = MAIN_PREFIX + tensor.name.removeprefix(MODEL_PREFIX)
        is_stored_so = tensor.name in index.tensors and index.tensors[tensor.name].dtype == own
        return main if main in index.tensors and not is_stored_so else tensor.name
    if tensor.name.startswith(MAIN_PREFIX) and tensor.name not in index.tensors:
        weight = index.tensors.get(MODEL_PREFIX + tensor.name.removeprefix(MAIN_PREFIX))
        if weight is not None and weight.dtype == own:
            return weight.name
    return tensor.name


@dataclass(frozen=True, eq=False)
class Float8Choice:
    """Delayed-scaling tensors to resume from a checkpoint, or the log line that explains why they restart."""

    tensors: tuple[ShardedTensor, ...]
    line: str | None


def choose_float8(index: CheckpointIndex, float8: Float8Scaling | None, state: ParallelState) -> Float8Choice:
    """Resume delayed scaling if the checkpoint has a history of the same layers and length."""
    tensors = tuple(float8_tensors(float8, state))
    stored = [index.tensors.get(tensor.name) for tensor in tensors]
    if all(have is not None and have.global_shape == want.global_shape for have, want in zip(stored, tensors)):
        return Float8Choice(tensors, None)
    if any(have is None for have in stored):
        reason = "the checkpoint contains none"
    else:
        reason = "the checkpoint has a different --fp8-amax-history-len"
    return Float8Choice((), f"fp8: scales and amax histories start from their initial values, because {reason}")


@dataclass(frozen=True, eq=False)
class StreamChoice:
    """Buffers for the streams to resume, the tensors that fill them, and a log line about the others, or None."""

    streams: Mapping[str, torch.Tensor]
    tensors: tuple[ShardedTensor, ...]
    line: str | None


def choose_streams(
    index: CheckpointIndex, own: Mapping[str, torch.Tensor], state: ParallelState, iteration: int
) -> StreamChoice:
    """Select the streams of ``own`` that the checkpoint can resume.

    A stream is resumed if the layout has the same size along every axis along which the stream differs. For example,
    dropout streams that are equal on all tensor-parallel ranks are resumed at another tensor-parallel size. No stream
    is resumed on another kind of device, or from a checkpoint without streams.
    """
    old, new = index.common["layout"], state.sizes.record()
    changed = {axis for axis, size in SIZE_NAMES.items() if old.get(size) != new[size]}
    place = {axis: 0 if axis in changed else at for axis, at in state.place.items()}
    streams, tensors = {}, []
    for stream, values in own.items():
        stored = index.tensors.get(rng_name(stream, place))
        is_like = stored is not None and (stored.global_shape, stored.dtype) == (
            tuple(values.shape),
            dtype_name(values.dtype),
        )
        if is_like and changed.isdisjoint(STREAM_AXES.get(stream, GRID_AXES)):
            streams[stream] = torch.empty_like(values)
            tensors.append(whole_tensor(rng_name(stream, place), streams[stream]))
    begun = [stream for stream in own if stream not in streams]
    if not begun:
        return StreamChoice(streams, tuple(tensors), None)
    names = [SIZE_NAMES[axis] for axis in GRID_AXES if axis in changed]
    reasons = [f"{name} {old.get(name)} -> {new[name]}" for name in names]
    return StreamChoice(
        streams,
        tuple(tensors),
        f"random number streams: {', '.join(begun)} restart from the seed and iteration {iteration} "
        f"({', '.join(reasons) or 'the checkpoint contains none of this device'})"
        + (f"; {', '.join(streams)} continue" if streams else ""),
    )


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Result of a load, in addition to the tensors that it filled in place.

    ``is_fresh_start`` states that only the weights were loaded, from a release or with ``--finetune``. ``scheduler`` is
    None if the optimizer state was not loaded. ``rng`` holds the random number streams to resume with
    `RngStreams.resume`, or is None if all streams keep their seeds. ``config`` is the configuration that the checkpoint
    was saved with. ``model_record`` is its record of the Hugging Face folder that the model was imported from.
    """

    folder: Path
    progress: TrainProgress
    config: Mapping[str, Any]
    is_fresh_start: bool
    optimizer_loaded: bool
    scheduler: Mapping[str, Any] | None
    rng: Mapping[str, torch.Tensor] | None
    model_record: Mapping[str, Any] | None = None


ScheduleCheck = Callable[[Mapping[str, Any], Mapping[str, Any]], None]
"""Callback that takes a scheduler's state and the configuration that it was saved with, and may raise an error."""


def load_checkpoint(
    directory: str | Path,
    tensors: CheckpointState,
    state: ParallelState,
    options: CheckpointConfig,
    config: Mapping[str, Any],
    log: Log,
    check_schedule: ScheduleCheck = lambda state, recorded: None,
    told: Progress = ignore_progress,
    *,
    is_brief: bool = False,
) -> LoadedCheckpoint | None:
    """Fill a run's tensors in place from the newest complete checkpoint, to which the tracker file points.

    The directory may also be a checkpoint itself. If a checkpoint is damaged, the next older one is loaded, unless
    ``options.ckpt_step`` names the damaged one. Returns None, after a warning, if there is no checkpoint and the run
    may start from random weights. ``config`` is the run's own configuration; differences are logged. ``check_schedule``
    is called with the scheduler's state and the checkpoint's configuration before any tensor is read, and may reject
    them. ``told`` is called with the reading progress. ``is_brief`` shortens the warning.

    Raises:
        CheckpointError: there is no checkpoint and random weights are not accepted; the checkpoint holds another model;
            or all checkpoints are damaged. Raised on every rank.
    """
    directory = as_path(directory)
    folders = agree_on_candidates(directory, options.ckpt_step, state, log)
    if not folders:
        refuse_random_weights(directory, options, state)
        warn_of_random_weights(directory, log, is_brief=is_brief)
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
    told: Progress = ignore_progress,
) -> Path:
    """Fill the models' weights in place, and return the folder that they were loaded from.

    With ``allow_cast`` weights stored in another dtype are converted. ``told`` is called with the reading progress.

    Raises:
        CheckpointError: there is no checkpoint, it holds another model, or all are damaged.
    """

    def load(folder: Path) -> Path:
        stored = open_stored(folder, state, verify, needs_streams=False)
        if (line := stored.index.lost_streams_line(folder)) is not None:
            log(line)
        stored.load(model_tensors(models, stored.index.tensors), (MODEL_PREFIX,), allow_cast=allow_cast, progress=told)
        return folder

    return first_undamaged(agree_on_required_candidates(as_path(directory), ckpt_step, state, log), load, log)


def read_common(directory: str | Path, ckpt_step: int | None = None, log: Log = print) -> dict[str, Any]:
    """Return the plain values of a checkpoint: progress, config, layout, optimizer, scheduler, tokenizer.

    ``folder`` (a Path) is added, and ``tokenizer`` is the Path of the tokenizer's files or None. Only this process
    reads, without communication.

    Raises:
        CheckpointError: there is no checkpoint, or all are damaged.
    """
    alone = describe_parallel_state(0, 1)

    def load(folder: Path) -> dict[str, Any]:
        common = dict(open_stored(folder, alone, needs_streams=False).index.common)
        tokenizer = common["tokenizer"]
        return common | {"folder": folder, "tokenizer": None if tokenizer is None else local_copy(folder / tokenizer)}

    return first_undamaged(agree_on_required_candidates(as_path(directory), ckpt_step, alone, log), load, log)


def _load_folder(
    folder: Path,
    tensors: CheckpointState,
    state: ParallelState,
    options: CheckpointConfig,
    config: Mapping[str, Any],
    log: Log,
    filled: set[str],
    check_schedule: ScheduleCheck,
    told: Progress,
) -> LoadedCheckpoint:
    """Load one folder. ``filled`` collects the tensors that a damaged checkpoint may have filled before it failed."""
    verify, strictness = options.verify_checkpoint, STRICTNESS[options.dist_ckpt_strictness]
    is_fresh_start = options.finetune or is_release(folder)
    needs_streams = not is_fresh_start and not options.no_load_rng
    stored = open_stored(folder, state, verify, config.get("model"), needs_streams)
    log(f" checkpoint version {stored.version}")
    if (line := stored.index.lost_streams_line(folder)) is not None:
        log(line)
    common = stored.index.common
    changes = _compare_configuration(folder, stored.config, config, strictness)
    refuse_other_adapters(folder, stored.config, config)
    optimizer = None if is_fresh_start or options.no_load_optim else tensors.optimizer
    if optimizer is not None and common["optimizer"] is None:
        raise CheckpointError(
            f"checkpoint {folder} contains no optimizer state; add --no-load-optim to start with a new one, or "
            "--finetune"
        )
    if optimizer is not None and common["scheduler"] is not None:
        check_schedule(common["scheduler"], stored.config)
    progress = TrainProgress() if is_fresh_start else _progress_of(folder, common)
    described, namespaces = model_tensors(tensors.models, stored.index.tensors), [MODEL_PREFIX]
    described = without_new_adapters(described, folder, stored.index.tensors, config, is_fresh_start)
    if optimizer is not None:
        averages = average_choice(optimizer_tensors(optimizer), stored.index)
        described += averages.tensors
        namespaces += averages.namespaces
    change = plan_precision(described, namespaces, stored.index, state)
    described = list(change.tensors)
    if optimizer is not None and strictness.allows_missing:
        _check_main_params(folder, described, stored.index, state)
    choice = None
    if needs_streams:
        choice = choose_streams(stored.index, tensors.rng, state, progress.iteration)
        described += choice.tensors
    scaling = choose_float8(stored.index, None if is_fresh_start else tensors.float8, state)
    described += scaling.tensors
    if strictness.allows_missing:
        _check_untouched(folder, described, stored.index, filled, state)
        filled.update(stored.index.tensors)
    loaded = stored.load(described, change.namespaces, strictness, change.is_needed, told)
    # Weights that were quantized while they were loaded are only held as codes and scales.
    quantized = {tensor.name for tensor in described if tensor.quantized is not None}
    held = [tensor for tensor in described if tensor.quantized is None]
    if quantized:
        held += [each for each in model_tensors(tensors.models) if each.name.rpartition(".")[0] in quantized]
    _check_finite(folder, held, state)
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
            # The loss scale depends on the precision.
            scalars["grad_scaler"] = optimizer.scalar_state()["grad_scaler"]
        optimizer.load_scalar_state(scalars)
        if averages.line is not None:
            log(averages.line)
            optimizer.restart_average()
    return LoadedCheckpoint(
        folder=folder,
        progress=progress,
        config=stored.config,
        is_fresh_start=is_fresh_start,
        optimizer_loaded=optimizer is not None,
        scheduler=None if optimizer is None else common["scheduler"],
        rng=None if choice is None else choice.streams,
        model_record=common.get(MODEL_RECORD),
    )


def _progress_of(folder: Path, common: Mapping[str, Any]) -> TrainProgress:
    try:
        return TrainProgress(**common["progress"])
    except TypeError as error:
        raise DamagedCheckpointError(f"{folder}: its record of the run's progress is invalid ({error})") from error


def _describe_choice(directory: Path, folder: Path) -> str:
    """Return Megatron-LM's log line before loading."""
    iteration = iteration_of_folder(folder)
    if iteration is None:
        return f" loading release checkpoint from {directory}"
    return f" loading checkpoint from {directory} at iteration {iteration}"


def _compare_configuration(
    folder: Path, old: Mapping[str, Any], new: Mapping[str, Any], strictness: Strictness
) -> tuple[ConfigChange, ...]:
    """Return the differences that are not a reason to reject the checkpoint.

    Raises:
        CheckpointError: the checkpoint holds another model.
    """
    changes = compare_configs(old, new)
    refused = (*changes.shape, *changes.weights) if strictness == STRICT else changes.shape
    if refused:
        fields = "; ".join(f"{change}{_remedy(change)}" for change in refused)
        raise CheckpointError(f"checkpoint {folder} is from a different model (checkpoint -> this run): {fields}")
    return (*changes.weights, *changes.other)


def _remedy(change: ConfigChange) -> str:
    """Return the remedy for a model with more vocabulary rows than its tokenizer has tokens, as is common."""
    if change.field != "model.vocab_size" or change.old <= change.new:
        return ""
    return f" (if only the tokenizer is smaller than the model, add --extra-vocab-size {change.old - change.new})"


def _check_main_params(
    folder: Path, tensors: Sequence[ShardedTensor], index: CheckpointIndex, state: ParallelState
) -> None:
    """Reject a load that leaves a loaded weight's main parameter at its initial value, which would undo the load.

    Raises:
        CheckpointError: the checkpoint has weights without their main parameters. Raised on every rank.
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
            f"checkpoint {folder} contains weights without their main parameters ({', '.join(sorted(set(lost))[:4])}"
            f"{'' if len(set(lost)) <= 4 else ' ...'}); add --no-load-optim"
        )
    raise_on_all_ranks(error, state.world)


def _check_untouched(
    folder: Path, tensors: Sequence[ShardedTensor], index: CheckpointIndex, filled: Set[str], state: ParallelState
) -> None:
    """Reject a checkpoint that lacks a tensor which a damaged one, tried before it, may have filled.

    Such a tensor no longer has its initial value.

    Raises:
        CheckpointError: the damaged checkpoint has a tensor that this one lacks. Raised on every rank.
    """
    lost = sorted({tensor.name for tensor in tensors if tensor.name not in index.tensors and tensor.name in filled})
    error = None
    if lost:
        error = CheckpointError(
            f"checkpoint {folder} lacks {', '.join(lost[:4])}{'' if len(lost) <= 4 else ' ...'}, and loading the "
            "damaged checkpoint after it may have overwritten part of them; select the older one with --ckpt-step to "
            "start from initial values"
        )
    raise_on_all_ranks(error, state.world)


def _check_finite(folder: Path, tensors: Sequence[ShardedTensor], state: ParallelState) -> None:
    """Reject non-finite values as damage, so that an older checkpoint is tried.

    Raises:
        DamagedCheckpointError: a tensor has non-finite values. Raised on every rank.
    """
    bad = {id(data) for data in not_finite([tensor.data for tensor in tensors])}
    names = sorted({tensor.name for tensor in tensors if id(tensor.data) in bad})
    error = None
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        error = DamagedCheckpointError(
            f"checkpoint {folder} contains values that are not finite, in {', '.join(names[:4])}{more}; no training "
            "can resume from them: select an older checkpoint with --ckpt-step"
        )
    raise_on_all_ranks(error, state.world)


def _report_misfits(loaded: LoadedTensors, strictness: Strictness, log: Log) -> None:
    if loaded.left_alone:
        log(
            f"WARNING: the checkpoint lacks {len(loaded.left_alone)} tensors of this run, which keep their initial "
            "values:"
        )
        for name in loaded.left_alone:
            log(f"    {name}")
    if loaded.passed_over and strictness.lists_unexpected:
        log(
            f"WARNING: the checkpoint has {len(loaded.passed_over)} tensors that this run does not have; they are not "
            "loaded:"
        )
        for name in loaded.passed_over:
            log(f"    {name}")
