"""Who writes which box: pure functions of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing.mapping import TensorDescription, dtype_of
from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box

MAX_PIECE_BYTES = 64 * 1024 * 1024
"""Larger boxes are cut along dim 0: it bounds the memory of reading and writing, and evens out the writers."""


@dataclass(frozen=True)
class PlannedTensor:
    """List every box of a tensor that is written, each with the rank that writes it."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    writes: tuple[tuple[Box, int], ...]


def plan_writes(
    descriptions: Sequence[Sequence[TensorDescription]], max_piece_bytes: int = MAX_PIECE_BYTES
) -> tuple[PlannedTensor, ...]:
    """Decide which rank writes which box; every rank computes the same plan from all ranks' descriptions.

    ``descriptions[r]`` lists what rank ``r`` holds. Copies that are not owners write nothing. Of the ranks that own an
    equal box (data- and context-parallel replicas, replicated weights) the one with the fewest bytes so far writes it,
    large boxes first, so that replicas share the work.

    Raises:
        CheckpointError: ranks disagree on a shape or dtype, or the owners leave a gap in a tensor.
    """
    tensors: dict[str, TensorDescription] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, held in enumerate(descriptions):
        for description in held:
            first = tensors.setdefault(description.name, description)
            if (first.global_shape, first.dtype) != (description.global_shape, description.dtype):
                raise CheckpointError(
                    f"ranks disagree on {description.name}: {first.dtype} {list(first.global_shape)} and, on "
                    f"rank {rank}, {description.dtype} {list(description.global_shape)}"
                )
            ranks_of_box = holders.setdefault(description.name, {})
            owned = [box for box in description.boxes if description.is_owner and box.num_elements]
            for box in owned:
                for part in split_box(box, dtype_of(description.dtype).itemsize, max_piece_bytes):
                    ranks = ranks_of_box.setdefault(part, [])
                    if rank not in ranks:
                        ranks.append(rank)
    for name, description in tensors.items():
        _check_partition(description, list(holders[name]))
    writers = _assign_writers(tensors, holders, len(descriptions))
    return tuple(
        PlannedTensor(
            name,
            tensors[name].global_shape,
            tensors[name].dtype,
            tuple((box, writers[name, box]) for box in sorted(holders[name], key=lambda b: b.offset)),
        )
        for name in sorted(tensors)
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


def _check_partition(description: TensorDescription, boxes: Sequence[Box]) -> None:
    whole = Box((0,) * len(description.global_shape), description.global_shape)
    gaps = uncovered(whole, boxes)
    if gaps:
        raise CheckpointError(f"no rank holds {description.name}{describe_box(gaps[0])}; nothing was saved")
    total = sum(box.num_elements for box in boxes)
    assert total == whole.num_elements, f"boxes of {description.name} overlap without being equal"


def _assign_writers(
    tensors: Mapping[str, TensorDescription], holders: Mapping[str, Mapping[Box, list[int]]], num_ranks: int
) -> dict[tuple[str, Box], int]:
    sized = [
        (box.num_elements * dtype_of(tensors[name].dtype).itemsize, name, box)
        for name, boxes in holders.items()
        for box in boxes
    ]
    sized.sort(key=lambda item: (-item[0], item[1], item[2].offset))
    writers: dict[tuple[str, Box], int] = {}
    assigned_bytes = [0] * num_ranks
    for num_bytes, name, box in sized:
        rank = min(holders[name][box], key=lambda r: (assigned_bytes[r], r))
        assigned_bytes[rank] += num_bytes
        writers[name, box] = rank
    return writers
