"""What one model-parallel rank's files hold: Megatron's keys, and which values of the model go into each tensor."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.interop.megatron_torch.experts.expert_keys import grouped_key
from megatron.interop.megatron_torch.key_names import fused_key
from megatron.interop.megatron_torch.pickle_writer import PlannedTensor, given_tensor
from megatron.interop.megatron_torch.stage_parameters import LocalParameter
from megatron.interop.megatron_torch.stored_optimizer import alone_in_bucket, in_optimizer_order, plan_flat_buffer

CHECKPOINT_VERSION = 3.0
FLOAT8_SCALING = "float8_scaling"
"""Key of what fp8's delayed scaling remembers, in a ``common`` and in the files."""
_LINEAR = (
    *("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer", "eh_proj"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
)

_OF_ONE_EXPERT = re.compile(r"\.local_experts\.\d+")

DtypeOf = Callable[[str], torch.dtype]
"""Gives the dtype of a tensor by its native name."""


@dataclass(frozen=True, eq=False)
class Slot:
    """Place a parameter, or a tensor of its optimizer state, in a planned tensor at element ``start``.

    ``name`` is the native name of the global tensor that the values come from.
    """

    tensor: PlannedTensor
    start: int
    name: str
    parameter: LocalParameter


@dataclass(frozen=True, eq=False)
class PlannedValue:
    """Hold the value of one file, with planned tensors in it, and what goes into them."""

    value: Any
    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerTerms:
    """Hold what the optimizer's files say beside tensors.

    ``param_groups`` go by the multiplier of the weight decay. ``is_half`` says that the model is of a half precision
    and has float32 main parameters. ``grad_scaler`` is None where there is none.
    """

    config: OptimizerConfig
    learning_rate: float
    weight_decay: float
    num_steps: int
    is_half: bool
    grad_scaler: Mapping[str, Any] | None

    @property
    def state_names(self) -> tuple[str, ...]:
        """Return the kinds of tensors that the update rule keeps of a parameter."""
        if self.config.optimizer == "adam":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.config.sgd_momentum else ()


@dataclass(frozen=True)
class Experts:
    """Say of the optimizer that experts have for themselves whether they have biases."""

    has_bias: bool


def model_state(
    parameters: Sequence[LocalParameter], dtype_of: DtypeOf, fused_norms: bool, groups_experts: bool = False
) -> PlannedValue:
    """Return the state of one model chunk. Linear layers have an empty ``_extra_state``."""
    keys = {parameter.key for parameter in parameters}
    state: OrderedDict[str, PlannedTensor | None] = OrderedDict()
    slots = []
    for number, parameter in enumerate(parameters):
        module, _, _ = parameter.key.rpartition(".")
        name = f"model.{parameter.name}"
        tensor = PlannedTensor(dtype_of(name), parameter.stored_shape)
        layer = parameter.key.partition(".pre_mlp_layernorm.")[0]
        has_fused = fused_norms and f"{layer}.mlp.router.weight" not in keys
        key = fused_key(parameter.key) if has_fused else parameter.key
        state[grouped_key(key) if groups_experts else key] = tensor
        slots.append(Slot(tensor, 0, name, parameter))
        following = parameters[number + 1].key if number + 1 < len(parameters) else ""
        if module.rpartition(".")[2] in _LINEAR and not following.startswith(f"{module}."):
            state[_OF_ONE_EXPERT.sub("", module) + "._extra_state" if groups_experts else f"{module}._extra_state"] = (
                None
            )
    if any(p.key == "decoder.final_layernorm.weight" for p in parameters):
        # The module is there even where its weight is the embedding's.
        state.setdefault("output_layer._extra_state", None)
    return PlannedValue(state, tuple(slots))


def optimizer_state(
    chunks: Sequence[Sequence[LocalParameter]], terms: OptimizerTerms, dtype_of: DtypeOf, experts: Experts | None = None
) -> PlannedValue:
    """Return the optimizer's state of a rank, parameter by parameter; ``experts`` says that it is theirs alone."""
    ordered = in_optimizer_order(chunks)
    groups = param_groups(terms, experts)
    state: dict[int, dict[str, PlannedTensor]] = {}
    slots: list[Slot] = []

    def planned(kind: str, parameter: LocalParameter) -> PlannedTensor:
        name = f"optimizer.{kind}.{parameter.name}"
        tensor = PlannedTensor(dtype_of(name), parameter.stored_shape)
        slots.append(Slot(tensor, 0, name, parameter))
        return tensor

    for number, parameter in enumerate(parameter for group in ordered for parameter in group):
        entry: dict[str, PlannedTensor] = {}
        if terms.config.optimizer == "adam":
            entry["step"] = given_tensor(torch.tensor(float(terms.num_steps)))
        entry |= {kind: planned(kind, parameter) for kind in terms.state_names}
        if entry:
            state[number] = entry
    first = 0
    for group, parameters in zip(groups, ordered):
        group["params"] = list(range(first, first + len(parameters)))
        first += len(parameters)
    inner: dict[str, Any] = {"state": state, "param_groups": groups}
    if not terms.is_half:
        return PlannedValue(inner, tuple(slots))
    value: dict[str, Any] = {"optimizer": inner, **loss_scale_entry(terms)}
    mains = [[planned("main_param", parameter) for parameter in group] for group in ordered]
    value["fp32_from_fp16_params"] = mains[: len(groups)]
    return PlannedValue(value, tuple(slots))


def distributed_optimizer_state(terms: OptimizerTerms, experts: Experts | None = None) -> dict[str, Any]:
    """Return what the distributed optimizer leaves in the model's file: its tensors are in one of their own."""
    groups = param_groups(terms, experts)
    for group in groups:
        group["step"] = float(terms.num_steps)
    return {"optimizer": {"param_groups": groups}, **loss_scale_entry(terms)}


def flat_optimizer_state(
    chunks: Sequence[Sequence[LocalParameter]],
    bucket_sizes: Sequence[int | None],
    terms: OptimizerTerms,
    buffer_dtypes: tuple[torch.dtype, torch.dtype],
) -> PlannedValue:
    """Return the distributed optimizer's own file: flat buffers of main parameters and moments, one set a chunk.

    ``buffer_dtypes`` are those of the parameters and of their gradients: Megatron looks the buffers up by them.
    """
    value: dict[Any, Any] = {"buckets_coalesced": True}
    slots = []
    for number, (parameters, bucket_size) in enumerate(zip(chunks, bucket_sizes, strict=True)):
        if not parameters:
            continue  # no experts
        sizes = [parameter.num_elements for parameter in parameters]
        layout = plan_flat_buffer(sizes, bucket_size, alone_in_bucket(parameters))
        buffers: dict[str, Any] = {}
        for name in ("param", "exp_avg", "exp_avg_sq"):
            tensor = buffers[name] = PlannedTensor(torch.float32, (layout.num_elements,))
            prefix = f"optimizer.{name}." if name != "param" else "optimizer.main_param." if terms.is_half else "model."
            for parameter, start in zip(parameters, layout.starts):
                slots.append(Slot(tensor, start, prefix + parameter.name, parameter))
        buffers["numel_unpadded"] = layout.num_elements
        value[number] = {buffer_dtypes: buffers}
    return PlannedValue(value, tuple(slots))


def rank_value(
    arguments: object,
    iteration: int,
    models: Sequence[Any],
    optimizer: Any,
    scheduler: Mapping[str, Any] | None,
    rng_state: Any,
    floating_point_operations: float,
) -> dict[str, Any]:
    """Return everything that a rank's ``model_optim_rng.pt`` holds; None leaves an entry out."""
    value: dict[str, Any] = {"args": arguments, "checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration}
    value |= {"model": models[0]} if len(models) == 1 else {f"model{n}": model for n, model in enumerate(models)}
    rest = {"optimizer": optimizer, "opt_param_scheduler": scheduler, "rng_state": rng_state}
    value |= {name: item for name, item in rest.items() if item is not None}
    value["num_floating_point_operations_so_far"] = floating_point_operations
    return value


def float8_entry(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry, which Megatron passes over, of what fp8's delayed scaling remembers; empty where it is not on.

    Megatron keeps that of each rank, in transformer-engine's own form.
    """
    tensors = common.get(FLOAT8_SCALING) or {}
    return {FLOAT8_SCALING: {name: given_tensor(values) for name, values in tensors.items()}} if tensors else {}


def param_groups(terms: OptimizerTerms, experts: Experts | None = None) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with weight decay and without, but for their parameters.

    Experts without biases have the first alone.
    """
    multipliers = (1.0,) if experts is not None and not experts.has_bias else (1.0, 0.0)
    return [_param_group(terms, multiplier) | {"is_expert_parallel": experts is not None} for multiplier in multipliers]


def _param_group(terms: OptimizerTerms, multiplier: float) -> dict[str, Any]:
    config = terms.config
    weight_decay = {"weight_decay": terms.weight_decay * multiplier}
    common = {
        "is_expert_parallel": False,
        "default_config": True,
        "wd_mult": multiplier,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": config.lr,
        "min_lr": config.min_lr,
        "lr": terms.learning_rate,
    }
    if config.optimizer == "sgd":
        momentum = {"momentum": config.sgd_momentum, "dampening": 0.0, **weight_decay, "nesterov": False}
        return {**common, **momentum, "maximize": False, "foreach": None, "differentiable": False, "fused": None}
    rule: dict[str, Any] = {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps, **weight_decay}
    switches = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    return {**common, **rule, **switches, "fused": None, "decoupled_weight_decay": True}


def loss_scale_entry(terms: OptimizerTerms) -> dict[str, Any]:
    """Return the entry of the loss scale; Megatron keeps the scale as a tensor."""
    if terms.grad_scaler is None:
        return {}
    state = dict(terms.grad_scaler)
    if "scale" in state:
        state["scale"] = given_tensor(torch.tensor([state["scale"]], dtype=torch.float32))
    return {"grad_scaler": state}
