"""Initial values of which each rank draws a part, and receives the other ranks' parts by all-gathers.

The ranks that hold the same parameters (data × context parallel, for experts expert-data parallel) divide the work. So
do the ranks that hold different experts: a tile of random values has rows of all experts, and each of these ranks would
draw the rows before its own. All ranks derive the same division from the parameters' shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_first_dim
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import Box, ParamSpec, held_of, is_held_in_parts
from megatron.core.tensor_parallel.initialization import (
    TILE_COLUMNS,
    TILE_ROWS,
    draw_box,
    fill_constant,
    is_constant,
)

_BLOCK_ELEMENTS = 4 * TILE_ROWS * TILE_COLUMNS
_GATHERED_ELEMENTS = 1 << 25


@dataclass(frozen=True, eq=False)
class _Block:
    """Describe a box of a parameter's global tensor that one rank draws.

    ``kept`` has the boxes of it that this rank holds, each as a box of ``held``, the parameter's memory, and as a box
    of the block. ``cost`` is the number of random values that are drawn for it.
    """

    spec: ParamSpec
    held: torch.Tensor
    box: Box
    kept: tuple[tuple[Box, Box], ...]
    cost: int

    @property
    def num_kept(self) -> int:
        """Return how many elements of the block this rank holds."""
        return sum(own.num_elements for own, _ in self.kept)

    def keep(self, values: torch.Tensor) -> None:
        """Write what this rank holds of the block into the parameter, rounded to the parameter's precision."""
        for own, part in self.kept:
            self.held[own.slices] = values[part.slices]

    def read_kept(self, into: torch.Tensor) -> None:
        """Copy what this rank holds of the block into flat memory."""
        for own, part in self._cut(into):
            part.copy_(self.held[own.slices])

    def write_kept(self, values: torch.Tensor) -> None:
        """Write what `read_kept` has copied on a rank that holds the same boxes."""
        for own, part in self._cut(values):
            self.held[own.slices] = part

    def _cut(self, flat: torch.Tensor) -> Iterable[tuple[Box, torch.Tensor]]:
        parts = torch.split(flat, [own.num_elements for own, _ in self.kept])
        return [(own, part.view(own.shape)) for (own, _), part in zip(self.kept, parts)]


def initialize_divided(parameters: Iterable[torch.nn.Parameter], seed: int, state: ParallelState | None) -> None:
    """Fill parameters bit by bit as `initialize_parameter` does, the work divided over the ranks that share it.

    Collective over the groups of ``state`` that hold the same parameters, and for experts over ``expert_model``: each
    of their ranks calls it for the same parameters in the same order. A rank draws alone what no other rank holds
    (shards of weights), and everything if there is no ``state`` or if its groups have no communicators.
    """
    divided: dict[tuple[bool, bool, str], list[_Block]] = {}
    for parameter in parameters:
        in_parts = is_held_in_parts(parameter)
        for spec, held in held_of(parameter):
            with torch.no_grad():
                fill_constant(held, spec)
            if not is_constant(spec):
                _, sharers = _groups_of(spec, None if in_parts else state)
                cut = _shared_blocks if sharers.size > 1 else _own_blocks
                # Gradients are off in this thread alone, not in those that draw.
                blocks = cut(spec, held.detach())
                divided.setdefault((in_parts, spec.is_expert, str(held.dtype)), []).extend(blocks)
    with torch.no_grad(), ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for (in_parts, *_), blocks in sorted(divided.items(), key=lambda item: item[0]):
            if blocks:
                _fill(blocks, seed, *_groups_of(blocks[0].spec, None if in_parts else state), threads)


def _groups_of(spec: ParamSpec, state: ParallelState | None) -> tuple[Group, Group]:
    """Return the ranks with the same values of a parameter, and those with other rows of the same tiles."""
    alone = single_rank_group(())
    if state is None:
        return alone, alone
    groups = state.replicas_of(spec), state.expert_model if spec.is_expert else alone
    replicas, sharers = (alone if group.handle is None else group for group in groups)
    return replicas, sharers


def _fill(blocks: Sequence[_Block], seed: int, replicas: Group, sharers: Group, threads: ThreadPoolExecutor) -> None:
    """Draw this rank's share of the blocks and bring the rest from the other ranks."""
    parts = _divide(blocks, replicas.size)
    own = parts[replicas.rank]

    def draw(block: _Block, into: torch.Tensor) -> None:
        into.view(block.box.shape).copy_(draw_box(block.spec, block.box, seed))

    def keep(block: _Block, values: torch.Tensor) -> None:
        block.keep(values.view(block.box.shape))

    if sharers.size > 1:
        shares = _divide(own, sharers.size)
        sizes = [[block.box.num_elements for block in share] for share in shares]
        _exchange(shares, sizes, draw, keep, sharers, threads, has_own=False)
    else:
        list(threads.map(lambda block: block.keep(draw_box(block.spec, block.box, seed)), own))
    if replicas.size > 1:
        sizes = [[block.num_kept for block in part] for part in parts]
        _exchange(parts, sizes, _Block.read_kept, _Block.write_kept, replicas, threads, has_own=True)


def _divide(blocks: Sequence[_Block], number: int) -> list[list[_Block]]:
    """Cut a list of blocks into consecutive parts that cost about the same."""
    total, done = sum(block.cost for block in blocks), 0
    parts: list[list[_Block]] = [[] for _ in range(number)]
    for block in blocks:
        parts[(2 * done + block.cost) * number // (2 * total)].append(block)
        done += block.cost
    return parts


def _exchange(
    parts: Sequence[Sequence[_Block]],
    sizes: Sequence[Sequence[int]],
    read: Callable[[_Block, torch.Tensor], None],
    write: Callable[[_Block, torch.Tensor], None],
    group: Group,
    threads: ThreadPoolExecutor,
    *,
    has_own: bool,
) -> None:
    """All-gather the parts of all ranks in rounds of bounded memory.

    ``read`` copies a block of this rank, of so many elements as ``sizes`` says, into flat memory, and ``write`` takes a
    block of any rank from there, but for this rank's own if it ``has_own`` already.
    """
    largest = max(max(of_rank, default=0) for of_rank in sizes)
    limit = max(largest, _GATHERED_ELEMENTS // group.size)
    rounds = [_rounds(part, of_rank, limit) for part, of_rank in zip(parts, sizes)]
    like = next(block.held for part in parts for block in part)
    for number in range(max(len(of_rank) for of_rank in rounds)):
        places = [of_rank[number] if number < len(of_rank) else [] for of_rank in rounds]
        length = max((end for of_rank in places for _, _, end in of_rank), default=0)
        if not length:
            continue
        sent = like.new_empty(length)
        own = places[group.rank]
        list(threads.map(read, [block for block, _, _ in own], [sent[start:end] for _, start, end in own]))
        gathered = all_gather_first_dim(sent, group).view(group.size, length)
        for rank, of_rank in enumerate(places):
            for block, start, end in () if has_own and rank == group.rank else of_rank:
                write(block, gathered[rank, start:end])


def _rounds(blocks: Sequence[_Block], sizes: Sequence[int], limit: int) -> list[list[tuple[_Block, int, int]]]:
    """Return a rank's blocks with their places in the memory that it sends, round by round."""
    rounds: list[list[tuple[_Block, int, int]]] = []
    position = limit
    for block, size in zip(blocks, sizes):
        if position + size > limit:
            rounds.append([])
            position = 0
        rounds[-1].append((block, position, position + size))
        position += size
    return rounds


def _own_blocks(spec: ParamSpec, held: torch.Tensor) -> list[_Block]:
    """Cut what this rank holds of a parameter along the tiles of its random values."""
    blocks = []
    for piece in spec.pieces:
        for box in _cut_at_tiles(piece.global_box, spec.global_shape):
            inside = box.relative_to(box.offset)
            blocks.append(_Block(spec, held, box, ((piece.localized(box), inside),), _cost(spec, box)))
    return blocks


def _shared_blocks(spec: ParamSpec, held: torch.Tensor) -> list[_Block]:
    """Cut the whole parameter along the tiles of its random values, and say what this rank holds of each block."""
    blocks = []
    for box in _cut_at_tiles(Box((0,) * len(spec.global_shape), spec.global_shape), spec.global_shape):
        common = [(piece, piece.global_box.intersect(box)) for piece in spec.pieces]
        kept = [(piece.localized(part), part.relative_to(box.offset)) for piece, part in common if part is not None]
        blocks.append(_Block(spec, held, box, tuple(kept), _cost(spec, box)))
    return blocks


def _cut_at_tiles(box: Box, global_shape: tuple[int, ...]) -> list[Box]:
    """Cut a box in its first two dims, where tiles end if possible, into parts of about ``_BLOCK_ELEMENTS``."""
    rows = _cut_length(box.offset[0], box.shape[0], TILE_ROWS)
    if len(box.shape) == 1:
        return [Box((start,), (length,)) for start, length in rows]
    trailing = math.prod(global_shape[2:])
    aligned = TILE_COLUMNS // math.gcd(TILE_COLUMNS, trailing)
    step = aligned * max(1, _BLOCK_ELEMENTS // (min(TILE_ROWS, global_shape[0]) * trailing * aligned))
    columns = _cut_length(box.offset[1], box.shape[1], step)
    return [
        Box((row, column, *box.offset[2:]), (num_rows, num_columns, *box.shape[2:]))
        for row, num_rows in rows
        for column, num_columns in columns
    ]


def _cut_length(start: int, length: int, step: int) -> list[tuple[int, int]]:
    """Cut a range at the multiples of ``step``; return where each part starts, and its length."""
    cuts = [start, *range(start - start % step + step, start + length, step), start + length]
    return [(low, high - low) for low, high in itertools.pairwise(cuts)]


def _cost(spec: ParamSpec, box: Box) -> int:
    """Return how many random values are drawn for a box that lies in one row of tiles: those above it too."""
    return (box.offset[0] % TILE_ROWS + box.shape[0]) * math.prod((*box.shape[1:2], *spec.global_shape[2:]))
