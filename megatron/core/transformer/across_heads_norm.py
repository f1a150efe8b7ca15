"""RMSNorm of all heads of a token together, where the heads are cut over the tensor-parallel group."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, even_pieces
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.tensor_parallel.mappings import sum_over_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class AcrossHeadsNorm(nn.Module):
    """Normalise the heads of each token as one vector, and scale every channel by a weight of its own.

    Where there are fewer heads than tensor-parallel ranks, several ranks hold copies of one. Forward and backward: an
    all-reduce of one number a token.

    Shapes: ``[s, b, heads/tp, d] -> [s, b, heads/tp, d]``.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.tp = tp
        self.epsilon = config.norm_epsilon
        self.mean_weight = 1.0 if config.apply_layernorm_1p else 0.0
        num_shards = min(num_heads, tp.size)
        self.copies = tp.size // num_shards
        shard, member = divmod(tp.rank, self.copies)
        self.width = num_heads * config.kv_channels
        spec = ParamSpec(
            "weight",
            (self.width,),
            even_pieces((self.width,), 0, shard, num_shards),
            gradient_sum_axes=("tp",) if self.copies > 1 else (),
            replica_index=member,
            num_replicas=self.copies,
            init_mean=1.0 - self.mean_weight,
        )
        dtype = dtype_from_name(config.params_dtype)
        self.weight = make_parameter((self.width // num_shards,), spec, dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised heads in their own dtype."""
        wide = x.to(arithmetic_dtype(x.dtype))
        squares = wide.square().sum(dim=(-2, -1), keepdim=True)
        mean = sum_over_tensor_model_parallel_region(squares, self.tp) / (self.copies * self.width)
        normalised = (wide * torch.rsqrt(mean + self.epsilon)).to(x.dtype)
        return normalised * (self.weight + self.mean_weight).view(x.shape[-2:])
