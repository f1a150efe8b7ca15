"""CPU offload: the saved activations and the weights of layers stay in host memory while no pass uses them.

Rhu et al. 2016, https://arxiv.org/abs/1602.08124.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.host_memory import Copied, HostCopies
from megatron.core.tensor_parallel.recompute import outer_hooks, storage_key
from megatron.core.weight_prefetch import WeightPrefetch


class ActivationOffload:
    """Move what the first ``num_layers`` layers of a chunk save, and bring it back for their backward passes.

    ``copies`` run beside the computation. Forward, two layers' copies are under way at most: the memory of a layer is
    free when the next one has been computed. Backward, a layer's tensors are on their way while the one behind it is
    differentiated. ``num_tensors_moved`` counts memory that went out, once for all tensors that share it.
    """

    def __init__(self, copies: HostCopies, num_layers: int) -> None:
        self.copies = copies
        self.num_layers = num_layers
        self.num_tensors_moved = 0

    def begin_pass(self, kept: Iterable[torch.Tensor]) -> OffloadedPass:
        """Return what one forward pass moves; tensors of ``kept`` stay, since somebody else holds them anyway."""
        return OffloadedPass(self, frozenset(storage_key(tensor) for tensor in kept))


class OffloadedPass:
    """Follow the forward pass of one micro-batch through the layers of a chunk."""

    def __init__(self, offload: ActivationOffload, kept: frozenset[int]) -> None:
        self._offload = offload
        self._kept = kept
        # What is still on the device, by the memory that it holds there.
        self._leaving: dict[int, _Moved] = {}
        self._last: _Layer | None = None

    @contextmanager
    def layer(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Move all that autograd saves inside, but for the layer's parameters."""
        outer_pack, outer_unpack = outer_hooks()
        layer = _Layer(self._last)
        kept = self._kept.union(storage_key(parameter) for parameter in parameters)

        def pack(tensor: torch.Tensor) -> Any:
            key = storage_key(tensor)
            # Whole numbers and masks are of the micro-batch, and layers share them.
            if key in kept or tensor.numel() == 0 or not tensor.is_floating_point():
                return outer_pack(tensor)
            moved = self._leaving.get(key)
            if moved is None:
                moved = self._leaving[key] = _Moved(self._offload.copies, tensor, layer)
                self._offload.num_tensors_moved += 1
            return _Saved(moved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        def unpack(saved: Any) -> torch.Tensor:
            return saved.fetch() if isinstance(saved, _Saved) else outer_unpack(saved)

        with saved_tensors_hooks(pack, unpack):
            yield
        self.end_layer()
        self._last = layer

    def end_layer(self) -> None:
        """Free the device's memory of the layers before the one that has just been computed."""
        for key, moved in list(self._leaving.items()):
            if moved.layer is self._last:
                moved.leave_device()
                del self._leaving[key]

    def end(self, hidden: torch.Tensor) -> None:
        """Free all that is left, and fetch the last layer's tensors as soon as the gradient of ``hidden`` is there.

        ``hidden`` is what the layer behind the last one leaves, or the last one itself where none is behind it.
        """
        for moved in self._leaving.values():
            moved.leave_device()
        self._leaving.clear()
        if self._last is not None and hidden.requires_grad:
            last = weakref.ref(self._last)
            hidden.register_hook(lambda grad: _fetch(last()))  # type: ignore[no-untyped-call]


class _Layer:
    """Hold what one layer has moved, without keeping it alive, and the layer in front of it."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = before
        self.moved: list[weakref.ref[_Moved]] = []


def _fetch(layer: _Layer | None) -> None:
    """Have what a layer moved come back."""
    for reference in () if layer is None else layer.moved:
        moved = reference()
        if moved is not None:
            moved.come_back()


class _Moved:
    """Hold one piece of memory on its way out and back."""

    def __init__(self, copies: HostCopies, tensor: torch.Tensor, layer: _Layer) -> None:
        self.layer = layer
        self._copies = copies
        self._back: Copied | None = None
        # All of the memory: several tensors may look at parts of it.
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._device: torch.Tensor | None = tensor.as_strided((length,), (1,), 0)
        self._out: Copied = copies.to_host(self._device)
        layer.moved.append(weakref.ref(self))

    def leave_device(self) -> None:
        """Give the device's memory back when it has been copied."""
        self._copies.wait(self._out)
        self._device = None

    def come_back(self) -> None:
        """Begin the copy back to the device, unless it has begun."""
        if self._back is None:
            self._back = self._copies.to_device(self._out.tensor)

    def fetch(self) -> torch.Tensor:
        """Return the memory on the device, and begin the copies of the layer in front."""
        if self._device is None:
            self.come_back()
            assert self._back is not None
            self._copies.wait(self._back)
            self._device = self._back.tensor
            _fetch(self.layer.before)
        return self._device

    def __del__(self) -> None:
        """Let nobody be given the device's memory while a copy that was not asked for still fills it."""
        if self._back is not None and self._device is None:
            self._copies.wait(self._back)


@dataclass(frozen=True)
class _Saved:
    """Say how a saved tensor lies in memory that was moved."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> torch.Tensor:
        """Return the tensor."""
        return self.moved.fetch().view(self.dtype).as_strided(self.size, self.stride, self.offset)


class WeightOffload(WeightPrefetch):
    """Take the weights of ``layers`` from the device while a step's passes run, but for the layers that are in use.

    Between `leave` and `onload` a layer's weights are on the device while it or its neighbor runs. Outside they are
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

    def onload(self) -> None:
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
