"""Attach FP8 quantizers to the linear layers of transformer layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.distributed import send_in_float8
from megatron.core.errors import ConfigurationError
from megatron.core.ops import (
    TRANSFORMER_ENGINE,
    Float8Recipe,
    Float8State,
    Fp8Quantizers,
    casts_to_float8,
    has_scaled_products,
    triton_works,
)
from megatron.core.tensor_parallel import ColumnShardedLinear, RowShardedLinear
from megatron.core.transformer import (
    DecoderConfig,
    MTPLayer,
    ReplicatedLinear,
    SharedGroupQueryKeyValue,
    TransformerLayer,
)
from megatron.core.transformer.moe import GroupedLinear

_LINEAR = (ColumnShardedLinear, ReplicatedLinear, RowShardedLinear, SharedGroupQueryKeyValue)


def compute_in_float8(
    models: Sequence[nn.Module], config: DecoderConfig, device: torch.device | str, num_averaged: int = 1
) -> Float8State | None:
    """Enable FP8 in the linear layers of the chunks' transformer layers, by the configuration.

    In MTP modules the linear layer that joins the inputs also computes in FP8.

    ``num_averaged`` is the number of ranks over which gradients are averaged. Returns the state of delayed scaling,
    None for other recipes. Embedding and output layer are unchanged.
    """
    if config.fp8.fp8_format is None:
        return None
    recipe = Float8Recipe.of(config.fp8)
    if torch.device(device).type == "cuda" and triton_works():
        # Probed here, because the probe synchronizes with the device, which no step should do.
        casts_to_float8("cuda")
    places = config.float8_places
    state = Float8State(config.fp8, places, device, num_averaged) if recipe.is_delayed else None
    modules = [module for model in models for module in model.modules()]
    for further in (module for module in modules if isinstance(module, MTPLayer)):
        number = further.transformer_layer.layer_number
        further.eh_proj.quantizers = Fp8Quantizers(recipe, state, (number, places.join))
        if config.fp8.fp8_param_gather:
            send_in_float8(further.eh_proj.weight)
    for layer in (module for module in modules if isinstance(module, TransformerLayer)):
        if not config.fp8.is_in_float8(layer.layer_number, config.num_layers):
            continue
        linear_layers = [(name, module) for name, module in layer.named_modules() if isinstance(module, _LINEAR)]
        if len(linear_layers) > places.num_linear:
            raise ConfigurationError(
                f"--fp8-recipe delayed supports {places.num_linear} linear layers per layer, but with --attention "
                f"{config.attention} there are {len(linear_layers)}; use --fp8-recipe tensorwise"
            )
        for place, (name, module) in enumerate(linear_layers):
            module.quantizers = Fp8Quantizers(recipe, state, (layer.layer_number, place))
            module.quantizers.input_is_recomputed = layer.recomputes_norms and _reads_stream(name, module)
            if config.fp8.fp8_param_gather:
                for parameter_name, parameter in module.named_parameters():
                    if parameter_name.endswith("weight"):
                        send_in_float8(parameter)
        for which, experts in enumerate(module for module in layer.modules() if isinstance(module, GroupedLinear)):
            experts.quantizers = tuple(
                Fp8Quantizers(recipe, state, (layer.layer_number, places.of_expert(expert, which)))
                for expert in experts.expert_numbers
            )
            if config.fp8.fp8_param_gather:
                send_in_float8(experts.weight, len(experts.expert_numbers))
    return state


def _reads_stream(name: str, module: nn.Module) -> bool:
    """Return whether a linear layer's input is the output of a norm of the residual stream."""
    return not isinstance(module, RowShardedLinear) and not name.endswith("_up_proj")


def describe_float8(config: DecoderConfig, device: torch.device | str) -> str | None:
    """Return one line that names the GEMMs in FP8 and how they are computed, or None without FP8."""
    layers = config.fp8.float8_layers(config.num_layers)
    if not layers:
        return None
    recipe, device = Float8Recipe.of(config.fp8), torch.device(device)
    by = "torch's FP8 GEMMs"
    if device.type != "cuda" or not has_scaled_products(recipe.blocks, recipe.weight_blocks, device.type):
        by = "float32 GEMMs of the quantized operands: this device has no FP8 GEMMs for them"
    if config.transformer_impl == TRANSFORMER_ENGINE:
        by += " and not by transformer-engine, which runs attention and norms"
    further = ", and the layers of MTP modules" if config.mtp.mtp_depth else ""
    weights = "" if recipe.has_weight_gradients else ", except weight gradients"
    return (
        f"fp8: {config.fp8.fp8_format}, {config.fp8.fp8_recipe} scaling, layers {layers.start + 1} to {layers.stop} of "
        f"{config.num_layers}{further}{weights}; computed by {by}"
    )
