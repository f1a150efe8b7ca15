"""GEMMs of linear layers: CPU libraries, grouped GEMMs, and accumulation into wider or existing buffers.

oneDNN is called through its own operator. ``torch.mm`` calls MKL in float32, and oneDNN in bfloat16 but with other
memory layouts. Which library is faster depends on the processor. On one core with 2048 rows, 384 to 1536 features and
float32, MKL reaches 94 GFLOP/s and oneDNN 160 to 210 on a Zen 5. On a Xeon with AMX they reach 150 and 140, and 145 and
80 for weight gradients. There, bfloat16 weight gradients reach 450 with ``torch.mm`` and 670 with the operator.

A grouped GEMM is one launch of ``torch._grouped_mm`` in bfloat16 on Hopper and data-center Blackwell, and elsewhere one
GEMM per group. On other GPUs torch would read the group ends from the device and do the same. On every GPU groups of
equal size are one batched GEMM, and a single group is a GEMM. On a CPU one call for all
groups is not faster, once a group has some dozen rows. But oneDNN compiles a kernel for each new number of rows, and
group sizes change in every step: on a Zen 4 a bfloat16 GEMM of 500 rows took 1.7 ms with a new kernel and 1.0 ms with a
cached one. So group sizes are rounded up to a small set of sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core.device import compute_capability
from megatron.core.host_memory import ReusedMemory

_SMALL = 16
_HALF = (torch.float16, torch.bfloat16)


def adds_wide_products(dtype: torch.dtype, total_dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether GEMMs of 16-bit matrices can accumulate into float32 in one kernel on this device.

    cuBLAS supports it. A small probe GEMM determines whether this release of torch exposes it. On a CPU the result is
    rounded to the dtype of the operands before it is added.
    """
    is_asked = device.type == "cuda" and dtype in _HALF and total_dtype is torch.float32
    return is_asked and why_no_wide_products(dtype, device) is None


def why_no_wide_products(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a CUDA device cannot accumulate GEMMs of 16-bit matrices into float32; None if it can."""
    total = torch.zeros(_SMALL, _SMALL, device=device)
    operand = torch.zeros(_SMALL, _SMALL, dtype=dtype, device=device)
    try:
        add_wide_product(total, operand, operand, overwrite=False)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def add_wide_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, overwrite: bool) -> None:
    """Add the product of two 16-bit matrices to a float32 buffer without rounding it first, or overwrite it.

    Shapes: ``total: [a, b]``, ``left: [a, n]``, ``right: [n, b]``.
    """
    if overwrite:
        torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)


def add_rows(total: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add ``rows[i]`` to row ``indices[i]`` in a deterministic order.

    Shapes: ``total: [m, h]``, ``indices: [n]``, ``rows: [n, h]`` of any dtype.
    """
    rows = rows.to(total.dtype)
    if total.is_cuda:
        # index_add_ is nondeterministic on CUDA; index_put_ with accumulate sorts the indices first.
        total.index_put_((indices,), rows, accumulate=True)
    else:
        total.index_add_(0, indices, rows)


_HAS_ONEDNN: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_MIN_ROWS = 32
"""With fewer rows oneDNN takes longer to reorder the weight than to multiply."""
_STEPS_BITS = 4
"""Group sizes are rounded to one of 2^4 sizes between consecutive powers of two."""
_ALIGNMENT = 8
"""Matrix sizes in a grouped GEMM must be multiples of this number."""
_MULTIPLIES_GROUPS = (9, 10)
"""Major compute capabilities for which torch has a grouped GEMM kernel."""


class RowCounts(tuple[int, ...]):
    """Number of rows per group on the host, with the cached cumulative ends of the groups on a device.

    ``on_device`` has the same numbers on the device of the rows. Without it the ends are copied from the host once.

    ``are_equal`` says that the groups have equal numbers of rows whatever the data, so that batched GEMMs run.

    Shapes: ``on_device: [groups]``.
    """

    on_device: torch.Tensor | None
    are_equal: bool
    _ends: torch.Tensor | None

    def __new__(
        cls, counts: Iterable[int], on_device: torch.Tensor | None = None, are_equal: bool = False
    ) -> RowCounts:
        self = super().__new__(cls, counts)
        self.on_device, self.are_equal, self._ends = on_device, are_equal or len(self) == 1, None
        return self

    def ends(self, device: torch.device) -> torch.Tensor:
        """Return the end of each group as a cumulative number of rows; computed at the first call.

        Shapes: ``-> [groups]`` int32.
        """
        if self._ends is None:
            counts = torch.tensor(self) if self.on_device is None else self.on_device
            self._ends = counts.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
        return self._ends


@dataclass(frozen=True, eq=False)
class RowEnds:
    """Cumulative numbers of rows of the groups, which only the device knows; the host never waits for them.

    Rows after the last end are in no group: grouped GEMMs leave their results uninitialized. Only the kernel of
    `has_grouped_kernel` supports it.

    Shapes: ``ends: [groups]`` int32.
    """

    ends: torch.Tensor

    def __len__(self) -> int:
        return len(self.ends)

    def are_empty(self) -> torch.Tensor:
        """Return which groups have no rows. Shapes: ``-> [groups]`` bool."""
        return self.ends.diff(prepend=self.ends.new_zeros(1)) == 0


Groups = Sequence[int] | RowEnds
"""Numbers of rows per group, known to the host or to the device only."""


def group_ends(counts: Groups, device: torch.device) -> torch.Tensor:
    """Return the end of each group as a cumulative number of rows. Shapes: ``-> [groups]`` int32."""
    return counts.ends if isinstance(counts, RowEnds) else row_counts(counts).ends(device)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    library: str = "auto",
    memory: ReusedMemory | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``.

    ``library`` is ``onednn``, ``mkl``, ``mixed`` (oneDNN, with weight gradients by MKL), or ``auto``: oneDNN in
    float32, and torch's own choice otherwise. It applies only if both libraries support the GEMM. ``memory`` provides
    the output buffer on a CPU if the library can write into it. oneDNN's operator cannot. In bfloat16 ``torch.mm`` is
    used instead. With ``memory`` autograd does not record the operation.

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
    """Write the result of `linear` into a contiguous tensor of its shape, without autograd."""
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
    """Compute ``left @ right`` for the gradient of a weight; the result may be non-contiguous.

    ``library`` is the same as for `linear`.

    Shapes: ``left: [a, n]``, ``right: [n, b] -> [a, b]``.
    """
    if not uses_onednn(left, gradient_library(library)):
        return left.matmul(right)
    # oneDNN copies its first operand if it is transposed, so pass the smaller operand first.
    if left.shape[0] > right.shape[1]:
        return linear(right.t(), left, library=library).t()
    return linear(left, right.t(), library=library)


def gradient_library(library: str) -> str:
    """Return the library of weight gradients for a ``library`` of `linear`."""
    return "mkl" if library == "mixed" else library


def uses_onednn(x: torch.Tensor, library: str = "auto") -> bool:
    """Return whether a GEMM whose first operand is ``x`` uses oneDNN's operator."""
    return (
        (library in ("onednn", "mixed") or (library == "auto" and x.dtype is torch.float32))
        and x.device.type == "cpu"
        and x.numel() >= _MIN_ROWS * x.shape[-1]
        and x.numel() > 0
        and has_library("onednn", x.dtype)
    )


def has_library(library: str, dtype: torch.dtype) -> bool:
    """Return whether torch on this processor supports GEMMs of a dtype with a library (mixed: with both libraries)."""
    if library == "mixed":
        return has_library("onednn", dtype) and has_library("mkl", dtype)
    if library != "onednn":
        return dtype is not torch.float32 or torch._C.has_mkl
    if dtype is torch.bfloat16:
        return _HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return _HAS_ONEDNN and dtype is torch.float32


def row_counts(counts: Sequence[int]) -> RowCounts:
    """Convert numbers of rows to `RowCounts`."""
    return counts if isinstance(counts, RowCounts) else RowCounts(counts)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, counts: Groups, library: str = "auto") -> torch.Tensor:
    """Compute ``x[group] @ weight[group].T`` for contiguous groups of rows.

    Shapes: ``x: [n, in]``, ``weight: [groups, out, in]``, counts that sum to n ``-> [n, out]``.
    """
    if x.is_cuda and _are_equal(counts):
        return torch.bmm(x.reshape(len(counts), -1, x.shape[1]), weight.transpose(1, 2)).flatten(0, 1)
    if isinstance(counts, RowEnds) or _is_one_launch(x, weight):
        result: torch.Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=group_ends(counts, x.device))
        return result
    output = x.new_empty(len(x), weight.shape[1])
    start = 0
    for count, of_group in zip(counts, weight):
        end = start + count
        rounded = start + (_rounded(count) if _writes_programs(x, library) else count)
        if rounded <= len(x):
            # The extra rows belong to later groups, which overwrite their results.
            if count:
                linear_into(output[start:rounded], x[start:rounded], of_group, library=library)
        else:
            output[start:end] = linear(_lengthened(x[start:end]), of_group, library=library)[:count]
        start = end
    return output


def grouped_gradient(grad: torch.Tensor, x: torch.Tensor, counts: Groups, library: str = "auto") -> torch.Tensor:
    """Compute ``grad[group].T @ x[group]``, the weight gradient of `grouped_product`.

    Shapes: ``grad: [n, out]``, ``x: [n, in]``, counts that sum to n ``-> [groups, out, in]``.
    """
    if isinstance(counts, RowEnds):
        result = unfinished_grouped_gradient(grad, x, counts)
        return result.masked_fill_(counts.are_empty()[:, None, None], 0.0)
    if grad.is_cuda and _are_equal(counts):
        left, right = (each.reshape(len(counts), -1, each.shape[1]) for each in (grad, x))
        return torch.bmm(left.transpose(1, 2), right)
    if _is_one_launch(grad, x):
        result = unfinished_grouped_gradient(grad, x, counts)
        # The host knows the counts, so this needs no synchronization.
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


def unfinished_grouped_gradient(grad: torch.Tensor, x: torch.Tensor, counts: Groups) -> torch.Tensor:
    """Compute `grouped_gradient` in one launch, with uninitialized memory for groups without rows.

    On Blackwell the kernel leaves these groups unwritten (pytorch/pytorch #152668, #172439).
    """
    result: torch.Tensor = torch._grouped_mm(grad.t(), x, offs=group_ends(counts, x.device))
    return result


def _are_equal(counts: Groups) -> bool:
    return isinstance(counts, RowCounts) and counts.are_equal and counts[0] > 0


def group_gradient(grad: torch.Tensor, x: torch.Tensor, library: str = "auto") -> torch.Tensor:
    """Compute ``grad.T @ x`` for one group of rows, which is zero-padded on CPU; the result may be non-contiguous.

    Shapes: ``grad: [n, out]``, ``x: [n, in] -> [out, in]``.
    """
    grad, x = lengthened_group(grad, x, library)
    return product(grad.t(), x, library)


def lengthened_group(grad: torch.Tensor, x: torch.Tensor, library: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero-pad the rows of a group gradient's operands if that avoids compiling a kernel."""
    if not _writes_programs(grad.t(), gradient_library(library)):
        return grad, x
    return _lengthened(grad), _lengthened(x)


def _writes_programs(x: torch.Tensor, library: str) -> bool:
    """Return whether oneDNN compiles a kernel per number of rows for a GEMM whose first operand is ``x``."""
    return x.device.type == "cpu" and (x.dtype in (torch.bfloat16, torch.float16) or uses_onednn(x, library))


def _rounded(count: int) -> int:
    """Round up to a multiple of 1/16 of the largest power of two that is at most ``count``."""
    step = 1 << max(count.bit_length() - 1 - _STEPS_BITS, 0)
    return -(-count // step) * step


def _lengthened(rows: torch.Tensor) -> torch.Tensor:
    """Pad rows with zeros to a rounded number of rows."""
    missing = _rounded(len(rows)) - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _is_one_launch(left: torch.Tensor, right: torch.Tensor) -> bool:
    # The number of rows needs no alignment: if rows are summed over, they are not the contiguous dim.
    return len(left) > 0 and has_grouped_kernel(left, left.shape[1], *right.shape[1:])


def has_grouped_kernel(x: torch.Tensor, *features: int) -> bool:
    """Return whether ``torch._grouped_mm`` is one launch for tensors like ``x`` with these numbers of features."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or any(size % _ALIGNMENT for size in features):
        return False
    capability = compute_capability(x.device)
    return capability is None or capability[0] in _MULTIPLIES_GROUPS
