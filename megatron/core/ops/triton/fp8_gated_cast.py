"""Triton kernels that compute a gated activation, or the gradient of its input, and cast it to FP8 with known scales.

The numbers are those of the kernels of `megatron.core.ops.triton.activation`, rounded to the dtype of the activation's
input, which `megatron.core.ops.triton.fp8_cast` would cast. Neither the activation nor the gradient is written in 16
bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.triton.activation import GATED_KINDS, activation_and_slope, rounded_gradients
from megatron.core.ops.triton.fp8_cast import DTYPES, _float8_bits

_BLOCK = 64
_CAST_WARPS, _GRADIENT_WARPS = 4, 8


@triton.jit
def _load_halves(x, row, column, inside, width):
    """Return a tile of both halves of ``x: [n, 2 * width]`` in float32."""
    start = x + row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(start + width, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write_tile(bits, data, row, column, inside, width):
    tl.store(data + row[:, None] * width + column[None, :], bits, mask=inside)


@triton.jit
def _write_transposed_tile(bits, turned, row, column, inside, num_rows):
    tl.store(turned + column[:, None] * num_rows + row[None, :], tl.trans(bits), mask=tl.trans(inside))


@triton.jit
def gated_cast_program(
    x: tl.tensor,
    scale: tl.tensor,
    data: tl.tensor,
    amax: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of the activation of ``x: [num_rows, 2 * width]`` in E4M3."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    gate, up = _load_halves(x, row, column, inside, width)
    activated, _ = activation_and_slope(gate, KIND)
    values = (activated * up).to(x.dtype.element_ty).to(tl.float32)
    if amax is not None:
        tl.atomic_max(amax, tl.max(tl.abs(values)))
    _write_tile(_float8_bits(values / tl.load(scale), False), data, row, column, inside, width)


@triton.jit
def gated_gradient_cast_program(
    grad: tl.tensor,
    x: tl.tensor,
    scale: tl.tensor,
    activated_scale: tl.tensor,
    data: tl.tensor,
    turned: tl.tensor,
    activated_turned: tl.tensor,
    amax: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    IS_E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write two tiles of the gradient of ``x``, two of its transpose, and one of the transpose of the activation.

    Shapes: ``grad: [num_rows, width]``, ``x, data: [num_rows, 2 * width]``, ``turned: [2 * width, num_rows]``,
    ``activated_turned: [width, num_rows]``.
    """
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    gate, up = _load_halves(x, row, column, inside, width)
    out = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gate_grad, up_grad, activated = rounded_gradients(out, gate, up, x.dtype.element_ty, KIND)
    if amax is not None:
        tl.atomic_max(amax, tl.max(tl.maximum(tl.abs(gate_grad), tl.abs(up_grad))))
    divisor = tl.load(scale)
    gate_bits, up_bits = _float8_bits(gate_grad / divisor, IS_E5M2), _float8_bits(up_grad / divisor, IS_E5M2)
    _write_tile(gate_bits, data, row, column, inside, 2 * width)
    _write_tile(up_bits, data, row, column + width, inside, 2 * width)
    _write_transposed_tile(gate_bits, turned, row, column, inside, num_rows)
    _write_transposed_tile(up_bits, turned, row, column + width, inside, num_rows)
    bits = _float8_bits(activated / tl.load(activated_scale), False)
    _write_transposed_tile(bits, activated_turned, row, column, inside, num_rows)


def cast_gated_with_scale(x: torch.Tensor, kind: str, scale: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """Return a gated activation in E4M3, contiguous, and update ``amax`` to the maximum.

    ``kind`` is one of `GATED_KINDS`.

    Shapes: ``x: [n, 2 m]``, ``scale: [1, 1]``, ``amax: [] -> [n, m]``.
    """
    assert kind in GATED_KINDS, kind
    x = x.detach().contiguous()
    num_rows, width = len(x), x.shape[1] // 2
    data = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device)
    if x.numel():
        gated_cast_program[_grid(num_rows, width)](
            x, scale, data, amax, num_rows, width, KIND=kind, BLOCK=_BLOCK, num_warps=_CAST_WARPS
        )
    return data.view(torch.float8_e4m3fn)


def cast_gated_gradient_with_scale(
    grad: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    activated_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of a gated activation's input in FP8, its transpose, and the activation's transpose in E4M3.

    ``grad`` is the gradient of the activation. All results are contiguous. ``amax`` is updated to the maximum of the
    returned gradient.

    Shapes: ``grad: [n, m]``, ``x: [n, 2 m]``, scales ``[1, 1]``, ``amax: [] -> [n, 2 m], [2 m, n], [m, n]``.
    """
    assert kind in GATED_KINDS, kind
    assert dtype in DTYPES, dtype
    grad, x = grad.detach().contiguous(), x.detach().contiguous()
    num_rows, width = grad.shape
    shapes = (num_rows, 2 * width), (2 * width, num_rows), (width, num_rows)
    data, turned, activated = (torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes)
    if x.numel():
        gated_gradient_cast_program[_grid(num_rows, width)](
            grad, x, scale, activated_scale, data, turned, activated, amax, num_rows, width,
            KIND=kind, IS_E5M2=dtype is torch.float8_e5m2, BLOCK=_BLOCK, num_warps=_GRADIENT_WARPS,
        )  # fmt: skip
    return data.view(dtype), turned.view(dtype), activated.view(torch.float8_e4m3fn)


def _grid(num_rows: int, width: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, _BLOCK), triton.cdiv(width, _BLOCK)
