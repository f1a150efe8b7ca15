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
    seed: int,
    name: str,
    global_shape: tuple[int, ...],
    box: Box,
    *,
    is_uniform: bool = False,
    factor: float = 1.0,
    mean: float = 0.0,
) -> np.ndarray:
    """Return normal values of one box of a parameter, the same whichever box they are asked for in.

    Standard normal values, or with ``is_uniform`` uniform ones from -1 to 1, are multiplied by ``factor`` and moved by
    ``mean``.

    Shapes: ``-> float32`` of ``box.shape``; tensors of other than two dims are seen as ``[dim 0, all others]``.
    """
    if box.shape[2:] != global_shape[2:]:
        # Tiles cut the first two dims alone: of further ones the whole is drawn.
        whole = Box((*box.offset[:2], *(0,) * (len(global_shape) - 2)), (*box.shape[:2], *global_shape[2:]))
        drawn = normal_box(seed, name, global_shape, whole, is_uniform=is_uniform, factor=factor, mean=mean)
        return np.ascontiguousarray(drawn[box.relative_to(whole.offset).slices])
    key = tile_key(seed, name)
    columns = math.prod(global_shape[1:])
    trailing = math.prod(box.shape[1:])
    first_column = (box.offset[1] * math.prod(global_shape[2:])) if len(global_shape) > 1 else 0
    flat = Box((box.offset[0], first_column), (box.shape[0], trailing))
    values = np.empty(flat.shape, dtype=np.float32)
    # A tile stays in the processor's cache until its values are in their place.
    scratch = np.empty((TILE_ROWS, TILE_COLUMNS), dtype=np.float32)
    for index, tile in _touched_tiles(flat, columns):
        common = tile.intersect(flat)
        assert common is not None
        # As a list, a key of 2**63 or more would be rounded to a float on its way in.
        generator = np.random.Generator(np.random.Philox(key=np.array([key, index], dtype=np.uint64)))
        # A tile is drawn row by row: what lies below the box is left out.
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
    """Return the initial values of a box of a parameter's global tensor, as its description says.

    Shapes: ``-> float32`` of ``box.shape``.
    """
    is_uniform = spec.init_bound != 0.0
    factor = spec.init_bound if is_uniform else spec.init_std
    values = normal_box(
        seed, spec.name, spec.global_shape, box, is_uniform=is_uniform, factor=factor, mean=spec.init_mean
    )
    return torch.from_numpy(values)


def is_constant(spec: ParamSpec) -> bool:
    """Return whether the initial values of a parameter are one number, so that nothing is drawn."""
    return spec.init_std == 0.0 and spec.init_bound == 0.0


def initialize_parameter(parameter: torch.nn.Parameter, seed: int) -> None:
    """Fill in place, as its description says, what this rank holds of a parameter; padding becomes zero."""
    for spec, held in held_of(parameter):
        with torch.no_grad():
            fill_constant(held, spec)
            if not is_constant(spec):
                for piece in spec.pieces:
                    held[piece.local_box.slices] = draw_box(spec, piece.global_box, seed)


def fill_constant(held: torch.Tensor, spec: ParamSpec) -> None:
    """Write what is not drawn: the mean of a constant parameter, and zero into the padding."""
    num_elements = sum(piece.global_box.num_elements for piece in spec.pieces)
    if is_constant(spec) or num_elements < held.numel():
        held.zero_()
    if is_constant(spec) and spec.init_mean:
        for piece in spec.pieces:
            held[piece.local_box.slices] = spec.init_mean


def initialize_module(module: torch.nn.Module, seed: int) -> None:
    """Fill every parameter of a module whose names are global already."""
    for parameter in module.parameters():
        initialize_parameter(parameter, seed)
