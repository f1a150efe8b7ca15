"""Weight checks: non-finite or far too large values, and replicas that differ in any bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_objects
from megatron.core.errors import TrainingError
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import ParamSpec, held_of, is_held_in_parts

OUTLIER_RATIO = 1.0e3
"""Ratio of an element to the others above which it is suspicious, given other evidence."""
ABSURD_RATIO = 1.0e6
"""Ratio of an element to the others above which it is certainly wrong, as after a bit flip in the exponent."""

HUGE_WEIGHT = 1.0e3
"""Root mean square of a parameter above which training has diverged."""


class BadWeightsError(TrainingError):
    """Non-finite weights; only an earlier checkpoint has valid ones."""


@dataclass(frozen=True)
class BadWeight:
    """Finding about one parameter; ``first`` is the index of the first bad element in the global tensor.

    ``num_elements`` is the number of elements on the rank.
    """

    name: str
    num_bad: int
    num_elements: int
    first: tuple[int, ...]
    value: float
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Format the finding for a message."""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return (
            f"{self.name} on {ranks}: {self.num_bad} of {self.num_elements} elements, the first at "
            f"{list(self.first)} is {self.value:g}"
        )


def find_bad_weights(parameters: Iterable[torch.Tensor]) -> list[BadWeight]:
    """Return this rank's parameters with non-finite values; waits for the device."""
    held = [each for parameter in parameters for each in held_of(parameter)]
    bad = {id(values) for values in not_finite([values for _, values in held])}
    return [_describe(spec, each.detach(), ~each.detach().isfinite()) for spec, each in held if id(each) in bad]


def not_finite(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the floating-point tensors with non-finite values; waits for the device once."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return []
    # The extremes are finite if all values are: a maximum is NaN if any value is NaN.
    extremes = torch.stack([torch.stack(tensor.detach().aminmax()).float().to("cpu") for tensor in floating])
    return [tensor for tensor, are_finite in zip(floating, extremes.isfinite().all(dim=1).tolist()) if not are_finite]


def find_outlying_weights(parameters: Iterable[torch.Tensor], ratio: float = OUTLIER_RATIO) -> list[BadWeight]:
    """Return this rank's parameters with an element that is ``ratio`` times the root mean square of the others.

    Such an element is finite, but does not result from training: a bit has flipped, or it was written by mistake.
    """
    found = []
    for spec, held in (each for parameter in parameters for each in held_of(parameter)):
        values = held.detach().abs().double()
        largest = values.max()
        others = (values.square().sum() - largest.square()).clamp(min=0.0)
        # Avoid cancellation in the difference: sum again without the largest value.
        if bool(others <= 1.0e-9 * largest.square()):
            others = torch.where(values == largest, 0.0, values).square().sum()
        mean = (others / max(values.numel() - 1, 1)).sqrt().clamp(min=1.0e-3)
        if values.numel() > 1 and bool(largest > ratio * mean):
            found.append(_describe(spec, held.detach(), values > ratio * mean))
    return found


def find_huge_weights(parameters: Iterable[torch.Tensor]) -> list[BadWeight]:
    """Return this rank's parameters whose root mean square exceeds `HUGE_WEIGHT`, as after divergence."""
    found = []
    for spec, held in (each for parameter in parameters for each in held_of(parameter)):
        values = held.detach()
        if values.numel() and bool(values.double().square().mean().sqrt() > HUGE_WEIGHT):
            found.append(_describe(spec, values, values.abs() > HUGE_WEIGHT))
    return found


def gather_bad_weights(local: Sequence[BadWeight], world: Group) -> list[BadWeight]:
    """Collect the findings of all ranks, one per parameter with its ranks; collective."""
    found: dict[tuple[str, tuple[int, ...]], BadWeight] = {}
    for rank, reported in zip(world.ranks, all_gather_objects(list(local), world)):
        for weight in reported:
            known = found.setdefault((weight.name, weight.first), weight)
            found[weight.name, weight.first] = dataclasses.replace(known, ranks=(*known.ranks, rank))
    return list(found.values())


def describe_bad_weights(found: Sequence[BadWeight]) -> str:
    """Format the findings on one line, the first four in full."""
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return "; ".join(map(str, found[:4])) + more


def _describe(spec: ParamSpec, values: torch.Tensor, bad: torch.Tensor) -> BadWeight:
    local = tuple(int(index) for index in bad.nonzero()[0].tolist())
    return BadWeight(spec.name, int(bad.sum()), values.numel(), _global_place(spec, local), float(values[local]))


def _global_place(spec: ParamSpec, local: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index in the global tensor of an element of the local tensor; its local index if it is padding."""
    for shard in spec.shards:
        box = shard.local_box
        if all(start <= at < start + length for at, start, length in zip(local, box.offset, box.shape)):
            return tuple(at - start + base for at, start, base in zip(local, box.offset, shard.global_box.offset))
    return local


_CHUNK_ELEMENTS = 1 << 22
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit multipliers of a multiplicative hash, as signed numbers.
_MIX_A = -7046029254386353131
_MIX_B = -4658895280553007687


def bit_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of a tensor's bits and their positions, computed on its device.

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
    """Compare every parameter's bits over the ranks that hold copies; collective over these ranks.

    Raises:
        TrainingError: replicas differ; the message names the parameters, and the ranks that differ from the majority.
    """
    difference = _compare(list(parameters), state)
    if difference:
        raise TrainingError(difference)


def differing_replicas(parameters: Iterable[torch.nn.Parameter], state: ParallelState) -> str:
    """Return what `check_replicas_equal` finds in the data-parallel groups of all ranks; empty if all are equal."""
    found = _compare(list(parameters), state)
    return "; ".join(dict.fromkeys(text for text in all_gather_objects(found, state.world) if text))


def _compare(parameters: Sequence[torch.nn.Parameter], state: ParallelState) -> str:
    """Compare replicated parameters, and shards of sharded parameters that hybrid sharding replicates."""
    whole = [held for each in parameters if not is_held_in_parts(each) for held in held_of(each)]
    shards = [held for each in parameters if is_held_in_parts(each) for held in held_of(each)]
    found = (
        compare_over_replicas(whole, state),
        compare_over_replicas(shards, state, "shards of parameters", _copies_of_shards),
    )
    return "; ".join(text for text in found if text)


def _copies_of_shards(state: ParallelState, spec: ParamSpec) -> Group:
    """Return the ranks that hold the same shards of a parameter; without copies, this rank alone."""
    levels = state.replicas_of(spec).levels
    return single_rank_group(()) if levels is None else levels[1]


def compare_over_replicas(
    tensors: Sequence[tuple[ParamSpec, torch.Tensor]],
    state: ParallelState,
    what: str = "parameters",
    copies: Callable[[ParallelState, ParamSpec], Group] = ParallelState.replicas_of,
) -> str:
    """Compare described tensors over the ranks that hold copies (see `compare_replicas`); experts over their own."""
    kinds = {spec.is_expert: copies(state, spec) for spec, _ in tensors}
    found = (
        compare_replicas([(spec.name, each) for spec, each in tensors if spec.is_expert == is_expert], group, what)
        for is_expert, group in sorted(kinds.items(), key=lambda kind: kind[0])
    )
    return "; ".join(text for text in found if text)


def compare_replicas(tensors: Sequence[tuple[str, torch.Tensor]], group: Group, what: str = "parameters") -> str:
    """Compare the bits of named tensors over a group of replicas; collective.

    Returns a message with the differing tensors and the ranks outside the majority, if there is a majority. The message
    is empty if all are equal.
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
        blamed = "there is no majority that identifies the wrong rank"
    return (
        f"{len(differing)} of {len(tensors)} {what} differ between the data-parallel ranks "
        f"{list(group.ranks)}: {shown}; {blamed}"
    )
