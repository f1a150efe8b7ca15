"""Low-rank adapters of the experts' products: each expert has a pair of its own beside each of its matrices.

Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.core.sharding import ParamSpec, spec_of
from megatron.core.tensor_parallel.lora import AdapterOptions, LowRankAdapter
from megatron.core.transformer.moe.expert_groups import ExpertGroups
from megatron.core.transformer.moe.experts import GroupedLinear, expert_pieces
from megatron.core.transformer.moe.grouped_linear import grouped_linear


class ExpertAdapter(LowRankAdapter):
    """Compute ``scale * B A x`` of each expert's rows by its own ``A`` and ``B``, or shards of them.

    Experts whose output features are cut have all of ``A`` on each of the neighbours, and their own rows of ``B``;
    those whose input features are cut have their own columns of ``A`` and all of ``B``, and leave a part of a sum.
    What all neighbours hold has a part of its gradient on each. Dropout is not built.

    Shapes: ``[n, in] -> [n, out]``, rows in the order of the experts; of the features that are cut this rank's.
    """

    def __init__(
        self,
        options: AdapterOptions,
        layer_number: int,
        site: int,
        linear: GroupedLinear,
        groups: ExpertGroups,
        num_rows: int,
        num_stacked: int,
    ) -> None:
        super().__init__(options, layer_number, site)
        num_experts, _, in_features = spec_of(linear.weight).global_shape
        num_local = num_experts // groups.size
        down, up = (num_experts, options.rank, in_features), (num_experts, num_rows, options.rank)
        is_in_cut = linear.cut_dim == 2
        own_inputs = in_features // groups.tensor_size if is_in_cut else in_features
        own_rows = num_rows if is_in_cut else num_rows // groups.tensor_size
        of_down = _spec("lora_A", down, groups, 2 if is_in_cut else None, 1)
        self.lora_A = self._make((num_local, options.rank, own_inputs), replace(of_down, init_bound=in_features**-0.5))
        of_up = _spec("lora_B", up, groups, None if is_in_cut else 1, num_stacked)
        self.lora_B = self._make((num_local, own_rows, options.rank), of_up)

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return what is added to the rows; ``counts`` are those of each of this rank's experts."""
        library = self.options.product_library
        narrow = grouped_linear(x, self.lora_A, None, counts, library=library) * self.options.scale
        return grouped_linear(narrow, self.lora_B, None, counts, library=library)


def _spec(name: str, shape: tuple[int, ...], groups: ExpertGroups, cut_dim: int | None, num_stacked: int) -> ParamSpec:
    is_copied = cut_dim is None and groups.tensor_size > 1
    return ParamSpec(
        name,
        shape,
        expert_pieces(shape, groups, cut_dim, num_stacked),
        gradient_sum_axes=("tp",) if is_copied else (),
        replica_index=groups.tensor_rank if is_copied else 0,
        num_replicas=groups.tensor_size if is_copied else 1,
        is_expert=True,
    )
