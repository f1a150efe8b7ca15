"""The feed-forward layer (MLP), plain or gated, and megatron-core's layer of the same function (`MLP`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks

from megatron.core.distributed import GatherHook
from megatron.core.layer_output import LayerOutput
from megatron.core.model_parallel_config import reject_unsupported
from megatron.core.ops import FusedActivation, casts_on_triton, gated_kind_of, runs_on_triton
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.registry import find_registered
from megatron.core.tensor_parallel import ColumnShardedLinear, QuantizedActivation, RowShardedLinear
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.xielu import XIELU

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


class FeedForward(nn.Module):
    """Feed-forward layer ``h -> ffn -> h`` with the configured activation.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        stride = 2 if config.is_gated else 1
        self.kind = config.activation
        self.is_gated = config.is_gated
        self.activation = make_activation(config, tp, device)
        self.output_multiplier = config.mlp_output_multiplier
        self.fuses_activation = config.gemm_activation_fusion
        self.linear_fc1 = ColumnShardedLinear(
            config.hidden_size,
            config.ffn_hidden_size * stride,
            tp,
            config=config,
            init_std=config.init_method_std,
            bias=config.add_bias_linear,
            device=device,
            stride=stride,
            tp_comm_buffer_name="fc1",
        )
        self.linear_fc2 = RowShardedLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            tp,
            config=config,
            init_std=config.output_init_method_std,
            bias=config.add_bias_linear,
            device=device,
            tp_comm_buffer_name="fc2",
        )

    def forward(self, x: torch.Tensor) -> LayerOutput:
        # An activation that has been replaced has no kernel.
        is_fused = self.fuses_activation and self.activation is ACTIVATIONS.get(self.kind)
        if is_fused:
            output = self._fused(x)
        elif (quantized := self._quantized_activation(x)) is not None:
            output = self.linear_fc2(self.linear_fc1(x), activation=quantized)
        else:
            output = self.linear_fc2(self._activated(x))
        return LayerOutput(output if self.output_multiplier == 1.0 else output * self.output_multiplier)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.linear_fc1.bias
        if bias is None or not bias.requires_grad or not self.has_program(x, bias):
            return self.activation(self.linear_fc1(x))
        from megatron.core.ops.triton import activate_with_bias

        return activate_with_bias(self.linear_fc1(x, gives_bias_gradient=False), bias, self.activation, self.kind)

    def _quantized_activation(self, x: torch.Tensor) -> QuantizedActivation | None:
        """Return the activation if it is quantized as it is computed: a gated one between trained FP8 layers on CUDA.

        The first layer's output has no usable gradient then, so that neither layer may have hooks. The gradient of a
        bias would need it, too.
        """
        first, second = self.linear_fc1, self.linear_fc2
        quantizers = first.quantizers, second.quantizers
        if first.bias is not None or not all(each is not None and each.knows_scales for each in quantizers):
            return None
        if not all(linear.weight.requires_grad and not _has_hooks(linear) for linear in (first, second)):
            return None
        kind = gated_kind_of(self.activation)
        if kind is None or _has_global_hooks() or not casts_on_triton(x):
            return None
        from megatron.core.ops.triton import GATED_KINDS

        assert first.quantizers is not None
        return QuantizedActivation(kind, first.quantizers) if kind in GATED_KINDS else None

    def _fused(self, x: torch.Tensor) -> Any:
        """Return the output with the activation and its derivative in the epilogues of the GEMMs."""
        bias = self.linear_fc1.bias
        fused = FusedActivation(self.activation, self.kind, bias is not None and bias.requires_grad)
        inner, activated = self.linear_fc1(x, activation=fused)
        return self.linear_fc2(activated, inner=inner, activation=fused)

    def has_program(self, *tensors: torch.Tensor) -> bool:
        """Return whether a Triton kernel differentiates the non-gated activation on these tensors' device.

        An activation that the kernel does not support, or that has been replaced, is differentiated by torch.
        """
        if self.is_gated or self.activation is not ACTIVATIONS.get(self.kind) or not runs_on_triton(*tensors):
            return False
        from megatron.core.ops.triton import PLAIN_KINDS as KINDS

        return self.kind in KINDS


def _has_hooks(module: nn.Module) -> bool:
    """Return whether hooks may read a module's input or output, or the gradient of one of them."""
    reads_input = any(not isinstance(hook, GatherHook) for hook in module._forward_pre_hooks.values())
    return reads_input or any((module._forward_hooks, module._backward_hooks, module._backward_pre_hooks))


def _has_global_hooks() -> bool:
    """Return whether hooks of all modules are registered, or whether anomaly detection looks for NaN in gradients."""
    return torch.is_anomaly_enabled() or any(
        (
            hooks._global_forward_pre_hooks,
            hooks._global_forward_hooks,
            hooks._global_backward_hooks,
            hooks._global_backward_pre_hooks,
        )
    )


def make_activation(
    config: DecoderConfig, tp: Group, device: torch.device | str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function between the two linear layers: a module if it has parameters. Shapes: as `activation_of`."""
    if config.xielu:
        return XIELU(tp, dtype_from_name(config.params_dtype), device)
    return activation_of(config)


def activation_of(config: DecoderConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function between the two GEMMs. Shapes: ``[..., ffn] -> [..., ffn]``; gated from ``[..., 2 ffn]``."""
    activation = _unscaled_activation_of(config)
    multiplier = config.mlp_gate_multiplier
    return activation if multiplier == 1.0 else partial(with_scaled_gate, activation, multiplier)


def with_scaled_gate(
    activation: Callable[[torch.Tensor], torch.Tensor], multiplier: float, x: torch.Tensor
) -> torch.Tensor:
    """Apply a gated activation after the gate is multiplied. Shapes: ``[..., 2 ffn] -> [..., ffn]``."""
    gate, up = x.chunk(2, dim=-1)
    return activation(torch.cat((gate * multiplier, up), dim=-1))


def _unscaled_activation_of(config: DecoderConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if config.activation in ACTIVATIONS:
        return ACTIVATIONS[config.activation]
    if config.activation_func is not None:
        own: Callable[[torch.Tensor], torch.Tensor] = find_registered("activation", config.activation_func).value
        return partial(_gated_by, own) if config.is_gated else own
    offset, limit = config.glu_linear_offset, config.activation_func_clamp_value
    return partial(gated_activation, kind=config.activation, offset=offset, limit=limit)


def _gated_by(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


@dataclass
class MLPSubmodules:
    """Classes or specifications of the linear layers of `MLP`."""

    linear_fc1: ModuleSpec | type | None = None
    linear_fc2: ModuleSpec | type | None = None
    activation_func: ModuleSpec | type | None = None


class MLP(nn.Module):
    """Feed-forward layer ``h -> ffn -> h`` with megatron-core's arguments and return values.

    ``is_expert`` uses the group of expert tensor parallelism, and needs ``ffn_hidden_size``. A gated layer's first
    linear layer has the gate in the first half of each rank's output.

    Shapes: ``[..., h] -> [..., h]``, and ``[h]`` of the bias that the caller adds.

    Raises:
        ValueError: an expert has no ``ffn_hidden_size``.
        ConfigurationError: ``config`` asks for quantized GEMMs.
        RuntimeError: ``submodules.activation_func`` is to be used.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Any = None,
    ) -> None:
        super().__init__()
        if ffn_hidden_size is None:
            if is_expert:
                raise ValueError("an expert's MLP needs ffn_hidden_size; pass config.moe_ffn_hidden_size")
            ffn_hidden_size = config.ffn_hidden_size
        assert ffn_hidden_size is not None
        assert submodules.linear_fc1 is not None
        assert submodules.linear_fc2 is not None
        if config.use_te_activation_func and submodules.activation_func is not None:
            raise RuntimeError(
                "use_te_activation_func=True uses submodules.activation_func, which is unsupported; set it to False, "
                "and config.activation_func to a function"
            )
        self.config = config
        self.input_size = config.hidden_size if input_size is None else input_size
        common = {"config": config, "skip_bias_add": True, "is_expert": is_expert, "tp_group": tp_group}
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            self.input_size,
            ffn_hidden_size * (2 if config.gated_linear_unit else 1),
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            stride=2 if config.gated_linear_unit else 1,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.activation_func = megatron_activation(config)
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            ffn_hidden_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and its bias; with ``per_token_scale`` the scaled output, with the bias added.

        Shapes: ``per_token_scale: [...]``, without the last dim.
        """
        inner, bias = self.linear_fc1(hidden_states)
        inner = self.activation_func(inner if bias is None else inner + bias)
        if per_token_scale is not None:
            inner = (inner * per_token_scale.unsqueeze(-1)).to(inner.dtype)
        output, bias = self.linear_fc2(inner)
        if per_token_scale is not None and bias is not None:
            output, bias = output + (bias * per_token_scale.unsqueeze(-1)).to(output.dtype), None
        return output, bias

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass."""


def megatron_activation(config: TransformerConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function between the two linear layers; the gate is in the first half of its input.

    Megatron's fused bias and GELU (``config.bias_activation_fusion``) has the tanh form.

    Shapes: ``[..., ffn] -> [..., ffn]``; gated from ``[..., 2 ffn]``.

    Raises:
        ConfigurationError: ``config`` asks for quantized GEMMs or a quantized input, or has options of a gate without
            a gate.
    """
    reject_unsupported(config, "fp8", "fp4", "quant_recipe", "use_kitchen", "activation_func_fp8_input_store")
    if not config.gated_linear_unit:
        reject_unsupported(config, "activation_func_clamp_value", "glu_linear_offset")
    function, limit = config.activation_func, config.activation_func_clamp_value
    if config.bias_activation_fusion and function is F.gelu:
        function = ACTIVATIONS["gelu_tanh"]
    if not config.gated_linear_unit:
        return function

    def gated(x: torch.Tensor) -> torch.Tensor:
        gate, linear = x.chunk(2, dim=-1)
        if limit is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        result: torch.Tensor = function(gate) * (linear + config.glu_linear_offset)
        return result

    return gated
