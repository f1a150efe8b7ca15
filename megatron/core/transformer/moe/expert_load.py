"""How many tokens each expert is given in a step, what is dropped, and the bias that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group
from megatron.core.transformer.moe.moe_config import MoEConfig
from megatron.core.transformer.moe.routing import occurrences


class ExpertTally:
    """Count the choices of one layer in one step on this rank: those of each expert, and those that were dropped.

    Passes that compute activations again are not counted.

    Shapes: ``counts: [experts + 1]`` float64, dropped choices last.
    """

    def __init__(self) -> None:
        self.counts: torch.Tensor | None = None
        self._so_far: torch.Tensor | None = None
        self._num_microbatches = 0

    def begin_step(self) -> None:
        """Forget the step before."""
        self.counts = self._so_far = None
        self._num_microbatches = 0

    @torch.no_grad()
    def add(self, indices: torch.Tensor, num_experts: int, local_padding_mask: torch.Tensor | None = None) -> None:
        """Count the choices of a micro-batch; a number beyond the last expert is one that was dropped.

        Padding has no choices, and none of it counts as dropped.

        Shapes: ``indices: [n, k]``, ``local_padding_mask: [n]``.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # Within a backward pass: this is a pass that was counted before.
        if local_padding_mask is not None:
            indices = indices.masked_fill(local_padding_mask.unsqueeze(1), num_experts + 1)
        found = occurrences(indices.reshape(-1), num_experts + 2)[:-1].double()
        self.counts = found if self.counts is None else self.counts + found

    @torch.no_grad()
    def add_to_global_batch(self, counts: torch.Tensor, dp: Group) -> torch.Tensor:
        """Add a micro-batch's choices of all data-parallel ranks, and return the mean over those so far; collective.

        Shapes: ``[experts] -> [experts]``.
        """
        total = counts.clone()
        all_reduce(total, dp)
        self._num_microbatches += 1
        self._so_far = total if self._so_far is None else self._so_far + total
        return self._so_far / self._num_microbatches


@dataclass(frozen=True)
class LoadReport:
    """Hold what the experts were given in a step: shares of the even load by layer and expert, and dropped choices.

    ``layers`` are the numbers of the layers with experts, from 0.
    """

    layers: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    dropped: float

    def by_layer(self) -> dict[str, list[float]]:
        """Return the shares of each layer, by its number from 1."""
        return {str(layer + 1): list(shares) for layer, shares in zip(self.layers, self.shares)}

    def scalars(self) -> dict[str, float | None]:
        """Return each expert's share by its TensorBoard tag."""
        return {
            f"expert-load/layer-{layer + 1}/expert-{expert}": share
            for layer, shares in zip(self.layers, self.shares)
            for expert, share in enumerate(shares)
        }

    def numbers(self) -> dict[str, float]:
        """Return what is reported of it as plain numbers by name."""
        flat = [share for shares in self.shares for share in shares]
        return {
            "expert_load_max": max(flat, default=0.0),
            "expert_load_min": min(flat, default=0.0),
            "dropped_tokens": self.dropped,
        }


class ExpertLoads:
    """Sum the tallies of a run's layers of experts over all ranks, and move the experts' biases.

    ``routers`` are this rank's by layer number; ``layers`` the numbers of all layers with experts.
    """

    def __init__(
        self, routers: dict[int, BiasedRouter], layers: Sequence[int], config: MoEConfig, state: ParallelState
    ) -> None:
        self._routers, self._layers, self._config, self._state = routers, tuple(layers), config, state

    def begin_step(self) -> None:
        """Forget the step before."""
        for router in self._routers.values():
            router.tally.begin_step()

    def collect(self, device: torch.device) -> torch.Tensor:
        """Return the choices of each layer over all ranks; collective.

        Shapes: ``-> [layers, experts + 1]`` float64.
        """
        assert self._config.num_experts is not None
        total = torch.zeros(len(self._layers), self._config.num_experts + 1, dtype=torch.float64, device=device)
        for row, layer in zip(total, self._layers):
            router = self._routers.get(layer)
            if router is not None and router.tally.counts is not None:
                row.copy_(router.tally.counts)
        all_reduce(total, self._state.world)
        return total

    @torch.no_grad()
    def move_biases(self, totals: torch.Tensor) -> None:
        """Raise the bias of experts below the mean load, and lower that of those above.

        Shapes: ``totals: [layers, experts + 1]``.
        """
        for row, layer in zip(totals, self._layers):
            router = self._routers.get(layer)
            if router is not None and router.expert_bias is not None:
                given = row[:-1]
                step = (given.mean() - given).sign() * self._config.moe_router_bias_update_rate
                router.expert_bias.add_(step.to(router.expert_bias.dtype))

    def report(self, totals: torch.Tensor) -> LoadReport:
        """Return a step's load as numbers of the host.

        Shapes: ``totals: [layers, experts + 1]``.
        """
        given = totals[:, :-1]
        shares = given / given.mean(dim=1, keepdim=True).clamp(min=1e-9)
        dropped = totals[:, -1].sum() / totals.sum().clamp(min=1.0)
        # Read at once: each reading waits for the device.
        *flat, share_dropped = torch.cat((shares.flatten(), dropped.view(1))).tolist()
        rows = (flat[first : first + given.shape[1]] for first in range(0, len(flat), given.shape[1]))
        return LoadReport(self._layers, tuple(map(tuple, rows)), share_dropped)


class BiasedRouter(nn.Module):
    """What counting the load asks of a router: a tally and, where experts are chosen by it, a bias."""

    tally: ExpertTally
    expert_bias: nn.Parameter | None
