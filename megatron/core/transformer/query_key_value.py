"""The fused query, key and value projection of grouped-query attention, sharded over the tensor-parallel group.

Its rows are, for every key-value group, ``[q ... q, k, v]``. Ainslie et al. 2023, https://arxiv.org/abs/2305.13245.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.fp8.float8_quantisers import Float8Quantisers
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import Box, ParamSpec, Piece
from megatron.core.tensor_parallel.comm_overlap_config import linear_overlap
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, make_parameter, tensor_parallel_linear
from megatron.core.tensor_parallel.mappings import InputRegion
from megatron.core.transformer.transformer_config import TransformerConfig


def make_query_key_value(config: TransformerConfig, tp: Group, device: torch.device | str) -> nn.Module:
    """Return the projection ``[s, b, h] -> [s, b, rows of this rank's groups]``.

    With at least as many groups as tensor-parallel ranks each rank holds whole groups; with fewer, several ranks share
    a group: each has its own query heads and a copy of the group's key and value.
    """
    if config.num_query_groups % tp.size == 0:
        return ColumnParallelLinear(
            config.hidden_size,
            config.query_projection_size + 2 * config.kv_projection_size,
            tp,
            has_bias=config.has_qkv_bias,
            sequence_parallel=config.sequence_parallel,
            init_std=config.init_method_std,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
            library=config.cpu_matmul,
            overlap=linear_overlap(config, "qkv"),
            fused_rows=_rows_of_a_group(config),
        )
    return SharedGroupQueryKeyValue(config, tp, device)


def _rows_of_a_group(config: TransformerConfig) -> tuple[int, int, int]:
    query_rows = config.query_projection_size // config.num_query_groups
    return (query_rows, config.kv_channels, config.kv_channels)


class SharedGroupQueryKeyValue(nn.Module):
    """Project to query, key and value where several tensor-parallel ranks share one key-value group.

    The query rows are this rank's alone; the key and value rows are equal on the ranks that share the group, and their
    gradients are parts that must be summed over those ranks.

    Shapes: ``[s, b, h] -> [s, b, (heads/tp + 2) * d]``; the input is ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.tp = tp
        self.product_library = config.cpu_matmul
        self.overlap = linear_overlap(config, "qkv")
        self.quantisers: Float8Quantisers | None = None
        self.region = InputRegion.SEQUENCE if config.sequence_parallel else InputRegion.REPLICATED
        dtype = dtype_from_name(config.params_dtype)
        width = config.hidden_size
        ranks_per_group = tp.size // config.num_query_groups
        group, member = divmod(tp.rank, ranks_per_group)
        total_rows = config.query_projection_size + 2 * config.kv_projection_size
        rows_per_group = total_rows // config.num_query_groups
        query_rows = config.query_projection_size // tp.size
        kv_rows = 2 * config.kv_channels
        query_start = group * rows_per_group + member * query_rows
        kv_start = (group + 1) * rows_per_group - kv_rows

        def parameter(name: str, start: int, rows: int, shared: bool) -> nn.Parameter:
            trailing = (width,) if name == "weight" else ()
            piece = Piece(Box((start, *(0 for _ in trailing)), (rows, *trailing)), (0, *(0 for _ in trailing)))
            spec = ParamSpec(
                name,
                (total_rows, *trailing),
                (piece,),
                gradient_sum_axes=("tp",) if shared else (),
                replica_index=member if shared else 0,
                num_replicas=ranks_per_group if shared else 1,
                init_std=config.init_method_std if name == "weight" else 0.0,
                fused_rows=_rows_of_a_group(config),
            )
            return make_parameter((rows, *trailing), spec, dtype, device)

        self.query_weight = parameter("weight", query_start, query_rows, shared=False)
        self.key_value_weight = parameter("weight", kv_start, kv_rows, shared=True)
        self.query_bias: nn.Parameter | None = None
        self.key_value_bias: nn.Parameter | None = None
        if config.has_qkv_bias:
            self.query_bias = parameter("bias", query_start, query_rows, shared=False)
            self.key_value_bias = parameter("bias", kv_start, kv_rows, shared=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's query heads followed by its group's key and value."""
        weight = torch.cat((self.query_weight, self.key_value_weight))
        bias = None
        if self.query_bias is not None and self.key_value_bias is not None:
            bias = torch.cat((self.query_bias, self.key_value_bias))
        return tensor_parallel_linear(
            *(x, weight, bias, self.region, self.tp),
            library=self.product_library,
            overlap=self.overlap,
            quantisers=self.quantisers,
        )
