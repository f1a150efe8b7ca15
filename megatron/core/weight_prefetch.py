"""Weights whose storage is freed while no pass uses them, with prefetching for the next layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from megatron.core.sharding import quantized_of


def free_storage(module: nn.Module) -> None:
    """Free the storage of every parameter of a module; their values are lost."""
    for parameter in module.parameters():
        parameter.untyped_storage().resize_(0)


def has_memory(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has the storage that it needs; empty, ``meta`` and quantized parameters need none."""
    return (
        parameter.is_meta
        or quantized_of(parameter) is not None
        or not parameter.numel()
        or parameter.untyped_storage().nbytes() > 0
    )


def alloc_storage(parameter: torch.Tensor) -> None:
    """Allocate uninitialized storage for a parameter that has none."""
    if not has_memory(parameter):
        parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())


class ComingWeights(Protocol):
    """Interface that loads weights which are stored elsewhere, and frees their memory."""

    def begin(self) -> None:
        """Start loading the weights, unless they are present or in flight."""

    def use(self) -> None:
        """Make the weights available to all computation launched from here on."""

    def free(self) -> None:
        """Free the weights' memory, if it is allocated."""


class WeightPrefetch:
    """Keep the weights of each of ``layers`` in memory only while a pass runs through it.

    The weights of the next layer are prefetched in the meantime. While ``is_away`` is false all weights stay in memory.
    """

    def __init__(self, layers: Sequence[nn.Module], weights: Sequence[ComingWeights]) -> None:
        self.is_away = False
        self._weights = tuple(weights)
        self._index_of: dict[int, int] = {}
        self.follow(layers)

    def follow(self, layers: Sequence[nn.Module]) -> None:
        """Add other layers that share the same weights, in the same order."""
        self._index_of |= {id(layer): index for index, layer in enumerate(layers)}

    def enter(self, modules: Sequence[nn.Module]) -> None:
        """Load the weights of the layers that run next, and prefetch those of the layer after them."""
        self._use(self._indices(modules), ahead=1)

    def exit(self, modules: Sequence[nn.Module], before: torch.Tensor, after: torch.Tensor) -> None:
        """Free the weights of layers that have run; the backward pass has them between ``after`` and ``before``.

        If nothing before the layers requires gradients, they stay until the end of the step's passes.
        """
        indices = self._indices(modules)
        if not indices or not self.is_away:
            return
        self._free(indices)
        if after.requires_grad:
            after.register_hook(lambda grad: self._go_back_to(indices))  # type: ignore[no-untyped-call]
        if after.requires_grad and before.requires_grad:
            before.register_hook(lambda grad: self._free(indices))  # type: ignore[no-untyped-call]

    def _go_back_to(self, indices: Sequence[int]) -> None:
        """Load the weights of layers whose backward pass starts; the backward pass of the later layers has ended."""
        self._free(range(max(indices) + 1, len(self._weights)))
        self._use(indices, ahead=-1)

    def _indices(self, modules: Sequence[nn.Module]) -> list[int]:
        return [self._index_of[id(module)] for module in modules if id(module) in self._index_of]

    def _use(self, indices: Sequence[int], ahead: int) -> None:
        if not self.is_away or not indices:
            return
        for index in indices:
            self._weights[index].begin()
        for index in indices:
            self._weights[index].use()
        following = (max(indices) if ahead > 0 else min(indices)) + ahead
        if 0 <= following < len(self._weights):
            self._weights[following].begin()

    def _free(self, indices: Sequence[int]) -> None:
        for index in indices if self.is_away else ():
            self._weights[index].free()
