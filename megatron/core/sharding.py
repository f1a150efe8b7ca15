"""Sharding as geometry: which boxes of a global tensor a local tensor holds.

One description serves initialization, gradient reduction, norm clipping, parameter counting and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Box:
    """Axis-aligned box of an N-d tensor: its offset and length along every dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index into its tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of both boxes, or None if they are disjoint."""
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
        """Return the same box with its offset relative to ``origin``."""
        return Box(tuple(o - base for o, base in zip(self.offset, origin, strict=True)), self.shape)

    def rebased(self, origin: Sequence[int], target: Sequence[int]) -> Box:
        """Return the same box translated by ``target - origin``."""
        offset = zip(self.offset, origin, target, strict=True)
        return Box(tuple(o - base + new for o, base, new in offset), self.shape)


@dataclass(frozen=True)
class Shard:
    """Box of a global tensor, and the offset of its values in the local tensor.

    The box has the same shape in both tensors. A fused weight (gate and up, query and key-value) has several shards.
    """

    global_box: Box
    local_offset: tuple[int, ...]

    @property
    def local_box(self) -> Box:
        return Box(self.local_offset, self.global_box.shape)

    def localized(self, box: Box) -> Box:
        """Return the box of the local tensor that holds the values of a box within ``global_box``."""
        return box.rebased(self.global_box.offset, self.local_offset)


@dataclass(frozen=True)
class ParamSpec:
    """Sharding of a local parameter of the global model.

    ``name`` is the parameter's global name (global layer numbers, the same at any layout) and ``global_shape`` its
    unpadded shape. ``shards`` describe the contents of the local tensor. Local elements outside every shard are padding
    and stay zero.

    ``replicated_axes`` are the model-parallel axes (tp, pp) over which equal copies exist; data and context parallelism
    always replicate. ``is_expert`` says that the parameter is sharded over the expert grid instead, and replicated over
    its data-parallel ranks. ``replica_index`` of ``num_replicas`` numbers equal copies: those on all tensor-parallel
    ranks (a norm) or on neighboring ranks (a key-value group), or those of the first and the last pipeline stage (see
    `tie_over_pipeline`). ``is_owner`` is the one copy that counts in norms, parameter counts and checkpoints.
    ``gradient_sum_axes`` are the axes over which the local gradients are partial and must be summed; otherwise the
    gradients of copies are equal already.

    ``fused_rows`` gives, if rows of several matrices are interleaved, the number of consecutive rows of each, repeated
    over the whole weight: the query, key and value rows of each group, or all rows of gate and up.
    ``width_multiplier`` is the ratio of the width of a matrix to its width in the base model (muP). Initial values are
    normal with ``init_mean`` and ``init_std``, or uniform within ``init_bound`` of the mean if it is not 0.
    ``init_transform`` names a function of `initialization.TRANSFORMS` that is applied to them.
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
    init_transform: str = ""
    fused_rows: tuple[int, ...] = ()
    is_expert: bool = False
    width_multiplier: float = 1.0

    @property
    def is_owner(self) -> bool:
        return self.replica_index == 0

    @property
    def is_tied_over_pipeline(self) -> bool:
        """Return whether the first and the last pipeline stage each hold a copy, whose gradients must be summed."""
        return "pp" in self.gradient_sum_axes

    def within(self, box: Box) -> ParamSpec:
        """Return the description of a box of the local tensor; the box may contain only padding."""
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
    """Attach a description to a parameter."""
    parameter.spec = spec  # type: ignore[attr-defined]


def spec_of(parameter: torch.Tensor) -> ParamSpec:
    """Return the description of a parameter.

    Raises:
        AttributeError: the parameter has no description.
    """
    return cast(ParamSpec, parameter.spec)  # type: ignore[attr-defined]


def attach_held(parameter: torch.nn.Parameter, held: Sequence[tuple[ParamSpec, torch.Tensor]]) -> None:
    """Record the boxes of a sharded parameter that this rank holds, with their values."""
    parameter.held = tuple(held)  # type: ignore[attr-defined]


def held_of(parameter: torch.Tensor) -> tuple[tuple[ParamSpec, torch.Tensor], ...]:
    """Return this rank's part of a parameter between passes, with descriptions: the whole tensor, or boxes of it.

    With weights sharded over the data-parallel ranks (FSDP) the parameter's own memory has values only during a pass. A
    quantized parameter is held as codes and scales.
    """
    quantized = quantized_of(parameter)
    if quantized is not None:
        return quantized.held()
    held: tuple[tuple[ParamSpec, torch.Tensor], ...] | None = parameter.__dict__.get("held")
    return ((spec_of(parameter), parameter),) if held is None else held


class QuantizedStorage(Protocol):
    """Values of a frozen parameter in fewer bits; the parameter has memory only between `open` and `close`."""

    def held(self) -> tuple[tuple[ParamSpec, torch.Tensor], ...]:
        """Return the stored tensors with their descriptions, or the parameter itself between `open` and `close`."""

    def dense(self) -> torch.Tensor:
        """Return the dequantized values, in the parameter's shape and dtype, in new memory."""

    def open(self) -> None:
        """Allocate the parameter's memory, uninitialized, for values to be quantized."""

    def close(self) -> None:
        """Quantize the parameter's values and free its memory."""


def quantized_of(parameter: torch.Tensor) -> QuantizedStorage | None:
    """Return the quantized values of a parameter, or None if it is not quantized."""
    return cast("QuantizedStorage | None", parameter.__dict__.get("quantized"))


def is_held_in_parts(parameter: torch.Tensor) -> bool:
    """Return whether this rank holds boxes of a parameter that no other data-parallel rank holds (FSDP)."""
    return "held" in parameter.__dict__


def tie_over_pipeline(spec: ParamSpec, *, name: str, is_first_stage: bool) -> ParamSpec:
    """Describe a weight that both ends of the pipeline hold, as the word embedding and as the output layer.

    Both copies have the global name ``name``, start from the same values and receive the sum of both gradients. The
    first stage's copy is the one that is counted and saved.
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
    """Split a box along dim 0 into parts of at most ``max_bytes``, or into single rows if a row is larger."""
    if not box.shape or box.num_elements * itemsize <= max_bytes:
        return [box]
    row_bytes = box.num_elements // box.shape[0] * itemsize
    rows = max(1, max_bytes // row_bytes)
    return [
        Box((box.offset[0] + start, *box.offset[1:]), (min(rows, box.shape[0] - start), *box.shape[1:]))
        for start in range(0, box.shape[0], rows)
    ]


def subtract(box: Box, other: Box) -> list[Box]:
    """Return disjoint boxes that make up ``box`` without ``other``, at most two per dim."""
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
    """Return the parts of ``box`` that no box of ``covers`` contains."""
    rest = [box] if box.num_elements else []
    for cover in covers:
        rest = [part for remaining in rest for part in subtract(remaining, cover)]
    return rest


def describe_box(box: Box) -> str:
    """Format a box as a Python slice."""
    return f"[{','.join(f'{part.start}:{part.stop}' for part in box.slices)}]"


def flat_range_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return the boxes that make up elements ``[start, end)`` of a row-major tensor, in the order of the elements.

    Each box is contiguous in memory, so that consecutive parts of the range are the boxes' values. There are at most
    ``2 * len(shape) - 1`` boxes: the rest of a first row, whole rows, and the start of a last row, dim by dim.
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
    """Return the shards of an unsharded tensor."""
    shape = tuple(shape)
    return (Shard(Box((0,) * len(shape), shape), (0,) * len(shape)),)


def even_shards(
    global_shape: Sequence[int], dim: int, index: int, count: int, padded_length: int | None = None
) -> tuple[Shard, ...]:
    """Return shard ``index`` of ``count`` of a tensor split evenly along ``dim``.

    With ``padded_length`` the dim is first padded to that length (a vocabulary): the last shards then have fewer real
    elements than their size, or none.
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


def stacked_shards(
    global_shape: Sequence[int], dim: int, index: int, count: int, parts: int | Sequence[int]
) -> tuple[Shard, ...]:
    """Return shard ``index`` of ``count`` of tensors stacked along ``dim`` and each split evenly.

    ``parts`` are the lengths of the tensors, or the number of equally long ones. A gated unit's ``[gate; up]`` has two
    parts: the local tensor is ``[gate_r; up_r]``.
    """
    global_shape = tuple(global_shape)
    lengths = [global_shape[dim] // parts] * parts if isinstance(parts, int) else parts
    shards, start, local_start = [], 0, 0
    for length in lengths:
        offset = [0] * len(global_shape)
        local_offset = [0] * len(global_shape)
        shape = list(global_shape)
        shape[dim] = length // count
        offset[dim] = start + index * shape[dim]
        local_offset[dim] = local_start
        shards.append(Shard(Box(tuple(offset), tuple(shape)), tuple(local_offset)))
        start, local_start = start + length, local_start + shape[dim]
    return tuple(shards)
