"""Weight offload: weights of layers wait in the machine's memory, during a step's passes, while no pass uses them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron.core.host_memory.host_copies import Copied, HostCopies
from megatron.core.host_memory.layers_in_use import LayersInUse


class WeightOffload(LayersInUse):
    """Take the weights of ``layers`` from the device while a step's passes run, but for the layers that are in use.

    Between `leave` and `come_home` a layer's weights are on the device while it or its neighbour runs. Outside they are
    where they always were, for the optimizer, checkpoints and evaluation. Each weight fills memory of its own.
    """

    def __init__(self, copies: HostCopies, layers: Sequence[nn.Module]) -> None:
        self._layers = [_LayerWeights(copies, list(layer.parameters())) for layer in layers]
        super().__init__(layers, self._layers)

    def leave(self) -> None:
        """Copy all weights to the machine's memory and free the device's, before the first pass of a step."""
        self.is_away = True
        for layer in self._layers:
            layer.leave()

    def come_home(self) -> None:
        """Bring all weights back, after the last pass of a step."""
        for layer in self._layers:
            layer.begin()
        for layer in self._layers:
            layer.use()
        self.is_away = False


class _LayerWeights:
    """Hold where one layer's weights are."""

    def __init__(self, copies: HostCopies, weights: Sequence[nn.Parameter]) -> None:
        self._copies = copies
        self._weights = weights
        self._sizes = [weight.untyped_storage().nbytes() for weight in weights]
        self._on_host: list[Copied] = []
        self._coming: list[Copied] = []
        self._is_here = True

    def leave(self) -> None:
        self._on_host = []  # the memory of the step before serves again
        self._on_host = [self._copies.to_host(weight.detach()) for weight in self._weights]
        for copied in self._on_host:
            self._copies.wait(copied)
        self.free()

    def begin(self) -> None:
        """Begin to fetch the weights, unless they are here or on their way."""
        if self._is_here or self._coming:
            return
        for weight, size, copied in zip(self._weights, self._sizes, self._on_host):
            # The memory behind the weight, of which autograd and the optimizer have views, is filled again.
            weight.untyped_storage().resize_(size)
            self._coming.append(self._copies.to_device(copied.tensor, weight.data))

    def use(self) -> None:
        """Let what is computed from here on wait for the weights."""
        for copied in self._coming:
            self._copies.wait(copied)
        self._coming = []
        self._is_here = True

    def free(self) -> None:
        if not self._is_here:
            return
        for weight in self._weights:
            self._copies.free(weight.data)
        self._is_here = False
