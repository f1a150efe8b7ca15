"""megatron-core's token dispatchers, which send tokens to their experts and back in six steps.

`dispatch_preprocess`, `token_dispatch` and `dispatch_postprocess` give the experts of this rank their rows, sorted by
expert, and the rows' weights. The experts apply the weights. `combine_preprocess`, `token_combine` and
`combine_postprocess` return the sum of each token's rows. A dispatcher keeps the routing of one micro-batch in between.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.collectives import all_to_all_first_dim
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.process_state import resolve_group
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.expert_dispatch import all_to_all, reorder
from megatron.core.transformer.moe.moe_utils import pad_routing_map, permute, unpermute

_FP8_MULTIPLE, _BLOCKS_MULTIPLE = 16, 32


class MoETokenDispatcher(ABC):
    """Interface of a token dispatcher."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        self.config = config
        self.shared_experts: nn.Module | None = None
        self._shared_input: torch.Tensor | None = None
        self._shared_output: torch.Tensor | None = None
        self.group = resolve_group(getattr(pg_collection, "tp_ep", None), "tp_ep")
        expt_tp = resolve_group(getattr(pg_collection, "expt_tp", None), "expt_tp")
        self.tp_size, self.tp_rank = expt_tp.size, expt_tp.rank
        self.ep_size = self.group.size // expt_tp.size
        self.tp_group, self.tp_ep_group = expt_tp.handle, self.group.handle

    @abstractmethod
    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows to send and their weights.

        Shapes: ``tokens: [s, b, h]``, ``routing_map, probs: [s * b, experts]``.
        """

    @abstractmethod
    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange rows and weights with the other ranks."""

    @abstractmethod
    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows of this rank's experts sorted by expert, their numbers per expert, and their weights.

        Shapes: ``-> [m, h], [local experts], [m]``.
        """

    @abstractmethod
    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows of the experts' outputs in the order in which they are sent back."""

    @abstractmethod
    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send the outputs back."""

    @abstractmethod
    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's outputs. Shapes: ``-> [s, b, h]``."""

    def set_shared_experts(self, shared_experts: nn.Module) -> None:
        """Let the dispatcher run the shared experts during its communication, and add their output.

        Raises:
            AssertionError: ``config.moe_shared_expert_overlap`` is not set.
        """
        assert self.config.moe_shared_expert_overlap, "set_shared_experts needs moe_shared_expert_overlap"
        self.shared_experts = shared_experts

    def token_permutation(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the three steps of the dispatch (the interface before megatron-core 0.13)."""
        return self.dispatch_postprocess(
            *self.token_dispatch(*self.dispatch_preprocess(hidden_states, routing_map, probs))
        )

    def token_unpermutation(
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """Run the three steps of the combination, and return no bias (the interface before megatron-core 0.13)."""
        assert bias is None, "the experts add their biases"
        return self.combine_postprocess(self.token_combine(self.combine_preprocess(hidden_states))), None

    def _padded_map(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Return the routing map, with choices added if quantized GEMMs need multiples of rows."""
        if not (self.config.moe_router_padding_for_quantization or self.config.moe_router_padding_for_fp8):
            return routing_map
        takes_blocks = self.config.fp8_recipe == "mxfp8" or bool(self.config.fp4)
        return pad_routing_map(routing_map, _BLOCKS_MULTIPLE if takes_blocks else _FP8_MULTIPLE)


class _LocalExpertsDispatcher(MoETokenDispatcher):
    """Dispatcher to experts of which this rank has a consecutive range."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, pg_collection)
        assert num_local_experts > 0, "a rank needs at least one expert"
        assert len(local_expert_indices) == num_local_experts, (
            "local_expert_indices must have num_local_experts numbers"
        )
        assert all(b - a == 1 for a, b in itertools.pairwise(local_expert_indices)), (
            f"local_expert_indices {list(local_expert_indices)} must be consecutive"
        )
        self.num_experts = config.num_moe_experts
        self.num_local_experts, self.local_expert_indices = num_local_experts, list(local_expert_indices)


class MoEAllGatherTokenDispatcher(_LocalExpertsDispatcher):
    """All-gather all tokens; each rank runs its own experts, and a reduce-scatter sums the outputs."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens ``[n, h]`` and the weights ``[n, experts]``."""
        self.hidden_shape = hidden_states.shape
        self.routing_map = routing_map
        return hidden_states.reshape(-1, self.hidden_shape[-1]), probs

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the tokens and weights of all ranks."""
        if self.group.size > 1:
            with torch.no_grad():
                self.routing_map = gather_from_sequence_parallel_region(
                    self.routing_map.to(torch.uint8), group=self.group
                )
                self.routing_map = self.routing_map.bool()
            hidden_states, probs = (
                gather_from_sequence_parallel_region(each, group=self.group) for each in (hidden_states, probs)
            )
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Select the rows of this rank's experts."""
        first = self.local_expert_indices[0]
        own = slice(first, first + self.num_local_experts)
        self.local_map = self._padded_map(self.routing_map[:, own])
        self.global_shape = hidden_states.shape
        rows, weights, self.sources = permute(hidden_states, self.local_map, probs[:, own])
        assert weights is not None
        return rows, self.local_map.sum(dim=0), weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum the rows of each token of all ranks."""
        return unpermute(hidden_states, self.sources, self.global_shape)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, and keep this rank's tokens."""
        if self.group.size > 1:
            hidden_states = reduce_scatter_to_sequence_parallel_region(hidden_states, self.group)
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Restore the shape."""
        return hidden_states.view(self.hidden_shape)


class MoEAlltoAllTokenDispatcher(_LocalExpertsDispatcher):
    """Send each token only to the ranks of its experts, with an all-to-all of variable sizes.

    If experts are sharded, a token is sent to all ranks of its expert.
    """

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Exchange the numbers of rows, and return those of this rank's experts, in host memory.

        Shapes: ``routing_map: [n, experts] -> [local experts]``.
        """
        counts = routing_map.sum(dim=0).view(self.ep_size, self.num_local_experts)
        going = counts.repeat_interleave(self.tp_size, dim=0)
        coming = all_to_all_first_dim(going, self.group)
        # Synchronize with the device: the host needs the numbers to allocate memory.
        sent, received = torch.stack((going, coming)).tolist()
        self.group.ensure_not_given_up()
        self.input_splits, self.output_splits = ([sum(of_rank) for of_rank in each] for each in (sent, received))
        of_expert = torch.arange(self.num_local_experts, device=coming.device).repeat(self.group.size)
        order = of_expert.repeat_interleave(coming.view(-1), output_size=sum(self.output_splits)).argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        self.order, self.inverse = order, inverse
        return torch.tensor(received).sum(dim=0)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of each destination, and their weights."""
        assert probs.dim() == 2, f"probs have {probs.dim()} dims; they must be [tokens, experts]"
        assert routing_map.dim() == 2, f"routing_map has {routing_map.dim()} dims; it must be [tokens, experts]"
        assert routing_map.dtype == torch.bool, f"routing_map has dtype {routing_map.dtype}; it must be bool"
        self.hidden_shape = hidden_states.shape
        self._shared_input = None if self.shared_experts is None else hidden_states
        tokens = hidden_states.reshape(-1, self.hidden_shape[-1])
        routing_map = self._padded_map(routing_map)
        self.tokens_per_expert = self.preprocess(routing_map)
        rows, weights, self.sources = permute(tokens, routing_map, probs)
        assert weights is not None
        if self.tp_size > 1:
            by_rank = torch.arange(len(rows), device=rows.device).split_with_sizes(self.input_splits[:: self.tp_size])
            copies = torch.cat([of_rank for of_rank in by_rank for _ in range(self.tp_size)])
            self.sources = self.sources[copies]
            rows, weights = rows.index_select(0, copies), weights.index_select(0, copies)
        return rows, weights

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange rows and weights, and run the shared experts meanwhile, if the dispatcher has them."""
        splits = self.input_splits, self.output_splits
        weights = all_to_all(permuted_probs.unsqueeze(-1), *splits, self.group).squeeze(-1)
        if self.shared_experts is None:
            return all_to_all(permutated_local_input_tokens, *splits, self.group), weights
        grad_enabled = torch.is_grad_enabled()

        def run_shared() -> None:
            assert self.shared_experts is not None
            with torch.set_grad_enabled(grad_enabled):
                self._shared_output = self.shared_experts(self._shared_input)

        if self.group.size == 1:
            run_shared()
            return permutated_local_input_tokens, weights
        return all_to_all(permutated_local_input_tokens, *splits, self.group, run_shared), weights

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the received rows by expert."""
        rows = reorder(global_input_tokens, self.order, self.inverse)
        return rows, self.tokens_per_expert, global_probs.index_select(0, self.order)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sort the outputs by destination."""
        return reorder(hidden_states, self.inverse, self.order)

    def token_combine(
        self, hidden_states: torch.Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> torch.Tensor:
        """Send the outputs back; the other arguments have no effect."""
        return all_to_all(hidden_states, self.output_splits, self.input_splits, self.group)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Sum each token's outputs, and add the shared experts' output."""
        shape = (self.hidden_shape[:-1].numel(), self.hidden_shape[-1])
        output = unpermute(permutated_local_input_tokens, self.sources, shape).view(self.hidden_shape)
        if self._shared_output is not None:
            output, self._shared_output, self._shared_input = output + self._shared_output, None, None
        return output


class MoEFlexTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher: DeepEP and HybridEP kernels are not used."""


DISPATCHERS: dict[str, type[Any]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}
"""Dispatchers by their names in ``config.moe_token_dispatcher_type``."""
