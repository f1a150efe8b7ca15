"""Tokens that spread evenly over experts, in a process that stands in for a rank: what others send it is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from megatron.core.collectives import all_to_all_first_dim
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.decoder_config import MoEConfig
from megatron.core.transformer.moe import expert_dispatch, expert_router
from megatron.core.transformer.moe.routing import choose_experts


@contextmanager
def balanced_experts() -> Iterator[None]:
    """Give every expert as many tokens, and let other ranks say of theirs what this one says of its own."""

    def choose_evenly(
        logits: torch.Tensor, config: MoEConfig, expert_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indices, weights = choose_experts(logits, config, expert_bias)
        even = torch.arange(indices.numel()).view_as(indices) % (config.num_experts or 1)
        return even, weights

    def exchange_alike(counts: torch.Tensor, group: Group) -> torch.Tensor:
        all_to_all_first_dim(counts, group)
        return counts

    def gather_alike(tensor: torch.Tensor, group: Group) -> torch.Tensor:
        gathered = gather_from_sequence_parallel_region(tensor, group=group)
        return gathered if tensor.is_floating_point() else tensor.repeat(group.size, 1)

    with (
        patch.object(expert_router, "choose_experts", choose_evenly),
        patch.object(expert_dispatch, "all_to_all_first_dim", exchange_alike),
        patch.object(expert_dispatch, "gather_from_sequence_parallel_region", gather_alike),
    ):
        yield
