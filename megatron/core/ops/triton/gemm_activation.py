"""Triton GEMMs of a feed-forward layer with the activation, or its derivative, in the epilogue.

The forward GEMM writes the input of the activation, which the backward pass needs, and the result. The backward GEMM
computes the gradient of the second linear layer's input, multiplies it by the derivative at the saved input, and sums
it over the rows of each tile for the gradient of the first layer's bias. Transformer Engine selects the corresponding
epilogues of cuBLASLt with ``NVTE_GEMM_GELU_FUSION``.

Accumulators are float32. Sizes of tiles depend only on the sizes of the GEMM, the dtype and the type of GPU, so that
results are the same on every GPU of one type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from megatron.core.device import compute_capability
from megatron.core.ops.triton.activation import PLAIN_KINDS, activation_of, slope_of


class Tile(NamedTuple):
    """Sizes of the tile that one instance computes, and how it is compiled."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


TILES = (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 3))
"""Tiles of 16-bit GEMMs. The first one that makes at least `_MIN_TILES` tiles is used, or else the last one."""
TILES_BEFORE_HOPPER = (Tile(128, 256, 32, 8, 4), *TILES[1:])
"""Operands pass through registers there."""
TILE_OF_FLOAT32 = Tile(64, 64, 32, 4, 2)
"""Tile of float32 GEMMs."""
_HOPPER = (9, 0)
_MIN_TILES = 128
_GROUP = 8
"""Rows of tiles whose instances follow each other column by column, so that they share operands in the L2 cache."""


def _matmul(grid: tuple[int, ...], kernel: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return Triton's ``launch_metadata``: the FLOPs, and the sizes of the GEMM, which a simulation reads."""
    rows, inner, columns = (int(arguments[name]) for name in ("num_rows", "depth", "num_columns"))
    bits = 8 * arguments["left"].element_size()
    return {f"flops{bits}": 2 * rows * inner * columns, "gemm": (rows, inner, columns)}


@triton.jit
def _place(num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and the first column of the instance's tile."""
    number = tl.program_id(0)
    across = tl.cdiv(num_columns, COLUMNS)
    first = number // (GROUP * across) * GROUP
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    inner = number % (GROUP * across)
    return (first + inner % height).to(tl.int64) * ROWS, (inner // height).to(tl.int64) * COLUMNS


@triton.jit
def _product(
    left,
    right,
    first_row,
    first_column,
    num_rows,
    num_columns,
    depth,
    IS_TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a tile of ``left @ right`` in float32, 0 outside.

    Offsets within a tile have 32 bits, which takes fewer registers than pointers.

    Shapes: ``left: [num_rows, depth]``, ``right: [depth, num_columns]``, or ``[num_columns, depth]`` if ``IS_TURNED``.
    """
    row, column, place = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    left_at = left + first_row * depth
    left_offset = row[:, None] * depth + place[None, :]
    if IS_TURNED:
        right_at = right + first_column * depth
        right_offset = column[None, :] * depth + place[:, None]
        step = tl.full((), DEPTH, tl.int64)
    else:
        right_at = right + first_column
        right_offset = place[:, None] * num_columns + column[None, :]
        step = tl.full((), DEPTH, tl.int64) * num_columns
    is_row, is_column = (first_row + row < num_rows)[:, None], (first_column + column < num_columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        inside = start + place < depth
        of_left = tl.load(left_at + left_offset, mask=is_row & inside[None, :], other=0.0)
        of_right = tl.load(right_at + right_offset, mask=inside[:, None] & is_column, other=0.0)
        total = tl.dot(of_left, of_right, total, input_precision=PRECISION)
        left_at += DEPTH
        right_at += step
    return total


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _quarters(tile, half: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the two quarters of the left half of a tile, or of the right one."""
    left, right = _halves(tile, ROWS, COLUMNS)
    return _halves(left if half == 0 else right, ROWS, COLUMNS // 2)


@triton.jit
def _activate(
    total,
    bias,
    inner,
    output,
    first_row,
    first_column,
    num_rows,
    num_columns,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add the bias, and write the input of the activation, if it is not None, and the result."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_column = first_column + column < num_columns
    if bias is not None:
        total += tl.load(bias + first_column + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    # The activation of the rounded value, which the backward pass reads.
    rounded = total.to(output.dtype.element_ty)
    first = first_row * num_columns + first_column
    at = row[:, None] * num_columns + column[None, :]
    inside = (first_row + row < num_rows)[:, None] & is_column[None, :]
    if inner is not None:
        tl.store(inner + first + at, rounded, mask=inside)
    result = activation_of(rounded.to(tl.float32), KIND)
    tl.store(output + first + at, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _differentiate(
    total,
    inner,
    inner_grad,
    bias_parts,
    first_row,
    first_column,
    num_rows,
    num_columns,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Multiply by the derivative at ``inner``, and write the result and its sum over rows, if it is not None."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_column = first_column + column < num_columns
    first = first_row * num_columns + first_column
    at = row[:, None] * num_columns + column[None, :]
    inside = (first_row + row < num_rows)[:, None] & is_column[None, :]
    total *= slope_of(tl.load(inner + first + at, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(inner_grad + first + at, total.to(inner_grad.dtype.element_ty), mask=inside)
    if bias_parts is not None:
        part = first_row // ROWS
        tl.store(bias_parts + part * num_columns + first_column + column, tl.sum(total, axis=0), mask=is_column)


@triton.jit(launch_metadata=_matmul)
def forward_program(
    left: tl.tensor,
    right: tl.tensor,
    bias: tl.tensor,
    inner: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write a tile of ``inner = left @ right.T + bias``, if it is not None, and of its activation.

    Shapes: ``left: [num_rows, depth]``, ``right: [num_columns, depth]``, ``inner, output: [num_rows, num_columns]``.
    """
    row, column = _place(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    total = _product(left, right, row, column, num_rows, num_columns, depth, True, PRECISION, ROWS, COLUMNS, DEPTH)
    # A quarter of the tile at a time needs fewer registers.
    WIDTH: tl.constexpr = COLUMNS // 4
    for half in tl.static_range(2):
        first, second = _quarters(total, half, ROWS, COLUMNS)
        _activate(first, bias, inner, output, row, column, num_rows, num_columns, KIND, ROWS, WIDTH)
        column += WIDTH
        _activate(second, bias, inner, output, row, column, num_rows, num_columns, KIND, ROWS, WIDTH)
        column += WIDTH


@triton.jit(launch_metadata=_matmul)
def gradient_program(
    left: tl.tensor,
    right: tl.tensor,
    inner: tl.tensor,
    inner_grad: tl.tensor,
    bias_parts: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write a tile of ``left @ right`` times the derivative at ``inner``, and its sum over rows, if it is not None.

    Shapes: ``left: [num_rows, depth]``, ``right: [depth, num_columns]``, ``bias_parts: [tiles of rows, num_columns]``,
    ``inner, inner_grad: [num_rows, num_columns]``.
    """
    row, column = _place(num_rows, num_columns, ROWS, COLUMNS, GROUP)
    total = _product(left, right, row, column, num_rows, num_columns, depth, False, PRECISION, ROWS, COLUMNS, DEPTH)
    WIDTH: tl.constexpr = COLUMNS // 4
    for half in tl.static_range(2):
        first, second = _quarters(total, half, ROWS, COLUMNS)
        _differentiate(first, inner, inner_grad, bias_parts, row, column, num_rows, num_columns, KIND, ROWS, WIDTH)
        column += WIDTH
        _differentiate(second, inner, inner_grad, bias_parts, row, column, num_rows, num_columns, KIND, ROWS, WIDTH)
        column += WIDTH


def _num_tiles(tile: Tile, num_rows: int, num_columns: int) -> int:
    return -(-num_rows // tile.rows) * -(-num_columns // tile.columns)


def _tile_for(num_rows: int, num_columns: int, x: torch.Tensor) -> Tile:
    if x.dtype is torch.float32:
        return TILE_OF_FLOAT32
    capability = compute_capability(x.device) if x.is_cuda else None
    tiles = TILES if capability is None or capability >= _HOPPER else TILES_BEFORE_HOPPER
    large = (tile for tile in tiles if _num_tiles(tile, num_rows, num_columns) >= _MIN_TILES)
    return next(large, tiles[-1])


def _compiled_for(tile: Tile, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    assert kind in PLAIN_KINDS, kind
    # In float32 as torch's own GEMMs: exact, unless TensorFloat-32 is allowed. Other dtypes ignore it.
    is_rounded = dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": _GROUP}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return {"KIND": kind, "PRECISION": "tf32" if is_rounded else "ieee", **sizes, **options}


def linear_with_activation(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str, *, keeps_input: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return ``x @ weight.T + bias``, or None unless it ``keeps_input``, and its activation, in one launch.

    ``kind`` is one of `PLAIN_KINDS`.

    Shapes: ``x: [..., in]``, ``weight: [out, in]``, ``bias: [out] -> [..., out]``.
    """
    num_columns, depth = weight.shape
    num_rows = x.numel() // depth
    output = x.new_empty((*x.shape[:-1], num_columns))
    inner = torch.empty_like(output) if keeps_input else None
    tile = _tile_for(num_rows, num_columns, x)
    forward_program[(_num_tiles(tile, num_rows, num_columns),)](
        *(x.contiguous(), weight.contiguous(), bias, inner, output, num_rows, num_columns, depth),
        **_compiled_for(tile, kind, x.dtype),
    )
    return inner, output


def activation_input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor, kind: str, *, sums_rows: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``grad @ weight`` times the derivative of the activation at ``inner``, and its sums over rows, in parts.

    The parts are None unless it ``sums_rows``.

    Shapes: ``grad: [..., out]``, ``weight: [out, in]``, ``inner: [..., in] -> [..., in]``, ``[1, parts, in]`` float32.
    """
    depth, num_columns = weight.shape
    num_rows = inner.numel() // num_columns
    tile = _tile_for(num_rows, num_columns, inner)
    inner_grad = torch.empty_like(inner, memory_format=torch.contiguous_format)
    parts = None
    if sums_rows:
        parts = inner.new_empty((1, triton.cdiv(num_rows, tile.rows), num_columns), dtype=torch.float32)
    gradient_program[(_num_tiles(tile, num_rows, num_columns),)](
        *(grad.contiguous(), weight.contiguous(), inner.contiguous(), inner_grad, parts),
        *(num_rows, num_columns, depth),
        **_compiled_for(tile, kind, inner.dtype),
    )
    return inner_grad, parts
