"""Replica check: data-parallel replicas must hold the same weights, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_objects
from megatron.core.errors import TrainingError
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import ParamSpec, held_of, is_held_in_parts, spec_of

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


def check_replicas_equal(parameters: Iterable[torch.nn.Parameter], state: ParallelState) -> None:
    """Compare every parameter's bits over the ranks that hold copies; all of these must call.

    Raises:
        TrainingError: replicas differ; the message names the parameters, and the ranks that differ from most others.
    """
    difference = _compare(list(parameters), state)
    if difference:
        raise TrainingError(difference)


def differing_replicas(parameters: Iterable[torch.nn.Parameter], state: ParallelState) -> str:
    """Return what `check_replicas_equal` finds in the data-parallel groups of all ranks; empty where all are equal."""
    found = _compare(list(parameters), state)
    return "; ".join(dict.fromkeys(text for text in all_gather_objects(found, state.world) if text))


def _compare(parameters: Sequence[torch.nn.Parameter], state: ParallelState) -> str:
    """Compare what has copies: of sharded weights the shards, where hybrid sharding has others of them."""
    whole = [(spec_of(each), each) for each in parameters if not is_held_in_parts(each)]
    shards = [held for each in parameters if is_held_in_parts(each) for held in held_of(each)]
    found = (
        compare_over_replicas(whole, state),
        compare_over_replicas(shards, state, "shards of parameters", _copies_of_shards),
    )
    return "; ".join(text for text in found if text)


def _copies_of_shards(state: ParallelState, spec: ParamSpec) -> Group:
    """Return the ranks that hold the same shards of a parameter: without copies this rank alone."""
    levels = state.replicas_of(spec).levels
    return single_rank_group(()) if levels is None else levels[1]


def compare_over_replicas(
    tensors: Sequence[tuple[ParamSpec, torch.Tensor]],
    state: ParallelState,
    what: str = "parameters",
    copies: Callable[[ParallelState, ParamSpec], Group] = ParallelState.replicas_of,
) -> str:
    """Compare described tensors over the ranks that hold copies, experts over theirs, as `compare_replicas` does."""
    kinds = {spec.is_expert: copies(state, spec) for spec, _ in tensors}
    found = (
        compare_replicas([(spec.name, each) for spec, each in tensors if spec.is_expert == is_expert], group, what)
        for is_expert, group in sorted(kinds.items(), key=lambda kind: kind[0])
    )
    return "; ".join(text for text in found if text)


def compare_replicas(tensors: Sequence[tuple[str, torch.Tensor]], group: Group, what: str = "parameters") -> str:
    """Compare the bits of named tensors over a group whose ranks hold copies; all of them must call.

    Returns in words what differs, and who: the ranks that are not among the most that agree. Two cannot be told apart.
    Empty where all are equal.
    """
    if group.size == 1 or not tensors:
        return ""
    hashes = torch.stack([bit_hash(tensor) for _, tensor in tensors])
    gathered = all_gather_first_dim(hashes, group).view(group.size, len(tensors)).tolist()
    differing, outsiders = [], set[int]()
    are_told_apart = True
    for (name, _), values in zip(tensors, zip(*gathered, strict=True), strict=True):
        counts = Counter(values).most_common()
        if len(counts) == 1:
            continue
        differing.append(name)
        are_told_apart &= counts[0][1] > counts[1][1]
        outsiders |= {rank for rank, value in zip(group.ranks, values, strict=True) if value != counts[0][0]}
    if not differing:
        return ""
    shown = ", ".join(differing[:8]) + (f" and {len(differing) - 8} more" if len(differing) > 8 else "")
    if are_told_apart:
        named = ", ".join(map(str, sorted(outsiders)))
        blamed = f"rank {named} differs from the others" if len(outsiders) == 1 else f"ranks {named} differ from most"
    else:
        blamed = "no majority tells which of them is wrong"
    return (
        f"{len(differing)} of {len(tensors)} {what} differ between the data-parallel ranks "
        f"{list(group.ranks)}: {shown}; {blamed}"
    )
