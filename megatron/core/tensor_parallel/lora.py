"""LoRA: low-rank adapters of column- and row-parallel linear layers.

The output is ``y + (alpha / rank) B A x``. Only A and B are trained. Ranks communicate the low-rank activation: ``A x``
has only ``rank`` features. Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron.core.ops import DropoutKeys, keyed_dropout
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, even_shards
from megatron.core.tensor_parallel.mappings import (
    InputRegion,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.sharded_layers import make_parameter, replicated_spec, tensor_parallel_linear


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options that all adapters of a model share; dropout applies to their input."""

    rank: int
    scale: float
    dropout: float
    tp: Group
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device | str
    product_library: str


@dataclass(frozen=True)
class RowBlock:
    """Rows of ``B`` that this rank holds; ``spec`` is the `ParamSpec` of ``[all rows, rank]``."""

    num_rows: int
    spec: ParamSpec


class LowRankAdapter(nn.Module):
    """Compute ``scale * B A x``. ``A`` is initialized uniformly within ``1 / sqrt(in)``, ``B`` to zero.

    ``site`` distinguishes the dropout of up to 8 adapters in a layer.
    """

    def __init__(self, options: AdapterOptions, layer_number: int, site: int) -> None:
        super().__init__()
        self.options = options
        self.layer_number, self.site = layer_number, site
        self.keys: DropoutKeys | None = None
        """Dropout keys of the next call."""

    def _make(self, shape: tuple[int, ...], spec: ParamSpec) -> nn.Parameter:
        return make_parameter(shape, spec, self.options.dtype, self.options.device)

    def _drop(self, x: torch.Tensor, *, is_whole: bool, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Apply dropout; ``is_whole`` means that the positions are not sharded by sequence parallelism."""
        probability = self.options.dropout
        if not self.training or probability == 0.0:
            return x
        assert self.keys is not None, "active dropout is keyed"
        return keyed_dropout(x, self.keys.of_adapter(self.layer_number, self.site, is_whole), probability, columns)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, region: InputRegion = InputRegion.SPLIT) -> torch.Tensor:
        return tensor_parallel_linear(x, weight, None, region, self.options.tp, library=self.options.product_library)


class ColumnAdapter(LowRankAdapter):
    """Adapter of rows of a column-parallel layer: ``A`` is replicated, and ``B`` is sharded by row like the layer.

    ``blocks`` are consecutive in the output. Most layers have one.

    Shapes: ``[s, b, in] -> [s, b, rows of this rank]``; the input is ``[s/tp, b, in]`` under sequence parallelism.
    """

    def __init__(
        self, options: AdapterOptions, layer_number: int, site: int, in_features: int, blocks: Sequence[RowBlock]
    ) -> None:
        super().__init__(options, layer_number, site)
        shape = (options.rank, in_features)
        # Under sequence parallelism a rank multiplies only its own positions, before the low-rank activation is
        # gathered.
        spec = replicated_spec("lora_A", shape, options.tp, options.sequence_parallel)
        self.lora_A = self._make(shape, replace(spec, init_bound=in_features**-0.5))
        self.region = InputRegion.SEQUENCE if options.sequence_parallel else InputRegion.REPLICATED
        self.names = ["lora_B" if number == 0 else f"lora_B_{number}" for number in range(len(blocks))]
        for name, block in zip(self.names, blocks):
            self.register_parameter(name, self._make((block.num_rows, options.rank), block.spec))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's contribution to these rows."""
        narrow = self._linear(self._drop(x, is_whole=False), self.lora_A) * self.options.scale
        weights = [getattr(self, name) for name in self.names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self._linear(narrow, weight, self.region)


class RowAdapter(LowRankAdapter):
    """Adapter of a row-parallel layer: ``A`` is sharded by column like the layer, and ``B`` is replicated.

    Shapes: ``[s, b, in/tp] -> [s, b, out]``; the output is ``[s/tp, b, out]`` under sequence parallelism.
    """

    def __init__(
        self, options: AdapterOptions, layer_number: int, site: int, in_features: int, out_features: int
    ) -> None:
        super().__init__(options, layer_number, site)
        tp = options.tp
        shape, own_width = (options.rank, in_features), in_features // tp.size
        shards = even_shards(shape, 1, tp.rank, tp.size)
        self.lora_A = self._make(
            (options.rank, own_width), ParamSpec("lora_A", shape, shards, init_bound=in_features**-0.5)
        )
        self.scatters = options.sequence_parallel and tp.size > 1
        out_shape = (out_features, options.rank)
        self.lora_B = self._make(out_shape, replicated_spec("lora_B", out_shape, tp, options.sequence_parallel))
        self.first_column, self.num_columns = tp.rank * own_width, own_width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's contribution to the layer's output."""
        columns = torch.arange(self.first_column, self.first_column + self.num_columns, device=x.device)
        partial = self._linear(self._drop(x, is_whole=True, columns=columns), self.lora_A)
        tp = self.options.tp
        reduce = (
            reduce_scatter_to_sequence_parallel_region if self.scatters else reduce_from_tensor_model_parallel_region
        )
        return self._linear(reduce(partial, tp) * self.options.scale, self.lora_B)


class LinearAdapters(nn.Module):
    """Adapters of one linear layer, by the part of its rows that each adapts.

    The rows consist of ``num_groups`` groups, each with the parts in the order and with the sizes of ``widths``. Parts
    without an adapter are unchanged.

    Shapes: the layer's input ``->`` the layer's output.
    """

    def __init__(self, adapters: Mapping[str, LowRankAdapter], widths: Mapping[str, int], num_groups: int = 1) -> None:
        super().__init__()
        for part, adapter in adapters.items():
            self.add_module(part, adapter)
        self.widths, self.num_groups = dict(widths), num_groups

    def forward(self, *inputs: Any) -> torch.Tensor:
        """Return the adapters' contribution to the layer's output; the adapters take the layer's inputs."""
        if len(self.widths) == 1:
            (adapter,) = self.children()
            only: torch.Tensor = adapter(*inputs)
            return only
        found = {name: adapter(*inputs) for name, adapter in self.named_children()}
        some = next(iter(found.values()))
        grouped = [
            found[part].unflatten(-1, (self.num_groups, width))
            if part in found
            else some.new_zeros(*some.shape[:-1], self.num_groups, width)
            for part, width in self.widths.items()
        ]
        return torch.cat(grouped, dim=-1).flatten(-2)


def adapt(linear: nn.Module, adapters: LinearAdapters) -> None:
    """Add the adapters' outputs to a linear layer's output; they become its submodule ``adapters``."""
    linear.add_module("adapters", adapters)
    linear.register_forward_hook(_add)


def _add(linear: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = linear.adapters(*args)
    return output + added
