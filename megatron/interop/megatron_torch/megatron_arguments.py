"""The one table between the ``args`` of Megatron's files and the configuration of a run, and both ways through it.

``args`` is a namespace of several hundred values. Read are those listed here; written are these and what follows from
them (`derived_arguments`). Nearly all have one name on both sides.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.megatron_torch.stored_values import Record

_OptionalInt = int | None
_OptionalFloat = float | None
_OptionalStr = str | None
_Texts = tuple[str, ...]

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "model": {
        "tensor_model_parallel_size": int,
        "pipeline_model_parallel_size": int,
        "context_parallel_size": int,
        "sequence_parallel": bool,
        "num_layers_per_virtual_pipeline_stage": _OptionalInt,
        "num_virtual_stages_per_pipeline_rank": _OptionalInt,
        "decoder_first_pipeline_num_layers": _OptionalInt,
        "decoder_last_pipeline_num_layers": _OptionalInt,
        "account_for_embedding_in_pipeline_split": bool,
        "account_for_loss_in_pipeline_split": bool,
        "pipeline_model_parallel_layout": _OptionalStr,
        "fp16": bool,
        "bf16": bool,
        "num_layers": int,
        "hidden_size": int,
        "num_attention_heads": int,
        "ffn_hidden_size": int,
        "kv_channels": int,
        "group_query_attention": bool,
        "num_query_groups": int,
        "normalization": str,
        "norm_epsilon": float,
        "apply_layernorm_1p": bool,
        "qk_layernorm": bool,
        "swiglu": bool,
        "squared_relu": bool,
        "openai_gelu": bool,
        "bias_gelu_fusion": bool,
        "add_bias_linear": bool,
        "add_qkv_bias": bool,
        "hidden_dropout": float,
        "attention_dropout": float,
        "init_method_std": float,
        "recompute_granularity": _OptionalStr,
        "recompute_method": _OptionalStr,
        "recompute_num_layers": _OptionalInt,
        "make_vocab_size_divisible_by": int,
        "max_position_embeddings": int,
        "position_embedding_type": str,
        "use_rotary_position_embeddings": bool,
        "add_position_embedding": bool,
        "rotary_base": int,
        "rotary_percent": float,
        "rotary_interleaved": bool,
        "rotary_seq_len_interpolation_factor": _OptionalFloat,
        "use_rope_scaling": bool,
        "rope_scaling_factor": float,
        "rope_scaling_low_freq_factor": float,
        "rope_scaling_high_freq_factor": float,
        "rope_scaling_original_max_position_embeddings": int,
        "untie_embeddings_and_output_weights": bool,
    },
    "training": {
        "micro_batch_size": int,
        "global_batch_size": int,
        "rampup_batch_size": tuple[int, ...],
        "train_iters": int,
        "train_samples": int,
        "calculate_per_token_loss": bool,
    },
    "optimizer": {
        "optimizer": str,
        "lr": float,
        "min_lr": float,
        "weight_decay": float,
        "clip_grad": float,
        "adam_beta1": float,
        "adam_beta2": float,
        "adam_eps": float,
        "sgd_momentum": float,
        "loss_scale": _OptionalFloat,
        "initial_loss_scale": float,
        "min_loss_scale": float,
        "loss_scale_window": int,
        "hysteresis": int,
    },
    "scheduler": {
        "lr_decay_style": str,
        "lr_decay_iters": _OptionalInt,
        "lr_decay_samples": _OptionalInt,
        "lr_wsd_decay_style": str,
        "lr_wsd_decay_iters": _OptionalInt,
        "lr_wsd_decay_samples": _OptionalInt,
        "lr_warmup_fraction": _OptionalFloat,
        "lr_warmup_iters": int,
        "lr_warmup_samples": int,
        "lr_warmup_init": float,
        "start_weight_decay": _OptionalFloat,
        "end_weight_decay": _OptionalFloat,
        "weight_decay_incr_style": str,
    },
    "ddp": {
        "use_distributed_optimizer": bool,
        "overlap_grad_reduce": bool,
        "overlap_param_gather": bool,
        "ddp_bucket_size": _OptionalInt,
        "ddp_average_in_collective": bool,
        "grad_reduce_in_bf16": bool,
    },
    "data": {
        "seq_length": int,
        "data_path": _Texts,
        "split": _OptionalStr,
        "dataloader_type": str,
        "reset_position_ids": bool,
        "reset_attention_mask": bool,
        "eod_mask_loss": bool,
    },
    "tokenizer": {
        "tokenizer_type": str,
        "vocab_file": _OptionalStr,
        "merge_file": _OptionalStr,
        "tokenizer_model": _OptionalStr,
        "vocab_size": _OptionalInt,
        "vocab_extra_ids": int,
        "tiktoken_pattern": _OptionalStr,
        "tiktoken_num_special_tokens": int,
    },
    "validation": {"eval_interval": int, "eval_iters": int},
    "initialization": {"seed": int},
}
"""Every field that both sides have, by the section of our configuration, with its type.

Of the scaled rotary embedding Megatron has the factor alone, and Llama 3.1's values for the other three fields: they
are written so that what is read here is the model that was saved.
"""

OTHER_NAMES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("model", "norm_epsilon"): ("layernorm_epsilon", "norm_epsilon"),
    ("model", "apply_layernorm_1p"): ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
}
"""Fields whose name in ``args`` is another: the first that is there is read, all are written."""

PROGRESS: Mapping[str, str] = {
    "consumed_train_samples": "consumed_train_samples",
    "consumed_valid_samples": "consumed_valid_samples",
    "skipped_iterations": "skipped_iterations",
}
"""Counts of a run's progress and the names that they have in ``args``; Megatron has no name for the last."""

TRAIN_DATA = "train_data"
"""What was read of each data set, as JSON text: a name in ``args`` that Megatron does not know, and passes over."""

_ATTENTION_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}


def config_of_arguments(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of the configuration that ``args`` of a file describe.

    Fields that they do not tell are left out.

    Raises:
        CheckpointError: a value that decides what the model computes is of another type than the field.
    """
    config: dict[str, dict[str, Any]] = {}
    for section, fields in FIELDS.items():
        values = config.setdefault(section, {})
        for name, kind in fields.items():
            for argument in OTHER_NAMES.get((section, name), (name,)):
                value = _converted(arguments.get(argument), kind)
                if value is not None:
                    values[name] = value
                    break
                if section == "model" and isinstance(arguments.get(argument), (bool, int, float, str)):
                    raise CheckpointError(f"args.{argument} is {arguments[argument]!r}; a value of {kind} is expected")
    model = config["model"]
    # There the flag also says that all linear layers have biases.
    if "add_qkv_bias" in model:
        model["add_qkv_bias"] = model["add_qkv_bias"] and not model.get("add_bias_linear", True)
    if model.get("group_query_attention") is False:
        # There the number is 1 by default and counts with the flag alone.
        model.pop("num_query_groups", None)
    lengths = {"lr_decay_iters": ("training", "train_iters"), "lr_decay_samples": ("training", "train_samples")}
    for name, (section, total) in lengths.items():
        # There the whole run is written out where the flag was not given.
        if config["scheduler"].get(name) == config[section].get(total):
            config["scheduler"].pop(name, None)
    backend = arguments.get("attention_backend")
    if isinstance(backend, Record) and backend.arguments and backend.arguments[0] in _ATTENTION_BACKENDS:
        model["attention_backend"] = _ATTENTION_BACKENDS[backend.arguments[0]]
    return config


def arguments_of_config(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of ``args`` that a configuration (as nested dictionaries) gives."""
    arguments: dict[str, Any] = {}
    for section, fields in FIELDS.items():
        values = config.get(section, {})
        for name, kind in fields.items():
            if name not in values:
                continue
            value = values[name]
            if typing.get_origin(kind) is tuple:
                value = list(value) or None
            for argument in OTHER_NAMES.get((section, name), (name,)):
                arguments[argument] = value
    model = config["model"]
    arguments["add_qkv_bias"] = bool(model.get("add_qkv_bias") or model.get("add_bias_linear", True))
    for name, total in (("lr_decay_iters", "train_iters"), ("lr_decay_samples", "train_samples")):
        # Written out where they follow from the length of the run; there None, not 0, means no length.
        arguments[total] = arguments.get(total) or None
        arguments[name] = arguments.get(name) or arguments[total]
    return arguments


def derived_arguments(
    model: GPTConfig, seq_length: int, num_chunks: int, data_parallel_size: int, padded_vocab_size: int
) -> dict[str, Any]:
    """Return the values of ``args`` that follow from the model and the layout."""
    pp = model.pipeline_model_parallel_size
    return {
        "padded_vocab_size": padded_vocab_size,
        "params_dtype": getattr(torch, model.params_dtype),
        "world_size": data_parallel_size * model.parallel_sizes.world_size,
        "data_parallel_size": data_parallel_size,
        "virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None,
        "transformer_pipeline_model_parallel_size": pp,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": seq_length,
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": model.tensor_model_parallel_size,
        "num_experts": None,
        "skipped_train_samples": 0,
        "transformer_impl": "local",
        "data_parallel_random_init": False,
        "no_save_optim": None,
        "no_save_rng": None,
    }


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are plain data: numbers, texts, dtypes, and lists of them."""
    return {name: value for name, value in arguments.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _converted(value: Any, kind: Any) -> Any:
    """Return a value as a field of this type holds it, or None where it is not one."""
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is tuple:
        items = (
            [_converted(item, typing.get_args(kind)[0]) for item in value] if isinstance(value, (list, tuple)) else []
        )
        return items if items and None not in items else None
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is float and isinstance(value, (int, float)):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, kind) else None
