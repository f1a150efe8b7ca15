"""GEMMs on torch's symmetric memory, which read or write other ranks' memory while they run.

Copy engines copy between ranks and leave all multiprocessors to the GEMMs. Written from torch's sources and not yet run
on a node with two GPUs.
"""

from __future__ import annotations

import importlib
import platform

import torch

from megatron.core.collectives import all_gather_objects, any_rank
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
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
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
