"""Sums into memory that is there already: matrix products wider than their operands, and rows at given places."""

from __future__ import annotations

import torch

_SMALL = 16
_HALF = (torch.float16, torch.bfloat16)


def adds_wide_products(dtype: torch.dtype, total_dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products of 16-bit matrices can be summed in float32 on this device, in one kernel.

    cuBLAS can. How much of it torch lets through depends on its release, which a small product finds out. A CPU cannot:
    there a product is rounded to the type of its operands before it is added.
    """
    is_asked = device.type == "cuda" and dtype in _HALF and total_dtype is torch.float32
    return is_asked and why_no_wide_products(dtype, device) is None


def why_no_wide_products(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a CUDA device does not sum products of 16-bit matrices in float32; None if it does."""
    total = torch.zeros(_SMALL, _SMALL, device=device)
    operand = torch.zeros(_SMALL, _SMALL, dtype=dtype, device=device)
    try:
        add_wide_product(total, operand, operand, overwrite=False)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def add_wide_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, overwrite: bool) -> None:
    """Add the product of two 16-bit matrices to float32 sums without rounding it first, or write it over them.

    Shapes: ``total: [a, b]``, ``left: [a, n]``, ``right: [n, b]``.
    """
    if overwrite:
        torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def add_rows(total: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add ``rows[i]`` to row ``indices[i]``, in the same order at every call.

    Shapes: ``total: [m, h]``, ``indices: [n]``, ``rows: [n, h]`` of any dtype.
    """
    rows = rows.to(total.dtype)
    if total.is_cuda:
        # index_add_ adds there in whatever order its threads come; this sorts the indices first.
        total.index_put_((indices,), rows, accumulate=True)
    else:
        total.index_add_(0, indices, rows)
