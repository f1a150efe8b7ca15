"""Convert between the ``args`` of Megatron-LM's checkpoints and the configuration of a run.

``args`` is a namespace of several hundred values. Fields that declare ``in_args`` are read from it. Writing adds the
values that are computed from them (`derived_arguments`). The fields of experts, MLA, MTP, YaRN and hybrid models have a
different form in ``args``.

For scaled RoPE Megatron-LM stores only the factor and fixes the other three fields to Llama 3.1's values. They are
written here so that the checkpoint is read back as the model that was saved.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.formats.megatron.torch_file_reader import Record
from megatron.config import config_parts
from megatron.core.config_base import IDENTITY, FieldSpec, field_specs, field_value
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt import HYBRID_FIELDS, STRETCH_FIELDS, GPTConfig, hybrid_flags_without_argument
from megatron.core.transformer import (
    GATED_DELTA_NET,
    HybridConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    RotaryConfig,
    layer_parts,
    parse_layer_pattern,
    pattern_symbols,
    without_rotary,
)

_PATTERN = "moe_layer_freq"
_EXPERT_ARGS_WITHOUT_FIELD = ("moe_apply_probs_on_input", "moe_input_jitter_eps", "moe_router_topk_limited_devices")
"""Arguments that change the computation of MoE layers and have no field here."""


def has_experts(arguments: Mapping[str, Any]) -> bool:
    """Return whether ``args`` describe a mixture-of-experts model."""
    return bool(arguments.get("num_experts"))


def experts_of_file(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of experts per layer in one file, or None if ``args`` do not determine it."""
    experts, size = arguments.get("num_experts"), arguments.get("expert_model_parallel_size") or 1
    if type(experts) is not int or type(size) is not int or size < 1 or experts % size:
        return None
    return experts // size


def config_of_experts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MoE and router fields of the model configuration.

    Raises:
        CheckpointError: a value has a different type than its field, or is not supported.
    """
    if not has_experts(arguments):
        return {}
    refused = [f"{name} {arguments[name]}" for name in _EXPERT_ARGS_WITHOUT_FIELD if arguments.get(name)]
    if refused:
        raise CheckpointError(f"args describe experts that are not supported: {', '.join(refused)}")
    config_class: type = MoEConfig
    values = {
        spec.name: _read(spec, arguments[spec.name])
        for spec in field_specs(config_class)
        if arguments.get(spec.name) is not None
    }
    if arguments.get("moe_router_group_topk") is None:
        values.pop("moe_router_num_groups", None)
    etp = arguments.get("expert_tensor_parallel_size")
    if etp not in (None, arguments.get("tensor_model_parallel_size") or 1):
        values["expert_tensor_parallel_size"] = etp
    return values | {"expert_model_parallel_size": arguments.get("expert_model_parallel_size") or 1}


def arguments_of_experts(model: GPTConfig) -> dict[str, Any]:
    """Convert the model's MoE fields to ``args``; for a dense model only ``num_experts`` and the parallel sizes."""
    sizes = {
        "expert_model_parallel_size": model.expert_model_parallel_size,
        "expert_tensor_parallel_size": model.parallel_sizes.expert_tp,
        "num_experts": model.moe.num_experts,
    }
    if model.moe.num_experts is None:
        return sizes
    config_class: type = MoEConfig
    values = {spec.name: field_value(model, spec.name) for spec in field_specs(config_class)}
    for name, value in values.items():
        if isinstance(value, tuple):
            values[name] = value[0] if len(value) == 1 else list(value)
    text = model.moe.moe_layer_freq.strip()
    is_number = text.isdecimal()
    values[_PATTERN] = int(text) if is_number else list(map(int, parse_layer_pattern(text, model.num_layers)))
    return values | sizes


def check_expert_places(model: GPTConfig) -> None:
    """Reject a layout whose experts the ``mp_rank_XX`` folders cannot hold.

    Megatron-LM saves one folder for each rank that holds the first copy of the experts, named after its tensor-parallel
    and expert-parallel ranks.

    Raises:
        ConfigurationError: some tensor-parallel ranks have no folder, or two ranks have the same folder.
    """
    tp, ep, etp = model.tensor_model_parallel_size, model.expert_model_parallel_size, model.parallel_sizes.expert_tp
    if model.moe.num_experts is not None and (tp % etp or ep * etp < tp):
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {etp} with --tensor-model-parallel-size {tp} and "
            f"--expert-model-parallel-size {ep}: --ckpt-format torch cannot store such experts; use "
            f"--ckpt-format torch_dist, or an expert-tensor-parallel size of {tp}"
        )


def _read(spec: FieldSpec, value: Any) -> Any:
    """Convert a value of ``args`` to the type of its field."""
    if spec.name == _PATTERN:
        return str(value)
    items = value if spec.is_sequence and isinstance(value, (list, tuple)) else (value,)
    allowed: tuple[type, ...] = (int, float) if spec.item_type is float else (spec.item_type,)
    if not items or not all(isinstance(item, allowed) for item in items):
        raise CheckpointError(f"args.{spec.name} is {value!r}; a value of type {spec.item_type.__name__} is expected")
    choices = spec.options.choices
    if choices is not None and any(item not in choices for item in items):
        raise CheckpointError(f"args.{spec.name} is {value!r}; supported values are {', '.join(choices)}")
    items = [float(item) for item in items] if spec.item_type is float else list(items)
    return items if spec.is_sequence else items[0]


_KINDS: Mapping[str, tuple[type, ...]] = {
    "multi_latent_attention": (MLAConfig, RotaryConfig),
    "mtp_num_layers": (MTPConfig,),
}
"""Arguments that switch on MLA and MTP, and the configuration classes that describe them."""


def config_of_latent(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the MLA and MTP fields of the model configuration.

    Raises:
        CheckpointError: a value has a different type than its field.
    """
    values: dict[str, Any] = {}
    for switch, kinds in _KINDS.items():
        for spec in (spec for kind in kinds for spec in field_specs(kind)) if arguments.get(switch) else ():
            value = arguments.get(spec.name)
            if value is not None:
                values[spec.name] = value_of_argument(spec, spec.name, value)
    return values


def value_of_argument(spec: FieldSpec, name: str, value: Any) -> Any:
    """Convert a value that ``args`` stores under ``name`` to the type of its field.

    Raises:
        CheckpointError: the value has a different type than the field.
    """
    allowed: tuple[type, ...] = (int, float) if spec.item_type is float else (spec.item_type,)
    if type(value) not in allowed:
        raise CheckpointError(f"args.{name} is {value!r}; a value of type {spec.item_type.__name__} is expected")
    return spec.item_type(value)


def arguments_of_latent(model: GPTConfig) -> dict[str, Any]:
    """Convert the model's MLA and MTP fields to ``args``.

    If the model uses neither, the result is ``multi_latent_attention=False`` and ``mtp_num_layers=None``.
    """
    values: dict[str, Any] = {"multi_latent_attention": False, "mtp_num_layers": None}
    for switch, kinds in _KINDS.items():
        if field_value(model, switch):
            values |= {spec.name: field_value(model, spec.name) for kind in kinds for spec in field_specs(kind)}
    return values


_MAMBA_MODEL: Mapping[str, Any] = {
    "is_hybrid_model": True,
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
    "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
}
"""Arguments of Megatron-LM's MambaModel with --hybrid-override-pattern."""
_RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
_HYBRID_PATTERN, _VARIANT, _FREQUENCY = (
    *("hybrid_override_pattern", "experimental_attention_variant"),
    "linear_attention_freq",
)


def config_of_hybrid(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a hybrid model: gated delta-net, or the layers of Megatron-LM's MambaModel.

    Raises:
        CheckpointError: a value has a different type than its field, or is not supported.
    """
    values: dict[str, Any] = {}
    spec = arguments.get("spec")
    names_mamba = isinstance(spec, (list, tuple)) and any("mamba" in str(word) for word in spec)
    if arguments.get(_VARIANT) == GATED_DELTA_NET:
        values = {_VARIANT: arguments[_VARIANT], _FREQUENCY: str(arguments.get(_FREQUENCY))}
    elif arguments.get(_HYBRID_PATTERN) is not None or arguments.get("is_hybrid_model") or names_mamba:
        pattern = arguments.get(_HYBRID_PATTERN)
        if pattern is None:
            if ratios := [f"{name} {arguments[name]}" for name in _RATIOS if arguments.get(name)]:
                raise CheckpointError(f"args have {', '.join(ratios)}, which needs a {_HYBRID_PATTERN}; it is None")
            pattern = "M" * arguments["num_layers"]
        values = {_HYBRID_PATTERN: str(pattern)}
    if not values:
        return {}
    config_class: type = HybridConfig
    for field in field_specs(config_class):
        is_own = field.name in HYBRID_FIELDS and field.name not in (_HYBRID_PATTERN, _VARIANT, _FREQUENCY)
        if is_own and arguments.get(field.name) is not None:
            values[field.name] = value_of_argument(field, field.name, arguments[field.name])
    is_mamba = _HYBRID_PATTERN in values
    try:
        layer_parts(HybridConfig(**values), arguments["num_layers"], (False,) * arguments["num_layers"])
    except ValueError as error:
        name = _HYBRID_PATTERN if is_mamba else _FREQUENCY
        raise CheckpointError(f"args.{name} is {arguments.get(name)!r}: {error}") from error
    prefix = "mamba_" if is_mamba else "linear_"
    return {name: value for name, value in values.items() if name.startswith((prefix, _HYBRID_PATTERN, _VARIANT))}


def arguments_of_hybrid(model: GPTConfig) -> dict[str, Any]:
    """Convert the fields of a hybrid model to ``args``; empty if every layer has attention."""
    hybrid = model.hybrid
    if not hybrid.is_hybrid:
        return {}
    values = {name: getattr(hybrid, name) for name in HYBRID_FIELDS}
    if hybrid.hybrid_override_pattern is not None:
        return {**values, _HYBRID_PATTERN: pattern_symbols(model.layer_parts), **_MAMBA_MODEL}
    text = (hybrid.linear_attention_freq or "").strip()
    frequency = int(text) if text.isdecimal() else list(map(int, parse_layer_pattern(text, model.num_layers)))
    return values | {_FREQUENCY: frequency}


def check_hybrid(model: GPTConfig, path: Path) -> None:
    """Reject a hybrid model that Megatron-LM computes differently from the same ``args``.

    Raises:
        CheckpointError: the model is not supported; the message lists every reason.
    """
    if flags := hybrid_flags_without_argument(model):
        raise CheckpointError(f"{path}: its args describe a hybrid model that is not supported: {', '.join(flags)}")


YARN = "yarn"
_KIND = "position_embedding_type"
_NEEDED = ("rotary_scaling_factor", "original_max_position_embeddings")


def _name_in_args(field: str) -> str:
    return field if field.startswith(YARN) else f"{YARN}_{field}"


def config_of_yarn(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the YaRN fields of the model configuration; empty if ``args`` do not use YaRN, or use it with MLA.

    Raises:
        CheckpointError: a value is missing, or has a different type than its field.
    """
    if arguments.get(_KIND) != YARN or arguments.get("multi_latent_attention"):
        return {}
    values: dict[str, Any] = {_KIND: "rope", "rope_type": YARN}
    config_class: type = RotaryConfig
    for spec in field_specs(config_class):
        if spec.name not in STRETCH_FIELDS:
            continue
        name = _name_in_args(spec.name)
        value = arguments.get(name)
        if value is not None or spec.name in _NEEDED:
            values[spec.name] = value_of_argument(spec, name, value)
    if not {"mscale", "mscale_all_dim"} <= values.keys():
        # Megatron-LM ignores both unless both are set.
        values = {name: value for name, value in values.items() if name not in ("mscale", "mscale_all_dim")}
    return values


def arguments_of_yarn(model: GPTConfig) -> dict[str, Any]:
    """Convert the model's YaRN fields to ``args``; empty without YaRN, or with MLA."""
    if model.mla.multi_latent_attention or model.rope.rope_type != YARN:
        return {}
    return {_KIND: YARN} | {_name_in_args(name): field_value(model, name) for name in STRETCH_FIELDS}


PROGRESS: Mapping[str, str] = {
    "consumed_train_samples": "consumed_train_samples",
    "consumed_valid_samples": "consumed_valid_samples",
    "skipped_iterations": "skipped_iterations",
}
"""Progress counters of a run and their names in ``args``; Megatron-LM has no name for the last."""

TRAIN_DATA = "train_data"
"""Position in each data set, as JSON text in ``args``; Megatron-LM ignores this name."""

TRUE_VOCAB_SIZE = "true_vocab_size"
"""Vocabulary size without padding rows, in ``args``; Megatron-LM's trainer ignores this name."""

_ATTENTION_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}

_ARGS_WITHOUT_FIELD: Mapping[str, tuple[Any, ...]] = {
    "qk_l2_norm": (),
    "experimental_attention_variant": (GATED_DELTA_NET,),
    "hybrid_layer_pattern": (),
    "use_mup": (),
    "enable_gpt_oss": (),
}
"""Arguments without a field that change the model's computation, with the values that are supported here."""


def stored_fields() -> Iterator[tuple[str, FieldSpec, tuple[str, ...]]]:
    """Yield every field that ``args`` also have, with its configuration section and its names in ``args``."""
    for section, config_class in config_parts().items():
        for spec in field_specs(config_class):
            names = spec.options.in_args
            if isinstance(names, tuple) and names:
                yield section, spec, names


def config_of_arguments(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert the ``args`` of a file to sections of the configuration.

    Fields that ``args`` do not determine are left out.

    Raises:
        CheckpointError: a value of a model field has a different type than the field.
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
    model |= config_of_hybrid(arguments)
    # In Megatron-LM the flag is also set if all linear layers have biases.
    if "add_qkv_bias" in model:
        model["add_qkv_bias"] = model["add_qkv_bias"] and not model.get("add_bias_linear", True)
    if model.get("group_query_attention") is False:
        # In Megatron-LM num_query_groups defaults to 1 and is used only with group_query_attention.
        model.pop("num_query_groups", None)
    lengths = {"lr_decay_iters": ("training", "train_iters"), "lr_decay_samples": ("training", "train_samples")}
    for name, (section, total) in lengths.items():
        # Megatron-LM stores the length of the run if the flag was not set.
        if config["scheduler"].get(name) == config[section].get(total):
            config["scheduler"].pop(name, None)
    backend = arguments.get("attention_backend")
    if isinstance(backend, Record) and backend.arguments and backend.arguments[0] in _ATTENTION_BACKENDS:
        model["attention_backend"] = _ATTENTION_BACKENDS[backend.arguments[0]]
    return config


def check_arguments(arguments: Mapping[str, Any], path: Path) -> None:
    """Reject ``args`` of a model that is not supported.

    Raises:
        CheckpointError: the model is not supported; the message lists every such argument and its value.
    """
    allowed = dict(_ARGS_WITHOUT_FIELD)
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
    """Convert a configuration, as nested dictionaries, to ``args``."""
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
    # In Megatron-LM a single number must divide the number of layers; a list has no such restriction.
    arguments["no_rope_freq"] = without and list(map(int, without_rotary(without, model["num_layers"])))
    arguments["add_qkv_bias"] = bool(model.get("add_qkv_bias") or model.get("add_bias_linear", True))
    for name, total in (("lr_decay_iters", "train_iters"), ("lr_decay_samples", "train_samples")):
        # Written explicitly if they default to the length of the run; in ``args`` None, not 0, means unset.
        arguments[total] = arguments.get(total) or None
        arguments[name] = arguments.get(name) or arguments[total]
    return arguments


def _window_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of sliding window attention: a pair of numbers, and a frequency or a list of layers.

    Raises:
        CheckpointError: the window is not causal.
    """
    size, pattern = arguments.get("window_size"), arguments.get("window_attn_skip_freq")
    if size is None:
        return {}
    if not isinstance(size, (list, tuple)) or len(size) != 2 or type(size[0]) is not int or size[0] < 0 or size[1] != 0:
        raise CheckpointError(f"args.window_size is {size!r}; (N, 0) is expected: only causal windows are supported")
    if pattern is not None:
        try:
            parse_layer_pattern(str(pattern), arguments["num_layers"])
        except ValueError as error:
            raise CheckpointError(f"args.window_attn_skip_freq is {pattern!r}: {error}") from error
    return {"window_size": f"{size[0]},0", "window_attn_skip_freq": None if pattern is None else str(pattern)}


def _rotary_layers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the argument of layers without RoPE: a frequency, or a list with a 1 for each such layer.

    Raises:
        CheckpointError: the value is neither.
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
    """Return the ``args`` that are computed from the model and the layout."""
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
        **arguments_of_hybrid(model),
        "skipped_train_samples": 0,
        "transformer_impl": model.transformer_impl,
        "data_parallel_random_init": False,
        "no_save_optim": None,
        "no_save_rng": None,
    }


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are plain data: numbers, strings, dtypes and lists of them."""
    return {name: value for name, value in arguments.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _converted(value: Any, spec: FieldSpec) -> Any:
    """Convert a value to the type of a field, or return None if the types do not match."""
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
