"""The further summand below the softmax: one number for each head, learned or 0."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, even_pieces
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.transformer_config import TransformerConfig


class SoftmaxOffset(nn.Module):
    """Hold the sinks of this rank's heads, whose exponentials are added to the sums below the softmax.

    A softmax off by one has sinks of 0, which are no parameter.

    Shapes: ``-> [n/tp]``, or None where there are none.
    """

    def __init__(self, config: TransformerConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.softmax_offset: torch.Tensor | None = None
        heads, dtype = config.num_attention_heads, dtype_from_name(config.params_dtype)
        if config.softmax_type == "learnable":
            spec = ParamSpec(
                "softmax_offset", (heads,), even_pieces((heads,), 0, tp.rank, tp.size), init_std=config.init_method_std
            )
            self.softmax_offset = make_parameter((heads // tp.size,), spec, dtype, device)
        self.is_off_by_one = config.softmax_type == "off-by-one"
        self.num_heads, self.dtype, self.device = heads // tp.size, dtype, device

    def forward(self) -> torch.Tensor | None:
        """Return the sinks."""
        if self.is_off_by_one:
            return torch.zeros(self.num_heads, dtype=self.dtype, device=self.device)
        return self.softmax_offset
