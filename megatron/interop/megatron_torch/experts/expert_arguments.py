"""Both ways between the ``args`` of Megatron's files and the configuration of experts, which has other forms there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config_base import FieldSpec, field_specs
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.layer_pattern import parse_layer_pattern
from megatron.core.transformer.transformer_config import MoEConfig

_PATTERN = "moe_layer_freq"
_NO_FIELD = ("moe_apply_probs_on_input", "moe_input_jitter_eps", "moe_router_topk_limited_devices")
"""Arguments that change what layers of experts compute and that no field of them stands for."""


def has_experts(arguments: Mapping[str, Any]) -> bool:
    """Tell whether ``args`` are of a model with experts."""
    return bool(arguments.get("num_experts"))


def experts_of_file(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of experts of a layer that one file has, or None where ``args`` do not tell."""
    experts, size = arguments.get("num_experts"), arguments.get("expert_model_parallel_size") or 1
    if type(experts) is not int or type(size) is not int or size < 1 or experts % size:
        return None
    return experts // size


def config_of_experts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the model's configuration that say which layers have experts, and how tokens are routed.

    Raises:
        CheckpointError: a value is of another type than its field, or one that is not supported.
    """
    if not has_experts(arguments):
        return {}
    refused = [f"{name} {arguments[name]}" for name in _NO_FIELD if arguments.get(name)]
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
    """Return the values of ``args`` that say the same; nothing but that there are none, where there are none."""
    sizes = {
        "expert_model_parallel_size": model.expert_model_parallel_size,
        "expert_tensor_parallel_size": model.parallel_sizes.expert_tp,
        "num_experts": model.num_experts,
    }
    if model.num_experts is None:
        return sizes
    config_class: type = MoEConfig
    values = {spec.name: getattr(model, spec.name) for spec in field_specs(config_class)}
    for name, value in values.items():
        if isinstance(value, tuple):
            values[name] = value[0] if len(value) == 1 else list(value)
    text = model.moe_layer_freq.strip()
    is_number = text.isdecimal()
    values[_PATTERN] = int(text) if is_number else list(map(int, parse_layer_pattern(text, model.num_layers)))
    return values | sizes


def check_expert_places(model: GPTConfig) -> None:
    """Refuse a layout of which ``mp_rank_XX`` folders cannot hold everything.

    Megatron saves those of the ranks that hold the first copy of the experts, under their numbers in both grids.

    Raises:
        ConfigurationError: some tensor ranks would not be among them, or two of them have the same numbers.
    """
    tp, ep, etp = model.tensor_model_parallel_size, model.expert_model_parallel_size, model.parallel_sizes.expert_tp
    if model.num_experts is not None and (tp % etp or ep * etp < tp):
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {etp} with --tensor-model-parallel-size {tp} and "
            f"--expert-model-parallel-size {ep}: folders of --ckpt-format torch have no place for such experts; use "
            f"--ckpt-format torch_dist, or an expert-tensor-parallel size of {tp}"
        )


def _read(spec: FieldSpec, value: Any) -> Any:
    """Return a value of ``args`` in its field's form."""
    if spec.name == _PATTERN:
        return str(value)
    items = value if spec.is_sequence and isinstance(value, (list, tuple)) else (value,)
    allowed: tuple[type, ...] = (int, float) if spec.item_type is float else (spec.item_type,)
    if not items or not all(isinstance(item, allowed) for item in items):
        raise CheckpointError(f"args.{spec.name} is {value!r}; a value of type {spec.item_type.__name__} is expected")
    choices = spec.options.choices
    if choices is not None and any(item not in choices for item in items):
        raise CheckpointError(f"args.{spec.name} is {value!r}; supported are {', '.join(choices)}")
    items = [float(item) for item in items] if spec.item_type is float else list(items)
    return items if spec.is_sequence else items[0]
