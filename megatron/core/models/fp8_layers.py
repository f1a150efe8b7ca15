"""Attach quantizers of FP8 or NVFP4 to the linear layers of transformer layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.device import compute_capability
from megatron.core.distributed import send_in_float8
from megatron.core.errors import ConfigurationError
from megatron.core.ops import (
    TRANSFORMER_ENGINE,
    Float8Recipe,
    Float8State,
    Fp8Quantizers,
    Nvfp4Quantizers,
    casts_to_float8,
    has_nvfp4_products,
    has_scaled_products,
    triton_works,
)
from megatron.core.sharding import spec_of
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
    """Enable FP8 or NVFP4 in the linear layers of the chunks' transformer layers, by the configuration.

    In MTP modules the linear layer that joins the inputs is quantized, too.

    ``num_averaged`` is the number of ranks over which gradients are averaged. Returns the state of delayed scaling,
    None for other recipes. Embedding and output layer are unchanged.

    Raises:
        ConfigurationError: the device is a GPU without NVFP4.
    """
    if not config.fp8.is_quantized:
        return None
    if config.fp8.fp4_format is not None:
        _check_nvfp4(torch.device(device))
    if torch.device(device).type == "cuda" and triton_works():
        # Probed here, because the probe synchronizes with the device, which no step should do.
        casts_to_float8("cuda")
    if config.fp8.fp4_format is not None:
        _compute_in_nvfp4(models, config)
        return None
    recipe = Float8Recipe.of(config.fp8)
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


def weight_quantizers(models: Sequence[nn.Module]) -> tuple[Fp8Quantizers, ...]:
    """Return the quantizers of all linear layers, also those of single experts."""
    found: list[Fp8Quantizers] = []
    for module in (module for model in models for module in model.modules()):
        own = getattr(module, "quantizers", None)
        found += () if own is None else own if isinstance(own, tuple) else (own,)
    return tuple(found)


_FIRST_WITH_NVFP4 = (10, 0)


def _check_nvfp4(device: torch.device) -> None:
    """Reject a GPU without NVFP4.

    Raises:
        ConfigurationError: the GPU is older than Blackwell.
    """
    capability = compute_capability(device) if device.type == "cuda" else None
    if capability is not None and capability < _FIRST_WITH_NVFP4:
        raise ConfigurationError(
            f"--fp4-format e2m1: a GPU of compute capability {capability[0]}.{capability[1]} has no NVFP4 GEMMs, which "
            "need 10.0 (Blackwell) or later; use --fp8-format hybrid on compute capability 8.9 or later, or omit it"
        )


def _compute_in_nvfp4(models: Sequence[nn.Module], config: DecoderConfig) -> None:
    recipe, places = Float8Recipe.of(config.fp8), config.float8_places
    modules = [module for model in models for module in model.modules()]
    joins = {module.transformer_layer: module.eh_proj for module in modules if isinstance(module, MTPLayer)}
    for layer in (module for module in modules if isinstance(module, TransformerLayer)):
        if not config.fp8.is_in_float8(layer.layer_number, config.num_layers):
            continue
        linear_layers = [(name, module) for name, module in layer.named_modules() if isinstance(module, _LINEAR)]
        found = []
        for place, (name, module) in enumerate(linear_layers):
            quantizers = Nvfp4Quantizers(recipe, (layer.layer_number, place), _output_features(module))
            quantizers.input_is_recomputed = layer.recomputes_norms and _reads_stream(name, module)
            module.quantizers = quantizers
            found.append(quantizers)
        if layer in joins:
            join = joins[layer]
            join.quantizers = Nvfp4Quantizers(recipe, (layer.layer_number, places.join), _output_features(join))
            found.append(join.quantizers)
        layer.keyed_quantizers = tuple(found)


def _output_features(module: nn.Module) -> torch.Tensor:
    """Return the indices of this rank's output features of a linear layer among those of all ranks.

    Shapes: ``-> [out]`` int64, on the device of the weight.
    """
    shared = isinstance(module, SharedGroupQueryKeyValue)
    names = ("query_weight", "key_value_weight") if shared else ("weight",)
    features = []
    for name in names:
        weight = module.get_parameter(name)
        own = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
        for shard in spec_of(weight).shards:
            start, (first, *_), (count, *_) = shard.local_offset[0], shard.global_box.offset, shard.global_box.shape
            own[start : start + count] = torch.arange(first, first + count, device=weight.device)
        features.append(own)
    return torch.cat(features)


def _reads_stream(name: str, module: nn.Module) -> bool:
    """Return whether a linear layer's input is the output of a norm of the residual stream."""
    return not isinstance(module, RowShardedLinear) and not name.endswith(("_up_proj", "_b_proj", "_latent_proj"))


def describe_float8(config: DecoderConfig, device: torch.device | str) -> str | None:
    """Return one line that names the quantized GEMMs and how they are computed, or None without them."""
    layers = config.fp8.float8_layers(config.num_layers)
    if not layers:
        return None
    recipe, device = Float8Recipe.of(config.fp8), torch.device(device)
    in_nvfp4 = config.fp8.fp4_format is not None
    kind = "NVFP4" if in_nvfp4 else "FP8"
    by = f"torch's {kind} GEMMs"
    if device.type != "cuda" or not (
        has_nvfp4_products(device.type)
        if in_nvfp4
        else has_scaled_products(recipe.blocks, recipe.weight_blocks, device.type)
    ):
        by = f"float32 GEMMs of the quantized operands: this device has no {kind} GEMMs for them"
    if config.transformer_impl == TRANSFORMER_ENGINE:
        by += " and not by transformer-engine, which runs attention and norms"
    further = ", and the layers of MTP modules" if config.mtp.mtp_depth else ""
    weights = "" if recipe.has_weight_gradients else ", except weight gradients"
    format_and_scaling = (
        f"fp4: {config.fp8.fp4_format}, nvfp4" if in_nvfp4 else f"fp8: {config.fp8.fp8_format}, {config.fp8.fp8_recipe}"
    )
    return (
        f"{format_and_scaling} scaling, layers {layers.start + 1} to {layers.stop} of "
        f"{config.num_layers}{further}{weights}; computed by {by}"
    )
