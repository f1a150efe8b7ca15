"""GEMMs on torch's symmetric memory, which read or write other ranks' memory while they run.

Copy engines copy between ranks and leave all multiprocessors to the GEMMs. Written from torch's sources and not yet run
on a node with two GPUs.
"""

from __future__ import annotations

import importlib
import platform

import torch

from megatron.core.collectives import all_gather_objects, any_rank
from megatron.core.ops import ROWS, WHOLE, Quantized, scaled_operands
from megatron.core.process_group import Group


def why_no_symmetric_memory(tp: Group, has_peers: bool) -> str | None:
    """Return on every rank why the group cannot use symmetric memory, or None if it can. Collective.

    ``has_peers`` means that this rank's device has peer access to all devices that it sees.
    """
    if any_rank(not (_has_operators() and has_peers), tp):
        return "torch or the devices do not support it"
    if len(set(all_gather_objects(platform.node(), tp))) > 1:
        return "tensor-parallel ranks are on several nodes"
    return None


def _has_operators() -> bool:
    """Return whether torch has the operators, which importing their module registers."""
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return False
    names = (
        *("fused_all_gather_matmul", "fused_matmul_reduce_scatter"),
        *("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"),
    )
    return all(hasattr(torch.ops.symm_mem, name) for name in names)


def gather_and_multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Group, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``x @ weight.T + bias`` for the parts of all ranks, and return the gathered input if it ``keeps`` it.

    Shapes: ``x: [s/tp, b, in] -> [s, b, out], [s, b, in]``.
    """
    assert tp.handle is not None
    tp.observe("all_gather", x.nbytes * tp.size)
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(
        x.contiguous(), [weight.t()], 0, tp.handle.group_name, return_A=keeps
    )
    product: torch.Tensor = products[0]
    return product if bias is None else product.add_(bias), gathered


def multiply_and_scatter(x: torch.Tensor, weight: torch.Tensor, tp: Group) -> torch.Tensor:
    """Return this rank's part of the sum of ``x @ weight.T`` over the group.

    Shapes: ``x: [s, b, in] -> [s/tp, b, out]``.
    """
    assert tp.handle is not None
    tp.observe("reduce_scatter", x.nbytes // x.shape[-1] * weight.shape[0], "sum")
    part: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.contiguous(), weight.t(), "sum", 0, tp.handle.group_name
    )
    return part


def multiplies_quantized(left: Quantized, right: Quantized) -> bool:
    """Return whether the operators multiply FP8 matrices of this kind: with one scale per matrix or per row."""
    return left.blocks in (WHOLE, ROWS) and right.blocks == left.blocks and left.has_device_product(right)


def gather_and_multiply_quantized(
    part: Quantized, weight: Quantized, out_dtype: torch.dtype, tp: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``x @ weight.T`` for the row parts of all ranks, and return the gathered data of ``x`` too.

    With one scale per matrix all parts have the same.

    Shapes: ``part: [n/tp, in]``, ``weight: [out, in] -> [n, out], [n, in]``.
    """
    assert tp.handle is not None
    tp.observe("all_gather", part.data.nbytes * tp.size)
    given = scaled_operands(part, weight, out_dtype)
    gathered, products = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        *(given.input, [given.mat2], given.scale_a, [given.scale_b], 0, tp.handle.group_name),
        *([None], [None], [given.out_dtype], [False]),
    )
    return products[0].to(out_dtype), gathered


def multiply_and_scatter_quantized(
    left: Quantized, weight: Quantized, out_dtype: torch.dtype, tp: Group
) -> torch.Tensor:
    """Return this rank's row part of the sum of ``left @ weight.T`` over the group.

    Shapes: ``left: [n, in]``, ``weight: [out, in] -> [n/tp, out]``.
    """
    assert tp.handle is not None
    given = scaled_operands(left, weight, out_dtype)
    shape = [len(left.data), len(weight.data)]
    tp.observe("reduce_scatter", shape[0] * shape[1] * given.out_dtype.itemsize, "sum")
    part: torch.Tensor = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        *(given.input, given.mat2, given.scale_a, given.scale_b, "sum", 0, 0, tp.handle.group_name, shape),
        out_dtype=given.out_dtype,
    )
    return part.to(out_dtype)
