"""Both ways between the ``args`` of Megatron's files and the configuration of a run.

``args`` is a namespace of several hundred values. Read are those that a field says it has there (``in_args``); written
are these and what follows from them (`derived_arguments`). Of the scaled rotary embedding Megatron has the factor
alone, and Llama 3.1's values for the other three fields: they are written so that what is read here is the model that
was saved.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.config.run_config import config_parts
from megatron.core.config_base import IDENTITY, FieldSpec, field_specs
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.layer_pattern import parse_layer_pattern
from megatron.core.transformer.transformer_config import without_rotary
from megatron.interop.megatron_torch.experts.expert_arguments import arguments_of_experts, config_of_experts
from megatron.interop.megatron_torch.experts.latent_arguments import arguments_of_latent, config_of_latent
from megatron.interop.megatron_torch.experts.yarn_arguments import YARN, arguments_of_yarn, config_of_yarn
from megatron.interop.megatron_torch.stored_values import Record

PROGRESS: Mapping[str, str] = {
    "consumed_train_samples": "consumed_train_samples",
    "consumed_valid_samples": "consumed_valid_samples",
    "skipped_iterations": "skipped_iterations",
}
"""Counts of a run's progress and the names that they have in ``args``; Megatron has no name for the last."""

TRAIN_DATA = "train_data"
"""What was read of each data set, as JSON text: a name in ``args`` that Megatron does not know, and passes over."""

TRUE_VOCAB_SIZE = "true_vocab_size"
"""The rows of the vocabulary that are no padding: a name in ``args`` that Megatron's trainer passes over."""

_ATTENTION_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}

_NO_FIELD: Mapping[str, tuple[Any, ...]] = {
    "qk_l2_norm": (),
    "attention_output_gate": (),
    "experimental_attention_variant": (),
    "use_mup": (),
    "enable_gpt_oss": (),
}
"""Arguments without a field that change what a model computes, and their values that leave it as it is here."""


def stored_fields() -> Iterator[tuple[str, FieldSpec, tuple[str, ...]]]:
    """Yield every field that both sides have, with its section of our configuration and its names in ``args``."""
    for section, config_class in config_parts().items():
        for spec in field_specs(config_class):
            names = spec.options.in_args
            if isinstance(names, tuple) and names:
                yield section, spec, names


def config_of_arguments(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of the configuration that ``args`` of a file describe.

    Fields that they do not tell are left out.

    Raises:
        CheckpointError: a value that decides what the model computes is of another type than the field.
    """
    config: dict[str, dict[str, Any]] = {}
    for section, spec, names in stored_fields():
        values = config.setdefault(section, {})
        for name in names:
            value = _converted(arguments.get(name), spec)
            if value is not None:
                values[spec.name] = value
                break
            if section == "model" and isinstance(arguments.get(name), (bool, int, float, str)):
                expected = spec.item_type.__name__
                raise CheckpointError(f"args.{name} is {arguments[name]!r}; a value of type {expected} is expected")
    model = config["model"]
    model |= _window_fields(arguments) | _rotary_layers(arguments)
    model |= config_of_experts(arguments) | config_of_latent(arguments) | config_of_yarn(arguments)
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


def check_arguments(arguments: Mapping[str, Any], path: Path) -> None:
    """Refuse the ``args`` of a model that cannot be expressed.

    Raises:
        CheckpointError: so they are; the message names every such argument and its value.
    """
    allowed = dict(_NO_FIELD)
    for section, spec, names in stored_fields():
        if section == "model" and spec.options.role in IDENTITY and spec.options.choices is not None:
            allowed |= dict.fromkeys(names, spec.options.choices)
    if not arguments.get("multi_latent_attention"):
        allowed["position_embedding_type"] = (*allowed["position_embedding_type"], YARN)
    wrong = [
        f"{name} {arguments[name]}"
        for name, values in allowed.items()
        if arguments.get(name) not in (None, False, *values)
    ]
    if wrong:
        raise CheckpointError(f"{path}: its args describe a model that is not supported: {', '.join(wrong)}")


def arguments_of_config(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of ``args`` that a configuration (as nested dictionaries) gives."""
    arguments: dict[str, Any] = {}
    for section, spec, names in stored_fields():
        values = config.get(section, {})
        if spec.name in values:
            value = values[spec.name]
            arguments |= dict.fromkeys(names, list(value) or None if spec.is_sequence else value)
    model = config["model"]
    size, pattern = model.get("window_size"), model.get("window_attn_skip_freq")
    arguments["window_size"] = None if size is None else ast.literal_eval(size)
    if pattern is not None:
        kinds = parse_layer_pattern(pattern, model["num_layers"])
        pattern = int(pattern) if pattern.isdecimal() else list(map(int, kinds))
    arguments["window_attn_skip_freq"] = pattern
    without = model.get("no_rope_freq")
    # A number of theirs divides the layers.
    arguments["no_rope_freq"] = without and list(map(int, without_rotary(without, model["num_layers"])))
    arguments["add_qkv_bias"] = bool(model.get("add_qkv_bias") or model.get("add_bias_linear", True))
    for name, total in (("lr_decay_iters", "train_iters"), ("lr_decay_samples", "train_samples")):
        # Written out where they follow from the length of the run; there None, not 0, means no length.
        arguments[total] = arguments.get(total) or None
        arguments[name] = arguments.get(name) or arguments[total]
    return arguments


def _window_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of attention windows: there a pair of numbers, and a number or a list of layers.

    Raises:
        CheckpointError: a window is not one of causal attention.
    """
    size, pattern = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if size is None:
        return {}
    if not isinstance(size, (list, tuple)) or len(size) != 2 or type(size[0]) is not int or size[0] < 0 or size[1] != 0:
        raise CheckpointError(f"args.window_size is {size!r}; (N, 0) is expected, a window of causal attention")
    if pattern is not None:
        try:
            parse_layer_pattern(str(pattern), arguments["num_layers"])
        except ValueError as error:
            raise CheckpointError(f"args.window_attn_skip_freq is {pattern!r}: {error}") from error
    return {"window_size": f"{size[0]},0", "window_attn_skip_freq": None if pattern is None else str(pattern)}


def _rotary_layers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of layers without rotary positions: there a number, or a list with a 1 for each such layer.

    Raises:
        CheckpointError: it is neither.
    """
    without = arguments.get("no_rope_freq")
    if without is None:
        return {}
    try:
        without_rotary(str(without), arguments["num_layers"])
    except ValueError as error:
        raise CheckpointError(f"args.no_rope_freq is {without!r}: {error}") from error
    return {"no_rope_freq": str(without)}


def derived_arguments(
    model: GPTConfig, seq_length: int, num_chunks: int, data_parallel_size: int, padded_vocab_size: int
) -> dict[str, Any]:
    """Return the values of ``args`` that follow from the model and the layout."""
    pp = model.pipeline_model_parallel_size
    return {
        "padded_vocab_size": padded_vocab_size,
        TRUE_VOCAB_SIZE: model.vocab_size,
        "params_dtype": getattr(torch, model.params_dtype),
        "world_size": data_parallel_size * model.parallel_sizes.world_size,
        "data_parallel_size": data_parallel_size,
        "virtual_pipeline_model_parallel_size": num_chunks if num_chunks > 1 else None,
        "transformer_pipeline_model_parallel_size": pp,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": seq_length,
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
        **arguments_of_experts(model),
        **arguments_of_latent(model),
        **arguments_of_yarn(model),
        "skipped_train_samples": 0,
        "transformer_impl": model.transformer_impl,
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


def _converted(value: Any, spec: FieldSpec) -> Any:
    """Return a value as a field holds it, or None where it is not one."""
    if not spec.is_sequence:
        return _item(value, spec.item_type)
    items = [_item(item, spec.item_type) for item in value] if isinstance(value, (list, tuple)) else []
    return items if items and None not in items else None


def _item(value: Any, kind: type) -> Any:
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is float and isinstance(value, (int, float)):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, kind) else None
