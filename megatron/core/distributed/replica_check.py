"""Replica check: data-parallel replicas must hold the same weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.core.collectives import all_reduce
from megatron.core.errors import TrainingError
from megatron.core.process_group import Group
from megatron.core.sharding import spec_of

_CHUNK_ELEMENTS = 1 << 22
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit multipliers of a multiplicative hash, as signed numbers.
_MIX_A = -7046029254386353131
_MIX_B = -4658895280553007687


def bit_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of a tensor's bits and their places, computed on its device.

    Shapes: ``[...] -> [] int64``.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER_OF_SIZE[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK_ELEMENTS):
        chunk = bits[start : start + _CHUNK_ELEMENTS].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=tensor.device)
        mixed = (chunk ^ (place * _MIX_A)) * _MIX_B
        total += (mixed ^ (mixed >> 29)).mul_(_MIX_A).sum()
    return total


def check_replicas_equal(parameters: Iterable[torch.Tensor], group: Group) -> None:
    """Compare every parameter's bits over the data-parallel group; all its ranks must call.

    Raises:
        TrainingError: replicas differ; the message names the parameters.
    """
    parameters = list(parameters)
    if group.size == 1 or not parameters:
        return
    hashes = torch.stack([bit_hash(parameter) for parameter in parameters])
    # The largest hash and the largest complement: they agree with each other only where all ranks agree.
    extremes = torch.cat((hashes, ~hashes))
    all_reduce(extremes, group, op="max")
    largest, smallest = extremes[: len(parameters)], ~extremes[len(parameters) :]
    differing = [spec_of(p).name for p, equal in zip(parameters, (largest == smallest).tolist()) if not equal]
    if differing:
        shown = ", ".join(differing[:8]) + (f" and {len(differing) - 8} more" if len(differing) > 8 else "")
        raise TrainingError(
            f"{len(differing)} of {len(parameters)} parameters differ between the data-parallel ranks "
            f"{list(group.ranks)}: {shown}"
        )
