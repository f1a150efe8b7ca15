"""GEMMs of linear layers: CPU libraries, grouped GEMMs, and accumulation into wider or existing buffers.

oneDNN is reached through an operator of its own; ``torch.mm`` calls MKL in float32, and oneDNN in bfloat16 but with
other memory layouts. Which is quicker depends on the processor. One core, 2048 rows, 384 to 1536 features, float32:
on a Zen 5 MKL has 94 GFLOP/s and oneDNN 160 to 210; on a Xeon with AMX 150 and 140, and 145 and 80 for weight
gradients. There, bfloat16 weight gradients have 450 by ``torch.mm`` and 670 by the operator.

Groups of rows, each with a matrix of its own, are one launch of ``torch._grouped_mm`` in bfloat16 on Hopper and the
first Blackwells, and elsewhere one product a group. On other GPUs torch would read the groups' ends from the device and
do the same; on a CPU nothing is gained by more, once a group has some dozen rows. But oneDNN writes a program for each
number of rows that it meets, and groups have other numbers in every step: on a Zen 4 a bfloat16 product of 500 rows
took 1.7 ms by a new program and 1.0 ms by a known one. So the rows of a group are rounded up to one of few numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from megatron.core.device import compute_capability
from megatron.core.host_memory import ReusedMemory

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


_HAS_ONEDNN: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_MIN_ROWS = 32
"""With fewer rows oneDNN takes longer to rearrange the weight than to multiply by it."""
_STEPS_BITS = 4
"""Groups have one of 2^4 numbers of rows between a power of two and the next."""
_ALIGNMENT = 8
"""What the sizes of matrices that are multiplied in one launch are multiples of."""
_MULTIPLIES_GROUPS = (9, 10)
"""Compute capabilities, by their first number, for which torch has a kernel of grouped products."""


class RowCounts(tuple[int, ...]):
    """Hold how many rows each group has, which the host knows, and keep for a device where each group ends.

    ``on_device`` are the same numbers where the rows are. Without them the ends go there in one copy.

    Shapes: ``on_device: [groups]``.
    """

    on_device: torch.Tensor | None
    _ends: torch.Tensor | None

    def __new__(cls, counts: Iterable[int], on_device: torch.Tensor | None = None) -> RowCounts:
        self = super().__new__(cls, counts)
        self.on_device, self._ends = on_device, None
        return self

    def ends(self, device: torch.device) -> torch.Tensor:
        """Return how many rows lie before each group's end; made at the first call.

        Shapes: ``-> [groups]`` int32.
        """
        if self._ends is None:
            counts = torch.tensor(self) if self.on_device is None else self.on_device
            self._ends = counts.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
        return self._ends


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    library: str = "auto",
    memory: ReusedMemory | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias``.

    ``library`` is ``onednn``, ``mkl``, ``mixed`` (oneDNN, with weight gradients by MKL), or ``auto``: oneDNN in
    float32, and what torch itself calls otherwise. It counts where both can compute the product. ``memory`` holds the
    result on a CPU where the library can write into it (oneDNN's operator cannot; in bfloat16 ``torch.mm`` takes its
    place); nothing is then recorded for a gradient.

    Shapes: ``x: [..., in]``, ``weight: [out, in]``, ``bias: [out] -> [..., out]``.
    """
    if memory is not None and x.device.type == "cpu" and not (x.dtype is torch.float32 and uses_onednn(x, library)):
        output = memory.empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        _multiply_into(output, x, weight, bias)
        return output
    if uses_onednn(x, library):
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return result
    return F.linear(x, weight, bias)


def linear_into(
    output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, library: str = "auto"
) -> None:
    """Write what `linear` returns into a contiguous tensor of its shape; nothing is recorded for a gradient."""
    if uses_onednn(x, library):
        output.copy_(linear(x, weight, bias, library))
    else:
        _multiply_into(output, x, weight, bias)


def _multiply_into(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    rows, result = x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=result)
    else:
        torch.addmm(bias, rows, weight.t(), out=result)


def product(left: torch.Tensor, right: torch.Tensor, library: str = "auto") -> torch.Tensor:
    """Return ``left @ right``, the gradient of a weight, not necessarily contiguous; ``library`` as for `linear`.

    Shapes: ``left: [a, n]``, ``right: [n, b] -> [a, b]``.
    """
    if not uses_onednn(left, gradient_library(library)):
        return left.matmul(right)
    # oneDNN copies its first operand if it is transposed: let it be the smaller one.
    if left.shape[0] > right.shape[1]:
        return linear(right.t(), left, library=library).t()
    return linear(left, right.t(), library=library)


def gradient_library(library: str) -> str:
    """Return the library of weight gradients where `linear` takes a ``library``."""
    return "mkl" if library == "mixed" else library


def uses_onednn(x: torch.Tensor, library: str = "auto") -> bool:
    """Return whether a product whose first operand is ``x`` is computed by oneDNN's operator."""
    return (
        (library in ("onednn", "mixed") or (library == "auto" and x.dtype is torch.float32))
        and x.device.type == "cpu"
        and x.numel() >= _MIN_ROWS * x.shape[-1]
        and x.numel() > 0
        and has_library("onednn", x.dtype)
    )


def has_library(library: str, dtype: torch.dtype) -> bool:
    """Return whether this torch, on this processor, computes products of a dtype by a library (mixed: by both)."""
    if library == "mixed":
        return has_library("onednn", dtype) and has_library("mkl", dtype)
    if library != "onednn":
        return dtype is not torch.float32 or torch._C.has_mkl
    if dtype is torch.bfloat16:
        return _HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return _HAS_ONEDNN and dtype is torch.float32


def row_counts(counts: Sequence[int]) -> RowCounts:
    """Return numbers of rows as `RowCounts`, themselves where they are."""
    return counts if isinstance(counts, RowCounts) else RowCounts(counts)


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], library: str = "auto"
) -> torch.Tensor:
    """Return ``x[group] @ weight[group].T`` of groups of rows that follow one another.

    Shapes: ``x: [n, in]``, ``weight: [groups, out, in]``, counts that sum to n ``-> [n, out]``.
    """
    if _is_one_launch(x, weight):
        result: torch.Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=row_counts(counts).ends(x.device))
        return result
    output = x.new_empty(len(x), weight.shape[1])
    start = 0
    for count, of_group in zip(counts, weight):
        end = start + count
        rounded = start + (_rounded(count) if _writes_programs(x, library) else count)
        if rounded <= len(x):
            # Further rows are those of later groups, each of which overwrites its own when its turn comes.
            if count:
                linear_into(output[start:rounded], x[start:rounded], of_group, library=library)
        else:
            output[start:end] = linear(_lengthened(x[start:end]), of_group, library=library)[:count]
        start = end
    return output


def grouped_gradient(grad: torch.Tensor, x: torch.Tensor, counts: Sequence[int], library: str = "auto") -> torch.Tensor:
    """Return ``grad[group].T @ x[group]``: the gradient of the weight of `grouped_product`.

    Shapes: ``grad: [n, out]``, ``x: [n, in]``, counts that sum to n ``-> [groups, out, in]``.
    """
    if _is_one_launch(grad, x):
        result: torch.Tensor = torch._grouped_mm(grad.t(), x, offs=row_counts(counts).ends(x.device))
        # On Blackwell the kernel leaves groups without rows unwritten (pytorch/pytorch #152668, #172439). The host
        # knows the counts, so this needs no synchronization. A sync-free dispatch needs torch.where on the group ends.
        empty = [of_group for of_group, count in zip(result, counts) if not count]
        if empty:
            torch._foreach_zero_(empty)
        return result
    total = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    for into, rows, of_group in zip(total, grad.split_with_sizes(list(counts)), x.split_with_sizes(list(counts))):
        if len(rows):
            into.copy_(group_gradient(rows, of_group, library))
        else:
            into.zero_()
    return total


def group_gradient(grad: torch.Tensor, x: torch.Tensor, library: str = "auto") -> torch.Tensor:
    """Return ``grad.T @ x`` of one group of rows, not necessarily contiguous; on a CPU of rows rounded up, with zeros.

    Shapes: ``grad: [n, out]``, ``x: [n, in] -> [out, in]``.
    """
    grad, x = lengthened_group(grad, x, library)
    return product(grad.t(), x, library)


def lengthened_group(grad: torch.Tensor, x: torch.Tensor, library: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of a group's gradient with rows of zeros behind them, where their product gains by it."""
    if not _writes_programs(grad.t(), gradient_library(library)):
        return grad, x
    return _lengthened(grad), _lengthened(x)


def _writes_programs(x: torch.Tensor, library: str) -> bool:
    """Return whether the product whose first operand is ``x`` has a program of oneDNN's for its number of rows."""
    return x.device.type == "cpu" and (x.dtype in (torch.bfloat16, torch.float16) or uses_onednn(x, library))


def _rounded(count: int) -> int:
    """Return a number of rows, rounded up to a 16th at most of the power of two that it reaches."""
    step = 1 << max(count.bit_length() - 1 - _STEPS_BITS, 0)
    return -(-count // step) * step


def _lengthened(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows with zeros behind them, as many as a rounded number has more."""
    missing = _rounded(len(rows)) - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _is_one_launch(left: torch.Tensor, right: torch.Tensor) -> bool:
    if not left.is_cuda or left.dtype is not torch.bfloat16 or not len(left):
        return False
    capability = compute_capability(left.device)
    # Numbers of rows need not be: where these are summed over, they are not what lies together.
    is_aligned = all(size % _ALIGNMENT == 0 for size in (left.shape[1], *right.shape[1:]))
    return is_aligned and (capability is None or capability[0] in _MULTIPLIES_GROUPS)
