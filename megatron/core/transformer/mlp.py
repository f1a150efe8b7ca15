"""The feed-forward layer (MLP), plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.layer_output import LayerOutput
from megatron.core.ops import runs_on_triton
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.process_group import Group
from megatron.core.registry import find_registered
from megatron.core.tensor_parallel import ColumnShardedLinear, RowShardedLinear
from megatron.core.transformer.decoder_config import DecoderConfig

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "squared_relu": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """Feed-forward layer ``h -> ffn -> h`` with the configured activation.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        stride = 2 if config.is_gated else 1
        self.kind = config.activation
        self.is_gated = config.is_gated
        self.activation = activation_of(config)
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
        return LayerOutput(self.linear_fc2(self._activated(x)))

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.linear_fc1.bias
        if bias is None or not bias.requires_grad or not self.has_program(x, bias):
            return self.activation(self.linear_fc1(x))
        from megatron.core.ops.triton import activate_with_bias

        return activate_with_bias(self.linear_fc1(x, gives_bias_gradient=False), bias, self.activation, self.kind)

    def has_program(self, *tensors: torch.Tensor) -> bool:
        """Return whether a Triton kernel differentiates the non-gated activation on these tensors' device.

        An activation that the kernel does not support, or that has been replaced, is differentiated by torch.
        """
        if self.is_gated or self.activation is not ACTIVATIONS.get(self.kind) or not runs_on_triton(*tensors):
            return False
        from megatron.core.ops.triton import PLAIN_KINDS as KINDS

        return self.kind in KINDS


def activation_of(config: DecoderConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function between the two GEMMs. Shapes: ``[..., ffn] -> [..., ffn]``; gated from ``[..., 2 ffn]``."""
    if config.activation_func is not None:
        own: Callable[[torch.Tensor], torch.Tensor] = find_registered("activation", config.activation_func).value
        return partial(_gated_by, own) if config.is_gated else own
    if not config.is_gated:
        return ACTIVATIONS[config.activation]
    offset, limit = config.glu_linear_offset, config.activation_func_clamp_value
    return partial(gated_activation, kind=config.activation, offset=offset, limit=limit)


def _gated_by(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
