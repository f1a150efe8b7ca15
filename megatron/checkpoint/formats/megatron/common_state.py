"""Convert the state that all ranks share to and from Megatron-LM's form.

The state consists of progress, configuration, learning-rate schedule and loss scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.megatron.arguments import PROGRESS, TRAIN_DATA, TRUE_VOCAB_SIZE, config_of_arguments
from megatron.checkpoint.formats.megatron.rank_files import RankFile, open_rank_files
from megatron.checkpoint.formats.megatron.stored_optimizer import OptimizerScalars, optimizer_scalars
from megatron.core.config_base import IDENTITY, config_to_dict, field_specs
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt import GPTConfig, padded_vocab_size
from megatron.core.optimizer import ScheduleConfig, styles_unknown_to_megatron
from megatron.core.tokenizers import RECORD_FILE, TOKENIZER_FOLDER, read_json_object

GPT2_VOCAB_SIZE = 50257
_HEAD_DIM_OF_OLD = 64

_SCHEDULE_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_lr": ("max_lr", "start_lr"),
    "min_lr": ("min_lr",),
    "lr_warmup_steps": ("lr_warmup_steps", "warmup_steps"),
    "lr_decay_steps": ("lr_decay_steps", "decay_steps"),
    "lr_decay_style": ("lr_decay_style", "decay_style"),
    "start_wd": ("start_wd",),
    "end_wd": ("end_wd",),
    "wd_incr_steps": ("wd_incr_steps",),
    "wd_incr_style": ("wd_incr_style",),
}
"""Fields of `ScheduleConfig` and their names in ``opt_param_scheduler``, newest first."""


def model_of_tensors(
    ranks: Mapping[tuple[int, int], RankFile], has_arguments: bool, wanted: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields of the model configuration that the layout and the shapes of the files determine.

    Checkpoints published in 2019 have no ``args``. Their fields come from the tensor shapes, and the rest from
    ``wanted``, the configuration of the run's model, if its hidden size matches. Otherwise a head dimension of 64 is
    assumed.
    """
    first = ranks[0, 0]
    tp, pp = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
    num_chunks = len(first.chunks)
    values: dict[str, Any] = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_layers": sum(ranks[0, p].num_layers(c) for p in range(pp) for c in range(num_chunks)),
    }
    if has_arguments:
        return values
    word = first.chunks[0]["embedding.word_embeddings.weight"]
    positions = first.chunks[0].get("embedding.position_embeddings.weight")
    hidden_size = word.shape[1]
    values["num_attention_heads"] = hidden_size // _HEAD_DIM_OF_OLD
    if wanted is not None and wanted.get("hidden_size") == hidden_size:
        identity = {spec.name for spec in field_specs(GPTConfig) if spec.options.role in IDENTITY}
        values = {name: wanted[name] for name in identity & wanted.keys()} | {
            "make_vocab_size_divisible_by": wanted["make_vocab_size_divisible_by"],
            **{name: value for name, value in values.items() if name != "num_attention_heads"},
        }
    values |= {
        "hidden_size": hidden_size,
        "ffn_hidden_size": first.chunks[0]["decoder.layers.0.mlp.linear_fc1.weight"].shape[0] * tp,
        "max_position_embeddings": 0 if positions is None else positions.shape[0],
        "params_dtype": str(word.dtype).removeprefix("torch."),
    }
    return values


def real_vocab_size(arguments: Mapping[str, Any], padded: int, folder: Path) -> int:
    """Return the vocabulary size without padding rows, or ``padded`` if it is unknown.

    The arguments contain it or name the tokenizer. Earlier releases of this project saved the tokenizer's record with
    the files.
    """
    kind, given, true_size = (arguments.get(name) for name in ("tokenizer_type", "vocab_size", TRUE_VOCAB_SIZE))
    if isinstance(true_size, int) and 0 < true_size <= padded:
        return true_size
    if kind == "NullTokenizer" and given is not None:
        return min(int(given) + 1, padded)
    divisor, tp = arguments.get("make_vocab_size_divisible_by", 128), arguments.get("tensor_model_parallel_size", 1)
    known = [GPT2_VOCAB_SIZE] if kind in ("GPT2BPETokenizer", None) else []
    record = folder / TOKENIZER_FOLDER / RECORD_FILE
    recorded = read_json_object(record).get("vocab_size") if record.is_file() else None
    if isinstance(recorded, int):
        known.insert(0, recorded)
    return next((size for size in known if padded_vocab_size(size, int(divisor), int(tp)) == padded), padded)


def common_state(
    ranks: Mapping[tuple[int, int], RankFile], config: Mapping[str, Any], model: GPTConfig, has_optimizer: bool
) -> dict[str, Any]:
    """Build the ``common`` section of a native index from a checkpoint's files."""
    first = ranks[0, 0]
    scalars = optimizer_scalars(first) if has_optimizer else None
    folder = first.file.path.parents[1]
    return shared_state(folder, first.arguments, first.file.value, scalars, config, model, len(ranks))


def shared_state(
    folder: Path,
    arguments: Mapping[str, Any],
    state: Mapping[str, Any],
    scalars: OptimizerScalars | None,
    config: Mapping[str, Any],
    model: GPTConfig,
    num_ranks: int,
) -> dict[str, Any]:
    """Build the ``common`` section of a native index from the values that all ranks share.

    ``scalars`` is None if the optimizer state was not saved. ``num_ranks`` is the world size if ``args`` have none.
    """
    scheduler = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    world_size = int(arguments.get("world_size") or num_ranks)
    progress = {ours: int(arguments.get(theirs) or 0) for ours, theirs in PROGRESS.items()}
    precision = {"params_dtype": model.params_dtype}
    sharding = {"use_distributed_optimizer": config["ddp"].get("use_distributed_optimizer", False)}
    tokenizer = folder / TOKENIZER_FOLDER
    return {
        "progress": {
            "iteration": int(state.get("iteration") or 0),
            **progress,
            **_train_data(arguments),
            "floating_point_operations_so_far": float(state.get("num_floating_point_operations_so_far") or 0),
        },
        "config": {
            "checkpoint": {},
            "logging": {},
            **config,
            "training": {"micro_batch_size": 1, **config["training"]},
            "model": config_to_dict(model),
            "optimizer": {**config["optimizer"], **precision, **sharding},
            "world_size": world_size,
        },
        "layout": {
            **model.parallel_sizes.record(),
            "data_parallel_size": int(arguments.get("data_parallel_size") or 1),
            "world_size": world_size,
        },
        "optimizer": None
        if scalars is None
        else {"num_steps": scalars.num_steps, "grad_scaler": dict(scalars.grad_scaler)},
        "scheduler": None if scalars is None or scheduler is None else schedule_state(scheduler, arguments),
        "tokenizer": TOKENIZER_FOLDER if tokenizer.is_dir() else None,
    }


def _train_data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position in each data set; empty if Megatron-LM itself wrote the checkpoint."""
    text = arguments.get(TRAIN_DATA)
    if not isinstance(text, str):
        return {}
    try:
        return {TRAIN_DATA: json.loads(text)}
    except ValueError as error:
        raise CheckpointError(f"args.{TRAIN_DATA} is damaged: {error}") from error


def schedule_state(stored: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``opt_param_scheduler`` to the state of our scheduler; both express lengths in samples.

    Raises:
        CheckpointError: a value is missing, or a style is not supported.
    """
    values: dict[str, Any] = {}
    for field, names in _SCHEDULE_NAMES.items():
        value = next((stored[name] for name in names if stored.get(name) is not None), None)
        if value is not None:
            values[field] = value
    position = stored.get("num_steps", stored.get("num_iters"))
    if position is None or "max_lr" not in values or "lr_decay_steps" not in values:
        raise CheckpointError(f"opt_param_scheduler has unsupported fields: {', '.join(map(str, stored))}")
    weight_decay = arguments.get("weight_decay")
    if weight_decay is not None:
        values.setdefault("start_wd", weight_decay)
        values.setdefault("end_wd", weight_decay)
    values |= {"decoupled_max_lr": arguments.get("decoupled_lr"), "decoupled_min_lr": arguments.get("decoupled_min_lr")}
    values["init_lr"] = float(arguments.get("lr_warmup_init") or 0.0)
    if values.get("lr_decay_style") == "WSD":
        batch = int(arguments.get("global_batch_size") or 1)
        iterations, samples = arguments.get("lr_wsd_decay_iters"), arguments.get("lr_wsd_decay_samples")
        values["wsd_decay_steps"] = samples if samples is not None else (iterations or 0) * batch
        values["lr_wsd_decay_style"] = arguments.get("lr_wsd_decay_style") or "exponential"
    if unknown := styles_unknown_to_megatron(values):
        raise CheckpointError(f"opt_param_scheduler: {', '.join(unknown)} is not a style of Megatron-LM")
    try:
        schedule = ScheduleConfig(**values)
    except ConfigurationError as error:
        raise CheckpointError(f"opt_param_scheduler: {error}") from error
    return {"num_samples": int(position), "schedule": config_to_dict(schedule)}


def stored_schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert our scheduler's state to ``opt_param_scheduler``.

    Raises:
        ConfigurationError: Megatron-LM does not support the schedule.
    """
    schedule = state["schedule"]
    if unknown := styles_unknown_to_megatron(schedule):
        raise ConfigurationError(f"Megatron's format cannot store {', '.join(unknown)}; use the native format")
    return {
        "max_lr": schedule["max_lr"],
        "lr_warmup_steps": schedule["lr_warmup_steps"],
        "num_steps": state["num_samples"],
        "lr_decay_style": schedule["lr_decay_style"],
        "lr_decay_steps": schedule["lr_decay_steps"],
        "min_lr": schedule["min_lr"],
        "start_wd": schedule["start_wd"],
        "end_wd": schedule["end_wd"],
        "wd_incr_style": schedule["wd_incr_style"],
        "wd_incr_steps": schedule["wd_incr_steps"],
    }


def recorded_torch_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the configuration sections from ``args``, or from tensor shapes if there are no ``args``.

    Raises:
        CheckpointError: a file is damaged, or is not a supported checkpoint.
    """
    ranks = open_rank_files(folder)
    try:
        arguments = ranks[0, 0].arguments
        config = config_of_arguments(arguments)
        config["model"] |= model_of_tensors(ranks, bool(arguments))
        return config
    finally:
        for rank in ranks.values():
            rank.close()
