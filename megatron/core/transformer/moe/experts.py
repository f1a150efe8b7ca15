"""The experts of a layer that this rank has: feed-forward layers whose products are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from megatron.core.fp8.float8_quantisers import Float8Quantisers
from megatron.core.precision import dtype_from_name
from megatron.core.sharding import Box, ParamSpec, Piece
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.tensor_parallel.recompute import saved_as_inputs
from megatron.core.transformer.mlp import activation_of
from megatron.core.transformer.moe.expert_groups import ExpertGroups
from megatron.core.transformer.moe.float8_grouped_linear import float8_grouped_linear
from megatron.core.transformer.moe.grouped_linear import grouped_linear
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedLinear(nn.Module):
    """Hold one weight for each of this rank's experts, sharded along ``cut_dim`` (1: out, 2: in) with its neighbours.

    ``num_stacked`` counts equal tensors that the output features stack, each of which is sharded on its own. An input
    that is cut leaves a part of a sum over the neighbours, to which the first of them adds the bias.

    Shapes: ``[n, in] -> [n, out]``, rows in the order of the experts; of the features that are cut this rank's.
    """

    def __init__(
        self,
        num_experts: int,
        shape: tuple[int, int],
        groups: ExpertGroups,
        *,
        cut_dim: int,
        num_stacked: int = 1,
        has_bias: bool,
        init_std: float,
        dtype: torch.dtype,
        device: torch.device | str,
        library: str,
    ) -> None:
        super().__init__()
        self.product_library, self.cut_dim = library, cut_dim
        self.quantisers: tuple[Float8Quantisers, ...] | None = None
        """One for each of this rank's experts, in their order, where products are in fp8."""
        num_local = num_experts // groups.size
        self.expert_numbers = range(groups.rank * num_local, (groups.rank + 1) * num_local)
        """The numbers of this rank's experts among all."""
        self.adds_bias = cut_dim == 1 or groups.tensor_rank == 0
        whole = (num_experts, *shape)
        local = [num_local, *shape]
        local[cut_dim] //= groups.tensor_size
        spec = ParamSpec(
            "weight",
            whole,
            expert_pieces(whole, groups, cut_dim, num_stacked),
            init_std=init_std,
            fused_rows=(shape[0] // num_stacked,) * num_stacked if num_stacked > 1 else (),
            is_expert=True,
        )
        self.weight = make_parameter(tuple(local), spec, dtype, device)
        self.bias: nn.Parameter | None = None
        if has_bias:
            is_cut = cut_dim == 1
            bias_spec = ParamSpec(
                "bias",
                whole[:2],
                expert_pieces(whole[:2], groups, 1 if is_cut else None, num_stacked),
                replica_index=0 if is_cut else groups.tensor_rank,
                num_replicas=1 if is_cut else groups.tensor_size,
                is_expert=True,
            )
            self.bias = make_parameter(tuple(local[:2]), bias_spec, dtype, device)

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the products; ``counts`` are the rows of each of this rank's experts."""
        if self.quantisers is not None:
            return float8_grouped_linear(
                x,
                self.weight,
                self.bias,
                counts,
                self.quantisers,
                adds_bias=self.adds_bias,
                library=self.product_library,
            )
        return grouped_linear(x, self.weight, self.bias, counts, adds_bias=self.adds_bias, library=self.product_library)


class GroupedExperts(nn.Module):
    """Map ``h -> ffn -> h`` by this rank's experts, or its shards of them.

    Shapes: ``[n, h] -> [n, h]``, rows in the order of the experts. Where experts are cut, results are parts of a sum.
    """

    def __init__(self, config: TransformerConfig, groups: ExpertGroups, device: torch.device | str) -> None:
        super().__init__()
        assert config.num_experts is not None
        num_stacked = 2 if config.is_gated else 1
        dtype = dtype_from_name(config.params_dtype)
        self.activation = activation_of(config)
        self.recomputes_activation = "moe_act" in config.recomputed_modules
        self.linear_fc1 = GroupedLinear(
            config.num_experts,
            (config.moe_ffn_hidden_size * num_stacked, config.hidden_size),
            groups,
            cut_dim=1,
            num_stacked=num_stacked,
            has_bias=config.add_bias_linear,
            init_std=config.init_method_std,
            dtype=dtype,
            device=device,
            library=config.cpu_matmul,
        )
        self.linear_fc2 = GroupedLinear(
            config.num_experts,
            (config.hidden_size, config.moe_ffn_hidden_size),
            groups,
            cut_dim=2,
            has_bias=config.add_bias_linear,
            init_std=config.output_init_method_std,
            dtype=dtype,
            device=device,
            library=config.cpu_matmul,
        )

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return what the experts make of their rows; ``counts`` are the rows of each."""
        inner = self.linear_fc1(x, counts)
        activated = self.activation(inner)
        is_again = self.recomputes_activation and self.training
        with saved_as_inputs(activated, self.activation, inner) if is_again else nullcontext():
            output: torch.Tensor = self.linear_fc2(activated, counts)
        return output


def expert_pieces(
    shape: tuple[int, ...], groups: ExpertGroups, cut_dim: int | None, num_stacked: int
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor ``[experts, ...]`` that a rank of expert parallelism holds.

    A dim that is cut stacks ``num_stacked`` equal tensors, each cut evenly among those that cut the same experts.
    """
    num_local = shape[0] // groups.size
    offset, local_offset, piece = [0] * len(shape), [0] * len(shape), [num_local, *shape[1:]]
    offset[0] = groups.rank * num_local
    if cut_dim is None:
        return (Piece(Box(tuple(offset), tuple(piece)), tuple(local_offset)),)
    part = shape[cut_dim] // num_stacked
    length = piece[cut_dim] = part // groups.tensor_size
    pieces = []
    for number in range(num_stacked):
        offset[cut_dim] = number * part + groups.tensor_rank * length
        local_offset[cut_dim] = number * length
        pieces.append(Piece(Box(tuple(offset), tuple(piece)), tuple(local_offset)))
    return tuple(pieces)
