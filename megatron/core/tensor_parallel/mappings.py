"""Tensor-parallel and sequence-parallel regions: the collectives with which an activation enters and leaves them.

The backward pass of each collective is its conjugate. Sequence parallelism shards dim 0 (the sequence) of ``[s, b,
h]``. Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from megatron.core.collectives import all_gather_first_dim, all_gather_last_dim, all_reduce, reduce_scatter_first_dim
from megatron.core.errors import ConfigurationError
from megatron.core.main_grad import Receiver, bias_gradient
from megatron.core.process_group import Group


class InputRegion(Enum):
    """Layout of a linear layer's input over the tensor-parallel group."""

    SPLIT = "split"
    """Each rank has its own input, whose gradient needs no communication (row-parallel)."""
    REPLICATED = "replicated"
    """Every rank has the same input, whose gradient is all-reduced."""
    SEQUENCE = "sequence"
    """Ranks have parts of dim 0: all-gather in the forward pass, reduce-scatter of the gradient in the backward
    pass."""


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(result, ctx.tp)
        return result, None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group) -> torch.Tensor:
        # No mark_dirty: the output of a linear layer may be a view, which autograd does not allow to be modified.
        result = tensor.detach()
        all_reduce(result, tp)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _SumOverRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        result = tensor.detach().clone()
        all_reduce(result, tp)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(result, ctx.tp)
        return result, None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return _own_part(tensor, -1, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_last_dim(grad, ctx.tp), None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return all_gather_last_dim(tensor, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_part(grad, -1, ctx.tp), None


class _ScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return _own_part(tensor, 0, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_first_dim(grad, ctx.tp), None


class _GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return all_gather_first_dim(tensor, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_first_dim(grad, ctx.tp), None


class _ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.tp, ctx.bias_receiver = tp, None if bias is None else Receiver.of(bias)
        return reduce_scatter_first_dim(tensor, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        bias_grad = None if ctx.bias_receiver is None else bias_gradient(grad, ctx.bias_receiver)
        return all_gather_first_dim(grad, ctx.tp), None, bias_grad


def _own_part(tensor: torch.Tensor, dim: int, tp: Group) -> torch.Tensor:
    """Return a contiguous copy of this rank's equal part of a dim."""
    if tensor.shape[dim] % tp.size:
        raise ConfigurationError(
            f"dim {dim} of a tensor {list(tensor.shape)} is not divisible by tensor-parallel size {tp.size}; pad it or "
            "change the number of processes"
        )
    return tensor.chunk(tp.size, dim=dim)[tp.rank].clone(memory_format=torch.contiguous_format)


def _apply(function: type[torch.autograd.Function], tensor: torch.Tensor, tp: Group, *others: Any) -> torch.Tensor:
    if tp.size == 1:
        return tensor
    result: torch.Tensor = function.apply(tensor, tp, *others)  # type: ignore[no-untyped-call]
    return result


def copy_to_tensor_model_parallel_region(tensor: torch.Tensor, tp: Group) -> torch.Tensor:
    """Enter a tensor-parallel region with a replicated tensor. Forward: identity; backward: all-reduce.

    Shapes: ``[...] -> [...]``.
    """
    return _apply(_CopyToRegion, tensor, tp)


def reduce_from_tensor_model_parallel_region(tensor: torch.Tensor, tp: Group) -> torch.Tensor:
    """Leave a tensor-parallel region. Forward: all-reduce; backward: identity.

    The sum is written into ``tensor``, which must be contiguous and must not be used elsewhere.
    """
    return _apply(_ReduceFromRegion, tensor, tp)


def sum_over_tensor_model_parallel_region(tensor: torch.Tensor, tp: Group) -> torch.Tensor:
    """Sum a tensor whose sum each rank uses differently. Forward and backward: all-reduce.

    Shapes: ``[...] -> [...]``.
    """
    return _apply(_SumOverRegion, tensor, tp)


def scatter_to_tensor_model_parallel_region(tensor: torch.Tensor, tp: Group) -> torch.Tensor:
    """Keep this rank's part of the last dim. Forward: no communication; backward: all-gather along the last dim.

    Shapes: ``[..., n] -> [..., n/tp]``.

    Raises:
        ConfigurationError: the dim cannot be split evenly.
    """
    return _apply(_ScatterToRegion, tensor, tp)


def gather_from_tensor_model_parallel_region(tensor: torch.Tensor, tp: Group) -> torch.Tensor:
    """Join the ranks' parts along the last dim. Forward: all-gather; backward: this rank's part of the gradient.

    Every rank must use the result in the same way. Shapes: ``[..., n/tp] -> [..., n]``.
    """
    return _apply(_GatherFromRegion, tensor, tp)


def scatter_to_sequence_parallel_region(tensor: torch.Tensor, tp: Group) -> torch.Tensor:
    """Enter a sequence-parallel region with a replicated tensor.

    Forward: this rank's part of s, without communication; backward: all-gather along s. Shapes: ``[s, ...] -> [s/tp,
    ...]``.

    Raises:
        ConfigurationError: the sequence cannot be split evenly.
    """
    return _apply(_ScatterToSequence, tensor, tp)


def gather_from_sequence_parallel_region(tensor: torch.Tensor, tp: Group) -> torch.Tensor:
    """Enter a tensor-parallel region from a sequence-parallel one.

    Forward: all-gather along s; backward: reduce-scatter along s. Shapes: ``[s/tp, ...] -> [s, ...]``.
    """
    return _apply(_GatherFromSequence, tensor, tp)


def reduce_scatter_to_sequence_parallel_region(
    tensor: torch.Tensor, tp: Group, bias_in_sum: torch.Tensor | None = None
) -> torch.Tensor:
    """Leave a tensor-parallel region into a sequence-parallel one.

    ``bias_in_sum`` is a bias that one rank has already added to its partial sum. Its gradient covers this rank's part
    of the sequence, as if the bias were added to the result.

    Forward: reduce-scatter along s; backward: all-gather along s. Shapes: ``[s, ...] -> [s/tp, ...]``.
    """
    return _apply(_ReduceScatterToSequence, tensor, tp, bias_in_sum)
