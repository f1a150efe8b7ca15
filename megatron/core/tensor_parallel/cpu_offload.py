"""CPU offload: saved activations and weights of layers stay in host memory while no pass uses them.

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
    """Offload the saved activations of a chunk's first ``num_layers`` layers, and prefetch them backward.

    ``copies`` run asynchronously. In the forward pass at most two layers' copies are in flight: a layer's device memory
    is freed after the next layer has been computed. In the backward pass a layer's tensors are copied back during the
    backward pass of the layer after it. ``num_tensors_moved`` counts offloaded storages, each once for all tensors that
    share it.
    """

    def __init__(self, copies: HostCopies, num_layers: int) -> None:
        self.copies = copies
        self.num_layers = num_layers
        self.num_tensors_moved = 0

    def begin_pass(self, kept: Iterable[torch.Tensor]) -> OffloadedPass:
        """Start one forward pass; tensors that share memory with ``kept`` stay on the device."""
        return OffloadedPass(self, frozenset(storage_key(tensor) for tensor in kept))


class OffloadedPass:
    """Offload of one micro-batch's forward pass through the layers of a chunk."""

    def __init__(self, offload: ActivationOffload, kept: frozenset[int]) -> None:
        self._offload = offload
        self._kept = kept
        # Storages that are still on the device, by storage key.
        self._leaving: dict[int, _Moved] = {}
        self._last: _Layer | None = None

    @contextmanager
    def layer(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Offload everything that autograd saves inside this context, except the layer's parameters."""
        outer_pack, outer_unpack = outer_hooks()
        layer = _Layer(self._last)
        kept = self._kept.union(storage_key(parameter) for parameter in parameters)

        def pack(tensor: torch.Tensor) -> Any:
            key = storage_key(tensor)
            # Integer and mask tensors belong to the micro-batch, and all layers share them.
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
        """Free the device memory of the layers before the last computed one."""
        for key, moved in list(self._leaving.items()):
            if moved.layer is self._last:
                moved.leave_device()
                del self._leaving[key]

    def end(self, hidden: torch.Tensor) -> None:
        """Free the remaining memory, and prefetch the last offloaded layer's tensors once ``hidden`` has its gradient.

        ``hidden`` is the output of the layer after the last offloaded layer, or of the last offloaded layer if no layer
        follows.
        """
        for moved in self._leaving.values():
            moved.leave_device()
        self._leaving.clear()
        if self._last is not None and hidden.requires_grad:
            last = weakref.ref(self._last)
            hidden.register_hook(lambda grad: _fetch(last()))  # type: ignore[no-untyped-call]


class _Layer:
    """Offloaded storages of one layer, by weak reference, and the layer before it."""

    def __init__(self, before: _Layer | None) -> None:
        self.before = before
        self.moved: list[weakref.ref[_Moved]] = []


def _fetch(layer: _Layer | None) -> None:
    """Start the copies of a layer's offloaded storages back to the device."""
    for reference in () if layer is None else layer.moved:
        moved = reference()
        if moved is not None:
            moved.come_back()


class _Moved:
    """A storage that is copied to the host and back."""

    def __init__(self, copies: HostCopies, tensor: torch.Tensor, layer: _Layer) -> None:
        self.layer = layer
        self._copies = copies
        self._back: Copied | None = None
        # Copy the whole storage, because several tensors may be views of it.
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._device: torch.Tensor | None = tensor.as_strided((length,), (1,), 0)
        self._out: Copied = copies.to_host(self._device)
        layer.moved.append(weakref.ref(self))

    def leave_device(self) -> None:
        """Free the device memory after the copy to the host."""
        self._copies.wait(self._out)
        self._device = None

    def come_back(self) -> None:
        """Start the copy back to the device, unless it has started."""
        if self._back is None:
            self._back = self._copies.to_device(self._out.tensor)

    def fetch(self) -> torch.Tensor:
        """Return the storage on the device, and start the copies of the previous layer."""
        if self._device is None:
            self.come_back()
            assert self._back is not None
            self._copies.wait(self._back)
            self._device = self._back.tensor
            _fetch(self.layer.before)
        return self._device

    def __del__(self) -> None:
        """Wait for an unused copy, so that the device memory is not reused while the copy writes to it."""
        if self._back is not None and self._device is None:
            self._copies.wait(self._back)


@dataclass(frozen=True)
class _Saved:
    """View of a saved tensor in an offloaded storage."""

    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def fetch(self) -> torch.Tensor:
        return self.moved.fetch().view(self.dtype).as_strided(self.size, self.stride, self.offset)


class WeightOffload(WeightPrefetch):
    """Offload the weights of ``layers`` during the passes of a step, except for the layers in use.

    Between `leave` and `onload` a layer's weights are on the device only while the layer or its neighbor runs. At all
    other times they are on the device, for the optimizer, checkpoints and evaluation. No two weights share a storage.
    """

    def __init__(self, copies: HostCopies, layers: Sequence[nn.Module]) -> None:
        self._layers = [_LayerWeights(copies, list(layer.parameters())) for layer in layers]
        super().__init__(layers, self._layers)

    def leave(self) -> None:
        """Copy all weights to host memory and free their device memory, before the first pass of a step."""
        self.is_away = True
        for layer in self._layers:
            layer.leave()

    def onload(self) -> None:
        """Copy all weights back, after the last pass of a step."""
        for layer in self._layers:
            layer.begin()
        for layer in self._layers:
            layer.use()
        self.is_away = False


class _LayerWeights:
    """Location of one layer's weights: on the device, on the host, or in flight."""

    def __init__(self, copies: HostCopies, weights: Sequence[nn.Parameter]) -> None:
        self._copies = copies
        self._weights = weights
        self._sizes = [weight.untyped_storage().nbytes() for weight in weights]
        self._on_host: list[Copied] = []
        self._coming: list[Copied] = []
        self._is_here = True

    def leave(self) -> None:
        self._on_host = []  # reuse the memory of the previous step
        self._on_host = [self._copies.to_host(weight.detach()) for weight in self._weights]
        for copied in self._on_host:
            self._copies.wait(copied)
        self.free()

    def begin(self) -> None:
        """Start to fetch the weights, unless they are present or in flight."""
        if self._is_here or self._coming:
            return
        for weight, size, copied in zip(self._weights, self._sizes, self._on_host):
            # Refill the weight's own storage, because autograd and the optimizer have views of it.
            weight.untyped_storage().resize_(size)
            self._coming.append(self._copies.to_device(copied.tensor, weight.data))

    def use(self) -> None:
        """Make all computation launched from here on wait for the weights."""
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
