"""megatron-core's experts of one rank: separate MLPs (`SequentialMLP`) or grouped GEMMs (`GroupedMLP`).

Both take rows sorted by expert, and multiply the result by the rows' weights (``permuted_probs``). If experts are
sharded, results are partial sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_state import resolve_group
from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MLP, MLPSubmodules, TransformerConfig, megatron_activation
from megatron.core.transformer.moe.grouped_experts import grouped_linear
from megatron.core.utils import divide


def _weighted_rows(
    config: TransformerConfig, rows: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and weights; with ``config.moe_apply_probs_on_input`` the rows are weighted and weights are 1."""
    if not config.moe_apply_probs_on_input:
        return rows, probs
    assert config.moe_router_topk == 1, "moe_apply_probs_on_input needs moe_router_topk 1"
    return (rows * probs.unsqueeze(-1)).to(rows.dtype), torch.ones_like(probs)


class SequentialMLP(nn.Module):
    """One `MLP` per expert of this rank, in ``local_experts``."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.config, self.num_local_experts = config, num_local_experts
        tp: Any = getattr(pg_collection, "expt_tp", None)
        self.local_experts = nn.ModuleList(
            MLP(config, submodules, is_expert=True, ffn_hidden_size=config.moe_ffn_hidden_size, tp_group=tp)
            for _ in range(num_local_experts)
        )

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return the experts' weighted outputs, and no bias, because it is added.

        Shapes: ``[n, h]``, ``[experts]`` that sum to n, ``[n] -> [n, h]``.
        """
        rows, probs = _weighted_rows(self.config, permuted_local_hidden_states, permuted_probs)
        counts = tokens_per_expert.tolist()
        # An expert without rows runs too, so that its parameters get gradients, of zero.
        outputs = [
            expert(of_expert, scale)[0]
            for expert, of_expert, scale in zip(
                self.local_experts, rows.split_with_sizes(counts), probs.split_with_sizes(counts)
            )
        ]
        return torch.cat(outputs), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass."""


class GroupedMLP(nn.Module):
    """All experts of this rank in two weights, whose GEMMs run in groups; experts have no biases.

    Shapes: ``weight1: [h, experts * ffn/etp]`` (twice that if gated), ``weight2: [experts * ffn/etp, h]``. Their views
    as ``[experts, h, ffn/etp]`` and ``[experts, ffn/etp, h]`` are the experts' weights, transposed.

    Raises:
        AssertionError: ``config.add_bias_linear`` is set.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__()
        assert not config.add_bias_linear, "grouped experts have no biases; set add_bias_linear to False"
        assert config.moe_ffn_hidden_size is not None
        self.config, self.num_local_experts = config, num_local_experts
        self.expert_parallel = config.expert_model_parallel_size > 1
        self.activation_func = megatron_activation(config)
        self.activation_recompute = "moe_act" in config.recomputed_modules
        tp = resolve_group(getattr(pg_collection, "expt_tp", None), "expt_tp")
        width = divide(config.moe_ffn_hidden_size, tp.size)
        stride = 2 if config.gated_linear_unit else 1
        make = partial(torch.empty, dtype=config.params_dtype)
        self.weight1 = nn.Parameter(make((config.hidden_size, num_local_experts * width * stride)))
        self.weight2 = nn.Parameter(make((num_local_experts * width, config.hidden_size)))
        for weight, dim, init_method in (
            (self.weight1, 1, config.init_method),
            (self.weight2, 0, config.output_layer_init_method),
        ):
            set_tensor_model_parallel_attributes(weight, True, dim, stride if dim == 1 else 1)
            weight.allreduce = not self.expert_parallel  # type: ignore[attr-defined]
            if config.perform_initialization:
                assert init_method is not None
                self._fill(weight, dim, init_method, tp.rank, tp.size, stride if dim == 1 else 1)

    def _fill(self, weight: nn.Parameter, dim: int, init_method: Any, rank: int, size: int, stride: int) -> None:
        """Fill each expert's shard: from the whole expert on CPU, otherwise from the rank's random number generator."""
        if not self.config.use_cpu_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
            return
        with torch.no_grad():
            for shard in weight.chunk(self.num_local_experts, dim=dim):
                whole = torch.empty([n * (size if axis == dim else 1) for axis, n in enumerate(shard.shape)])
                init_method(whole)
                parts = whole.chunk(size * stride, dim=dim)
                shard.copy_(torch.cat(parts[rank::size], dim=dim))

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return the experts' weighted outputs, and no bias.

        Shapes: ``[n, h]``, ``[experts]`` that sum to n, ``[n] -> [n, h]``.
        """
        rows, probs = _weighted_rows(self.config, permuted_local_hidden_states, permuted_probs)
        counts = tokens_per_expert.long().tolist()
        first = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        second = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        inner = grouped_linear(rows, first.transpose(1, 2), None, counts)
        if not self.activation_recompute:
            return grouped_linear(self._activated(inner, probs), second.transpose(1, 2), None, counts), None
        activation = CheckpointWithoutOutput()
        activated = activation.checkpoint(self._activated, inner, probs)
        output = grouped_linear(activated, second.transpose(1, 2), None, counts)
        activation.discard_output_and_register_recompute(output)
        return output, None

    def _activated(self, inner: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        activated = self.activation_func(inner)
        return (activated * probs.unsqueeze(-1)).to(activated.dtype)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are computed in the backward pass."""
