"""Initial values of parameters, independent of the parallel layout; ranks can divide the generation among them.

A parameter's values are a function of (seed, global name, global index). The global tensor is split into fixed tiles,
each tile has its own counter-based generator (Philox, Salmon et al. 2011), and a rank generates the tiles that its
boxes overlap. Values are generated on the CPU in float32, so they are the same on every device.

The ranks that hold the same parameters (data x context parallel, for experts expert-data parallel) can divide the work
and all-gather the parts. So can the ranks that hold different experts: a tile of random values has rows of all experts,
and each of these ranks would generate the rows before its own. All ranks derive the same division from the parameters'
shapes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.collectives import all_gather_first_dim
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import Box, ParamSpec, held_of, is_held_in_parts

TILE_ROWS = 256
TILE_COLUMNS = 512


def tile_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a parameter's tiles."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")


def _touched_tiles(box: Box, columns: int) -> Iterator[tuple[int, Box]]:
    tiles_per_row = math.ceil(columns / TILE_COLUMNS)
    (row, column), (num_rows, num_columns) = box.offset, box.shape
    for tile_row in range(row // TILE_ROWS, math.ceil((row + num_rows) / TILE_ROWS)):
        for tile_column in range(column // TILE_COLUMNS, math.ceil((column + num_columns) / TILE_COLUMNS)):
            offset = (tile_row * TILE_ROWS, tile_column * TILE_COLUMNS)
            yield tile_row * tiles_per_row + tile_column, Box(offset, (TILE_ROWS, TILE_COLUMNS))


def normal_box(
    seed: int,
    name: str,
    global_shape: tuple[int, ...],
    box: Box,
    *,
    is_uniform: bool = False,
    factor: float = 1.0,
    mean: float = 0.0,
) -> np.ndarray:
    """Return normal values for one box of a parameter, independent of how boxes are chosen.

    Standard normal values, or with ``is_uniform`` uniform values from -1 to 1, are multiplied by ``factor`` and shifted
    by ``mean``.

    Shapes: ``-> float32`` of ``box.shape``; tensors of other than two dims are viewed as ``[dim 0, all others]``.
    """
    if box.shape[2:] != global_shape[2:]:
        # Tiles split only the first two dims; further dims are generated whole.
        whole = Box((*box.offset[:2], *(0,) * (len(global_shape) - 2)), (*box.shape[:2], *global_shape[2:]))
        drawn = normal_box(seed, name, global_shape, whole, is_uniform=is_uniform, factor=factor, mean=mean)
        return np.ascontiguousarray(drawn[box.relative_to(whole.offset).slices])
    key = tile_key(seed, name)
    columns = math.prod(global_shape[1:])
    trailing = math.prod(box.shape[1:])
    first_column = (box.offset[1] * math.prod(global_shape[2:])) if len(global_shape) > 1 else 0
    flat = Box((box.offset[0], first_column), (box.shape[0], trailing))
    values = np.empty(flat.shape, dtype=np.float32)
    # The tile stays in the processor's cache until its values are copied.
    scratch = np.empty((TILE_ROWS, TILE_COLUMNS), dtype=np.float32)
    for index, tile in _touched_tiles(flat, columns):
        common = tile.intersect(flat)
        assert common is not None
        # An array, because in a list a key of 2**63 or more would be rounded to a float.
        generator = np.random.Generator(np.random.Philox(key=np.array([key, index], dtype=np.uint64)))
        # A tile is generated row by row; rows after the box are skipped.
        drawn = scratch[: common.offset[0] + common.shape[0] - tile.offset[0]]
        if is_uniform:
            generator.random(dtype=np.float32, out=drawn)
            drawn *= np.float32(2)
            drawn -= np.float32(1)
        else:
            generator.standard_normal(dtype=np.float32, out=drawn)
        target = values[common.relative_to(flat.offset).slices]
        np.multiply(drawn[common.relative_to(tile.offset).slices], np.float32(factor), out=target)
        target += np.float32(mean)
    return values.reshape(box.shape)


def draw_box(spec: ParamSpec, box: Box, seed: int) -> torch.Tensor:
    """Return the initial values of a box of a parameter's global tensor, by its `ParamSpec`.

    Shapes: ``-> float32`` of ``box.shape``.
    """
    is_uniform = spec.init_bound != 0.0
    factor = spec.init_bound if is_uniform else spec.init_std
    values = normal_box(
        seed, spec.name, spec.global_shape, box, is_uniform=is_uniform, factor=factor, mean=spec.init_mean
    )
    if spec.init_transform:
        values = TRANSFORMS[spec.init_transform](values)
    return torch.from_numpy(values)


def _step_bias(logarithms: np.ndarray) -> np.ndarray:
    """Return the number whose softplus is the exponential of the given number, but at least 1e-4."""
    steps = np.maximum(np.exp(logarithms), np.float32(1e-4))
    biases: np.ndarray = steps + np.log(-np.expm1(-steps))
    return biases


TRANSFORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"log": np.log, "step_bias": _step_bias}
"""Functions of random values, by the name in `ParamSpec.init_transform`."""


def is_constant(spec: ParamSpec) -> bool:
    """Return whether all initial values of a parameter are equal, so that no random values are needed."""
    return spec.init_std == 0.0 and spec.init_bound == 0.0


def initialize_parameter(parameter: torch.nn.Parameter, seed: int) -> None:
    """Initialize this rank's part of a parameter in place by its `ParamSpec`; padding becomes zero."""
    for spec, held in held_of(parameter):
        with torch.no_grad():
            fill_constant(held, spec)
            if not is_constant(spec):
                for shard in spec.shards:
                    held[shard.local_box.slices] = draw_box(spec, shard.global_box, seed)


def fill_constant(held: torch.Tensor, spec: ParamSpec) -> None:
    """Write the values that are not random: the mean of a constant parameter, and zero in the padding."""
    num_elements = sum(shard.global_box.num_elements for shard in spec.shards)
    if is_constant(spec) or num_elements < held.numel():
        held.zero_()
    if is_constant(spec) and spec.init_mean:
        for shard in spec.shards:
            held[shard.local_box.slices] = spec.init_mean


def initialize_module(module: torch.nn.Module, seed: int) -> None:
    """Initialize every parameter of a module whose parameter names are already global."""
    for parameter in module.parameters():
        initialize_parameter(parameter, seed)


_BLOCK_ELEMENTS = 4 * TILE_ROWS * TILE_COLUMNS
_GATHERED_ELEMENTS = 1 << 25


@dataclass(frozen=True, eq=False)
class _Block:
    """A box of a parameter's global tensor that one rank generates.

    ``kept`` lists the boxes of it that this rank holds, each as a box of ``held``, the parameter's memory, and as a box
    of the block. ``cost`` is the number of random values that are generated for it.
    """

    spec: ParamSpec
    held: torch.Tensor
    box: Box
    kept: tuple[tuple[Box, Box], ...]
    cost: int

    @property
    def num_kept(self) -> int:
        return sum(own.num_elements for own, _ in self.kept)

    def keep(self, values: torch.Tensor) -> None:
        """Copy this rank's part of the block into the parameter, rounded to its dtype."""
        for own, part in self.kept:
            self.held[own.slices] = values[part.slices]

    def read_kept(self, into: torch.Tensor) -> None:
        """Copy this rank's part of the block into flat memory."""
        for own, part in self._cut(into):
            part.copy_(self.held[own.slices])

    def write_kept(self, values: torch.Tensor) -> None:
        """Copy from flat memory that `read_kept` filled on a rank that holds the same boxes."""
        for own, part in self._cut(values):
            self.held[own.slices] = part

    def _cut(self, flat: torch.Tensor) -> Iterable[tuple[Box, torch.Tensor]]:
        parts = torch.split(flat, [own.num_elements for own, _ in self.kept])
        return [(own, part.view(own.shape)) for (own, _), part in zip(self.kept, parts)]


def initialize_divided(parameters: Iterable[torch.nn.Parameter], seed: int, state: ParallelState | None) -> None:
    """Initialize parameters bitwise equal to `initialize_parameter`, with the work divided over ranks.

    Collective over the groups of ``state`` that hold the same parameters, and for experts over ``expert_model``: each
    of their ranks must pass the same parameters in the same order. A rank alone generates the values that no other rank
    holds (shards of weights), and all values if there is no ``state`` or if its groups have no communicators.
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
                # Autograd is disabled only in this thread, not in the worker threads.
                blocks = cut(spec, held.detach())
                divided.setdefault((in_parts, spec.is_expert, str(held.dtype)), []).extend(blocks)
    with torch.no_grad(), ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for (in_parts, *_), blocks in sorted(divided.items(), key=lambda item: item[0]):
            if blocks:
                _fill(blocks, seed, *_groups_of(blocks[0].spec, None if in_parts else state), threads)


def _groups_of(spec: ParamSpec, state: ParallelState | None) -> tuple[Group, Group]:
    """Return the ranks with the same values of a parameter, and the ranks with other rows of the same tiles."""
    alone = single_rank_group(())
    if state is None:
        return alone, alone
    groups = state.replicas_of(spec), state.expert_model if spec.is_expert else alone
    replicas, sharers = (alone if group.handle is None else group for group in groups)
    return replicas, sharers


def _fill(blocks: Sequence[_Block], seed: int, replicas: Group, sharers: Group, threads: ThreadPoolExecutor) -> None:
    """Generate this rank's part of the blocks and all-gather the others."""
    parts = _divide(blocks, replicas.size)
    own = parts[replicas.rank]

    def draw(block: _Block, into: torch.Tensor) -> None:
        into.view(block.box.shape).copy_(draw_box(block.spec, block.box, seed))

    def keep(block: _Block, values: torch.Tensor) -> None:
        block.keep(values.view(block.box.shape))

    if sharers.size > 1 and own:
        shares = _divide(own, sharers.size)
        sizes = [[block.box.num_elements for block in share] for share in shares]
        _exchange(shares, sizes, draw, keep, sharers, threads, has_own=False)
    else:
        list(threads.map(lambda block: block.keep(draw_box(block.spec, block.box, seed)), own))
    if replicas.size > 1:
        sizes = [[block.num_kept for block in part] for part in parts]
        _exchange(parts, sizes, _Block.read_kept, _Block.write_kept, replicas, threads, has_own=True)


def _divide(blocks: Sequence[_Block], number: int) -> list[list[_Block]]:
    """Split a list of blocks into consecutive parts of about equal cost."""
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

    ``read`` copies a block of this rank, whose number of elements is in ``sizes``, into flat memory. ``write`` copies a
    block of any rank from there, except this rank's own blocks if it ``has_own`` already.
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
    """Return a rank's blocks with their offsets in the send buffer, per round."""
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
    """Split this rank's part of a parameter along tile boundaries."""
    blocks = []
    for shard in spec.shards:
        for box in _cut_at_tiles(shard.global_box, spec.global_shape):
            inside = box.relative_to(box.offset)
            blocks.append(_Block(spec, held, box, ((shard.localized(box), inside),), _cost(spec, box)))
    return blocks


def _shared_blocks(spec: ParamSpec, held: torch.Tensor) -> list[_Block]:
    """Split the whole parameter along tile boundaries, with this rank's part of each block."""
    blocks = []
    for box in _cut_at_tiles(Box((0,) * len(spec.global_shape), spec.global_shape), spec.global_shape):
        common = [(shard, shard.global_box.intersect(box)) for shard in spec.shards]
        kept = [(shard.localized(part), part.relative_to(box.offset)) for shard, part in common if part is not None]
        blocks.append(_Block(spec, held, box, tuple(kept), _cost(spec, box)))
    return blocks


def _cut_at_tiles(box: Box, global_shape: tuple[int, ...]) -> list[Box]:
    """Split a box in its first two dims, preferably at tile boundaries, into parts of about ``_BLOCK_ELEMENTS``."""
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
    """Split a range at multiples of ``step``; return the start and length of each part."""
    cuts = [start, *range(start - start % step + step, start + length, step), start + length]
    return [(low, high - low) for low, high in itertools.pairwise(cuts)]


def _cost(spec: ParamSpec, box: Box) -> int:
    """Return the number of random values to generate for a box in one row of tiles, including the rows before it."""
    return (box.offset[0] % TILE_ROWS + box.shape[0]) * math.prod((*box.shape[1:2], *spec.global_shape[2:]))
