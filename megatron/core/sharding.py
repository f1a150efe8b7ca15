"""Sharding as geometry: which boxes of a global tensor a local tensor holds.

One description serves initialization, gradient reduction, norm clipping, parameter counting and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Box:
    """Hold an axis-aligned box of an N-d tensor: where it starts and how far it reaches along every dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index into the tensor that it lies in."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the box common to both, or None where they do not meet."""
        offset, shape = [], []
        for start, length, other_start, other_length in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True
        ):
            low = max(start, other_start)
            high = min(start + length, other_start + other_length)
            if high <= low:
                return None
            offset.append(low)
            shape.append(high - low)
        return Box(tuple(offset), tuple(shape))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same box with its offset counted from ``origin``."""
        return Box(tuple(o - base for o, base in zip(self.offset, origin, strict=True)), self.shape)

    def rebased(self, origin: Sequence[int], target: Sequence[int]) -> Box:
        """Return the same box moved as ``origin`` is moved to ``target``."""
        offset = zip(self.offset, origin, target, strict=True)
        return Box(tuple(o - base + new for o, base, new in offset), self.shape)


@dataclass(frozen=True)
class Shard:
    """Pair a box of the global tensor with the place in the local tensor where its values lie.

    Both boxes have one shape; a fused weight (gate and up, query and key-value) is several shards.
    """

    global_box: Box
    local_offset: tuple[int, ...]

    @property
    def local_box(self) -> Box:
        return Box(self.local_offset, self.global_box.shape)

    def localized(self, box: Box) -> Box:
        """Return the box of the local tensor where the values of a box within ``global_box`` lie."""
        return box.rebased(self.global_box.offset, self.local_offset)


@dataclass(frozen=True)
class ParamSpec:
    """Describe how one local parameter sits in the global model.

    ``name`` is the parameter's global name (global layer numbers, the same at any layout) and ``global_shape`` its
    unpadded shape. ``shards`` say what the local tensor holds; local elements outside every shard are padding, stay
    zero and belong to nobody. ``replicated_axes`` are the model-parallel axes (tp, pp) over which equal copies exist;
    data and context parallelism always replicate. ``is_expert`` says that the parameter is spread over the experts' own
    factorization of the ranks instead, and replicated over their data-parallel ranks. ``replica_index`` of
    ``num_replicas`` says which of several equal copies within the tensor-parallel group this one is: all ranks hold one
    (a norm), or neighboring ranks share one (a key-value group); or which of the two that the first and the last
    pipeline stage hold (see `tie_over_pipeline`).
    ``gradient_sum_axes`` are the axes over which the local gradient is only a part and must still be summed over those
    copies; without it the copies' gradients are equal already.
    ``fused_rows`` says, where rows of several matrices are stacked, how many of each follow one another, over and over:
    the query, key and value rows of each group, or all rows of gate and up.
    ``width_multiplier`` says how many times wider than its base model's a matrix is that scales with the width (muP).
    ``is_owner`` is the one copy that counts in norms, parameter counts and checkpoints. Initial values are normal with
    ``init_mean`` and ``init_std``, or uniform from ``-init_bound`` to ``init_bound`` where that is not 0.
    """

    name: str
    global_shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    replicated_axes: tuple[str, ...] = ()
    gradient_sum_axes: tuple[str, ...] = ()
    replica_index: int = 0
    num_replicas: int = 1
    init_mean: float = 0.0
    init_std: float = 0.0
    init_bound: float = 0.0
    fused_rows: tuple[int, ...] = ()
    is_expert: bool = False
    width_multiplier: float = 1.0

    @property
    def is_owner(self) -> bool:
        return self.replica_index == 0

    @property
    def is_tied_over_pipeline(self) -> bool:
        """Return whether the first and the last pipeline stage hold a copy each, whose gradients must be summed."""
        return "pp" in self.gradient_sum_axes

    def within(self, box: Box) -> ParamSpec:
        """Return the description of what a box of the local tensor holds; it may hold nothing but padding."""
        shards = []
        for shard in self.shards:
            common = shard.local_box.intersect(box)
            if common is not None:
                global_box = common.rebased(shard.local_offset, shard.global_box.offset)
                shards.append(Shard(global_box, common.relative_to(box.offset).offset))
        return replace(self, shards=tuple(shards))

    def with_prefix(self, prefix: str) -> ParamSpec:
        """Return the same description with ``prefix`` before the name."""
        return replace(self, name=prefix + self.name)


def attach_spec(parameter: torch.nn.Parameter, spec: ParamSpec) -> None:
    """Give a parameter its description."""
    parameter.spec = spec  # type: ignore[attr-defined]


def spec_of(parameter: torch.Tensor) -> ParamSpec:
    """Return the description that a parameter carries.

    Raises:
        AttributeError: the parameter was made without one.
    """
    return cast(ParamSpec, parameter.spec)  # type: ignore[attr-defined]


def attach_held(parameter: torch.nn.Parameter, held: Sequence[tuple[ParamSpec, torch.Tensor]]) -> None:
    """Say which boxes of a sharded parameter this rank holds, with their values."""
    parameter.held = tuple(held)  # type: ignore[attr-defined]


def held_of(parameter: torch.Tensor) -> tuple[tuple[ParamSpec, torch.Tensor], ...]:
    """Return what this rank holds of a parameter between two passes, with descriptions: all, or boxes of it.

    Where weights are sharded over the data-parallel ranks the parameter's own memory has values in a pass only.
    """
    held: tuple[tuple[ParamSpec, torch.Tensor], ...] | None = parameter.__dict__.get("held")
    return ((spec_of(parameter), parameter),) if held is None else held


def is_held_in_parts(parameter: torch.Tensor) -> bool:
    """Return whether this rank holds boxes of a parameter that no other data-parallel rank holds."""
    return "held" in parameter.__dict__


def tie_over_pipeline(spec: ParamSpec, *, name: str, is_first_stage: bool) -> ParamSpec:
    """Describe a weight that both ends of the pipeline hold, as the word embedding and as the output layer.

    Both copies carry the global name ``name``, start from the same values and get the sum of both gradients; the first
    stage's is the one that is counted and saved.
    """
    return replace(
        spec,
        name=name,
        replicated_axes=("pp",),
        gradient_sum_axes=("pp",),
        replica_index=0 if is_first_stage else 1,
        num_replicas=2,
    )


def split_box(box: Box, itemsize: int, max_bytes: int) -> list[Box]:
    """Cut a box along dim 0 into parts of at most ``max_bytes``, or of single rows where a row is larger."""
    if not box.shape or box.num_elements * itemsize <= max_bytes:
        return [box]
    row_bytes = box.num_elements // box.shape[0] * itemsize
    rows = max(1, max_bytes // row_bytes)
    return [
        Box((box.offset[0] + start, *box.offset[1:]), (min(rows, box.shape[0] - start), *box.shape[1:]))
        for start in range(0, box.shape[0], rows)
    ]


def subtract(box: Box, other: Box) -> list[Box]:
    """Return disjoint boxes that make up ``box`` without ``other``, at most two a dim."""
    common = box.intersect(other)
    if common is None:
        return [box]
    parts = []
    offset, shape = list(box.offset), list(box.shape)
    for dim, (start, length) in enumerate(zip(common.offset, common.shape, strict=True)):
        before = start - offset[dim]
        after = offset[dim] + shape[dim] - (start + length)
        for part_start, part_length in ((offset[dim], before), (start + length, after)):
            if part_length > 0:
                parts.append(
                    Box(
                        (*offset[:dim], part_start, *offset[dim + 1 :]),
                        (*shape[:dim], part_length, *shape[dim + 1 :]),
                    )
                )
        offset[dim], shape[dim] = start, length
    return parts


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """Return what no box of ``covers`` holds of ``box``."""
    rest = [box] if box.num_elements else []
    for cover in covers:
        rest = [part for remaining in rest for part in subtract(remaining, cover)]
    return rest


def describe_box(box: Box) -> str:
    """Return a box as Python would slice it."""
    return f"[{','.join(f'{part.start}:{part.stop}' for part in box.slices)}]"


def flat_range_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes that make up elements ``[start, end)`` of a row-major tensor, in the order of the elements.

    Each box is contiguous in memory, so that consecutive stretches of the range are the boxes' values. There are at
    most ``2 * len(shape) - 1``: what is left of a first row, whole rows, and the beginning of a last one, dim by dim.
    """
    shape = tuple(shape)
    if start >= end:
        return []
    if len(shape) <= 1:
        return [Box((start,) if shape else (), (end - start,) if shape else ())]
    row_length = math.prod(shape[1:])
    first, into_first = divmod(start, row_length)
    last, into_last = divmod(end, row_length)

    def in_row(row: int, low: int, high: int) -> list[Box]:
        return [Box((row, *b.offset), (1, *b.shape)) for b in flat_range_boxes(shape[1:], low, high)]

    if first == last:
        return in_row(first, into_first, into_last)
    boxes = []
    if into_first:
        boxes += in_row(first, into_first, row_length)
        first += 1
    if last > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if into_last:
        boxes += in_row(last, 0, into_last)
    return boxes


def full_shards(shape: Sequence[int]) -> tuple[Shard, ...]:
    """Return the shards of a tensor that is held whole."""
    shape = tuple(shape)
    return (Shard(Box((0,) * len(shape), shape), (0,) * len(shape)),)


def even_shards(
    global_shape: Sequence[int], dim: int, index: int, count: int, padded_length: int | None = None
) -> tuple[Shard, ...]:
    """Return shard ``index`` of ``count`` when ``dim`` is cut evenly.

    With ``padded_length`` the dim is first padded to it (a vocabulary): the last shards then hold fewer real elements
    than they have room for, or none.
    """
    global_shape = tuple(global_shape)
    per_shard = (global_shape[dim] if padded_length is None else padded_length) // count
    start = index * per_shard
    length = min(per_shard, global_shape[dim] - start)
    if length <= 0:
        return ()
    offset = tuple(start if d == dim else 0 for d in range(len(global_shape)))
    shape = tuple(length if d == dim else size for d, size in enumerate(global_shape))
    return (Shard(Box(offset, shape), (0,) * len(global_shape)),)


def stacked_shards(global_shape: Sequence[int], dim: int, index: int, count: int, parts: int) -> tuple[Shard, ...]:
    """Return what shard ``index`` of ``count`` holds when ``dim`` stacks ``parts`` equal tensors, each cut evenly.

    A gated unit's ``[gate; up]`` is two parts: the local tensor holds ``[gate_r; up_r]``.
    """
    global_shape = tuple(global_shape)
    part_length = global_shape[dim] // parts
    shard_length = part_length // count
    shards = []
    for part in range(parts):
        offset = [0] * len(global_shape)
        local_offset = [0] * len(global_shape)
        shape = list(global_shape)
        offset[dim] = part * part_length + index * shard_length
        local_offset[dim] = part * shard_length
        shape[dim] = shard_length
        shards.append(Shard(Box(tuple(offset), tuple(shape)), tuple(local_offset)))
    return tuple(shards)
