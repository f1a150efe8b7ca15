"""Activation recomputation (gradient checkpointing), and saved tensors kept as inputs or sharded over ranks.

The contexts that change what autograd saves can be nested. Each passes tensors that it does not handle, and its own
replacements for tensors that it does, to the outer context. Chen et al. 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.collectives import all_gather_first_dim
from megatron.core.process_group import Group

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage, unique while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


def outer_hooks() -> tuple[Pack, Unpack]:
    """Return the pack and unpack hooks of the enclosing context."""
    hooks: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks or (_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How to recompute results, the saved inputs, and the view of a saved tensor in one of the results.

    The saved tensors of one region share a list of ``results``, which the first unpacked tensor fills.
    """

    again: Callable[[], Sequence[torch.Tensor]]
    results: list[torch.Tensor]
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@contextmanager
def saved_as_inputs(
    output: torch.Tensor, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> Iterator[None]:
    """Save ``inputs`` instead of ``output`` and its views inside this context.

    The backward pass calls ``function(*inputs)``, which must be bitwise reproducible. A non-contiguous output, or one
    that starts at an offset in its storage, is saved itself.
    """
    with several_saved_as_inputs((output,), lambda *given: (function(*given),), *inputs, shares=False):
        yield


@contextmanager
def several_saved_as_inputs(
    outputs: Sequence[torch.Tensor],
    function: Callable[..., Sequence[torch.Tensor]],
    *inputs: torch.Tensor,
    shares: bool = True,
) -> Iterator[None]:
    """Save ``inputs`` instead of the ``outputs`` and their views inside this context.

    The backward pass calls ``function(*inputs)`` for all outputs. With ``shares`` it calls it once, and keeps the
    results until the last saved tensor is freed.
    """
    outer_pack, outer_unpack = outer_hooks()
    keys = {
        storage_key(output): number
        for number, output in enumerate(outputs)
        if output.is_contiguous() and output.storage_offset() == 0
    }
    # Autograd keeps the hooks alive as long as the packed values, so they must not reference tensors.
    held, kept = list(inputs), list[tuple[Callable[[], Sequence[torch.Tensor]], list[torch.Tensor]]]()
    del outputs, inputs

    def pack(tensor: torch.Tensor) -> Any:
        number = keys.get(storage_key(tensor))
        if number is None:
            return outer_pack(tensor)
        if not kept:
            kept.append((_call_of(function, [outer_pack(each.detach()) for each in held], outer_unpack), []))
        again, results = kept[0]
        return _Recipe(again, results, number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Recipe):
            return outer_unpack(packed)
        results: Sequence[torch.Tensor] = packed.results or packed.again()
        if shares and not packed.results:
            packed.results.extend(results)
        return results[packed.number].as_strided(packed.size, packed.stride, packed.offset)

    with saved_tensors_hooks(pack, unpack):
        yield
    held.clear()
    kept.clear()


def _call_of(
    function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[Any], unpack: Unpack
) -> Callable[[], Sequence[torch.Tensor]]:
    def call() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return function(*(unpack(each) for each in inputs))

    return call


@dataclass(frozen=True)
class _Part:
    """One rank's part of a saved tensor."""

    part: Any
    size: torch.Size


@contextmanager
def saved_in_parts(tensor: torch.Tensor, tp: Group) -> Iterator[None]:
    """Save one equal part of ``tensor`` per rank inside this context; the backward pass all-gathers them.

    Every rank of the group has the same values. The number of elements must be a multiple of the group's size.
    """
    outer_pack, outer_unpack = outer_hooks()
    key = storage_key(tensor)

    def pack(saved: torch.Tensor) -> Any:
        if storage_key(saved) != key:
            return outer_pack(saved)
        return _Part(outer_pack(saved.reshape(tp.size, -1)[tp.rank].clone()), saved.size())

    def unpack(packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Part):
            return outer_unpack(packed)
        return all_gather_first_dim(outer_unpack(packed.part), tp).view(packed.size)

    with saved_tensors_hooks(pack, unpack):
        yield


Result = TypeVar("Result")


def recompute(function: Callable[..., Result], *args: Any) -> Result:
    """Return ``function(*args)`` without saving its activations; the backward pass recomputes them.

    RNG state is not saved: random numbers in ``function`` must be derived from its arguments, like keyed dropout, to be
    the same both times.
    """
    result: Result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
