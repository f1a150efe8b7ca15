"""Matrix products of groups of rows, each with a matrix of its own.

On CUDA in bfloat16 all groups are one launch of ``torch._grouped_mm``, where this torch has it. Elsewhere they are one
product a group: on a CPU nothing is gained by more, once a group has some dozen rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.kernels.matrix_product import linear_into, product

_ALIGNMENT = 8


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, counts: Sequence[int], library: str = "auto"
) -> torch.Tensor:
    """Return ``x[group] @ weight[group].T`` of groups of rows that follow one another.

    Shapes: ``x: [n, in]``, ``weight: [groups, out, in]``, counts that sum to n ``-> [n, out]``.
    """
    if _is_one_launch(x, weight):
        result: torch.Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=_ends(counts, x.device))
        return result
    output = x.new_empty(len(x), weight.shape[1])
    for rows, into, of_group in zip(x.split_with_sizes(list(counts)), output.split_with_sizes(list(counts)), weight):
        if len(rows):
            linear_into(into, rows, of_group, library=library)
    return output


def grouped_gradient(grad: torch.Tensor, x: torch.Tensor, counts: Sequence[int], library: str = "auto") -> torch.Tensor:
    """Return ``grad[group].T @ x[group]``: the gradient of the weight of `grouped_product`.

    Shapes: ``grad: [n, out]``, ``x: [n, in]``, counts that sum to n ``-> [groups, out, in]``.
    """
    if _is_one_launch(grad, x):
        result: torch.Tensor = torch._grouped_mm(grad.t(), x, offs=_ends(counts, x.device))
        return result
    total = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    for into, rows, of_group in zip(total, grad.split_with_sizes(list(counts)), x.split_with_sizes(list(counts))):
        if len(rows):
            into.copy_(product(rows.t(), of_group, library))
        else:
            into.zero_()
    return total


def _is_one_launch(left: torch.Tensor, right: torch.Tensor) -> bool:
    is_aligned = all(size % _ALIGNMENT == 0 for size in (left.shape[-1], *right.shape[-2:]))
    return left.is_cuda and left.dtype is torch.bfloat16 and is_aligned and hasattr(torch, "_grouped_mm")


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
