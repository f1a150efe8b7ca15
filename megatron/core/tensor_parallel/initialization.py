"""Initial values that do not depend on the layout.

A parameter's values are a function of (seed, global name, global index): the global tensor is cut into fixed tiles,
each tile has a counter-based generator of its own (Philox, Salmon et al. 2011), and a rank draws the tiles that its
boxes touch. Values are drawn on the CPU in float32, so they are the same on every device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch

from megatron.core.sharding import Box, ParamSpec, held_of

TILE_ROWS = 256
TILE_COLUMNS = 512


def tile_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a parameter's stream of tiles."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")


def _touched_tiles(box: Box, columns: int) -> Iterator[tuple[int, Box]]:
    tiles_per_row = math.ceil(columns / TILE_COLUMNS)
    (row, column), (num_rows, num_columns) = box.offset, box.shape
    for tile_row in range(row // TILE_ROWS, math.ceil((row + num_rows) / TILE_ROWS)):
        for tile_column in range(column // TILE_COLUMNS, math.ceil((column + num_columns) / TILE_COLUMNS)):
            offset = (tile_row * TILE_ROWS, tile_column * TILE_COLUMNS)
            yield tile_row * tiles_per_row + tile_column, Box(offset, (TILE_ROWS, TILE_COLUMNS))


def normal_box(
    seed: int, name: str, global_shape: tuple[int, ...], box: Box, *, is_uniform: bool = False
) -> np.ndarray:
    """Return standard normal values of one box of a parameter, the same whichever box they are asked for in.

    With ``is_uniform`` they are uniform from -1 to 1 instead.

    Shapes: ``-> float32`` of ``box.shape``; tensors of other than two dims are seen as ``[dim 0, all others]``.
    """
    if box.shape[2:] != global_shape[2:]:
        # Tiles cut the first two dims alone: of further ones the whole is drawn.
        whole = Box((*box.offset[:2], *(0,) * (len(global_shape) - 2)), (*box.shape[:2], *global_shape[2:]))
        drawn = normal_box(seed, name, global_shape, whole, is_uniform=is_uniform)
        return np.ascontiguousarray(drawn[box.relative_to(whole.offset).slices])
    key = tile_key(seed, name)
    columns = math.prod(global_shape[1:])
    trailing = math.prod(box.shape[1:])
    first_column = (box.offset[1] * math.prod(global_shape[2:])) if len(global_shape) > 1 else 0
    flat = Box((box.offset[0], first_column), (box.shape[0], trailing))
    values = np.empty(flat.shape, dtype=np.float32)
    for index, tile in _touched_tiles(flat, columns):
        common = tile.intersect(flat)
        assert common is not None
        # As a list, a key of 2**63 or more would be rounded to a float on its way in.
        generator = np.random.Generator(np.random.Philox(key=np.array([key, index], dtype=np.uint64)))
        # A tile is drawn row by row: what lies below the box is left out.
        drawn_shape = (common.offset[0] + common.shape[0] - tile.offset[0], TILE_COLUMNS)
        if is_uniform:
            drawn = generator.random(drawn_shape, dtype=np.float32) * np.float32(2) - np.float32(1)
        else:
            drawn = generator.standard_normal(drawn_shape, dtype=np.float32)
        values[common.relative_to(flat.offset).slices] = drawn[common.relative_to(tile.offset).slices]
    return values.reshape(box.shape)


def initialize_parameter(parameter: torch.nn.Parameter, seed: int) -> None:
    """Fill in place, as its description says, what this rank holds of a parameter; padding becomes zero."""
    for spec, held in held_of(parameter):
        _fill(held, spec, seed)


def _fill(held: torch.Tensor, spec: ParamSpec, seed: int) -> None:
    with torch.no_grad():
        if spec.init_std == 0.0 and spec.init_bound == 0.0:
            held.zero_()
            for piece in spec.pieces:
                held[piece.local_box.slices] = spec.init_mean
            return
        values = np.zeros(tuple(held.shape), dtype=np.float32)
        for piece in spec.pieces:
            is_uniform = spec.init_bound != 0.0
            drawn = normal_box(seed, spec.name, spec.global_shape, piece.global_box, is_uniform=is_uniform)
            factor = np.float32(spec.init_bound if is_uniform else spec.init_std)
            values[piece.local_box.slices] = drawn * factor + np.float32(spec.init_mean)
        held.copy_(torch.from_numpy(values))


def initialize_module(module: torch.nn.Module, seed: int) -> None:
    """Fill every parameter of a module whose names are global already."""
    for parameter in module.parameters():
        initialize_parameter(parameter, seed)
