"""Tensor-parallel and sequence-parallel regions: the collectives with which an activation enters and leaves them.

The backward pass of each collective is its conjugate. Sequence parallelism shards dim 0 (the sequence) of ``[s, b,
h]``. Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.

The functions have megatron-core's names and signatures. ``group`` is this framework's `Group` or torch's
``ProcessGroup``; without it the process-wide tensor-parallel group is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from megatron.core.collectives import (
    all_gather_first_dim,
    all_gather_into,
    all_gather_last_dim,
    all_reduce,
    all_to_all_rows,
    reduce_scatter_first_dim,
)
from megatron.core.errors import ConfigurationError
from megatron.core.main_grad import Receiver, bias_gradient, launch_delayed
from megatron.core.process_group import Group
from megatron.core.process_state import resolve_group

if TYPE_CHECKING:
    from megatron.core.process_state import AnyGroup


class InputRegion(Enum):
    """Layout of a linear layer's input over the tensor-parallel group."""

    SPLIT = "split"
    """Each rank has its own input, whose gradient needs no communication (row-parallel)."""
    REPLICATED = "replicated"
    """Every rank has the same input, whose gradient is all-reduced."""
    SEQUENCE = "sequence"
    """Ranks have parts of dim 0: all-gather in the forward pass, reduce-scatter of the gradient in the backward
    pass."""


class _Region(torch.autograd.Function):
    @classmethod
    def symbolic(cls, graph: Any, *args: Any) -> Any:
        """Return the result of the forward pass, for tracing."""
        return cls.forward(SimpleNamespace(), *args)


Collective: TypeAlias = Callable[[torch.Tensor, Group], torch.Tensor]


def _view(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return tensor.view_as(tensor)


def _unchanged(grad: torch.Tensor, group: Group) -> torch.Tensor:
    return grad


def _sum_in_place(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    # No mark_dirty: the output of a linear layer may be a view, which autograd does not allow to be modified.
    result = tensor.detach().contiguous()
    all_reduce(result, group)
    return result


def _sum_of_copy(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(result, group)
    return result


def _check_even(tensor: torch.Tensor, dim: int, group: Group) -> None:
    if tensor.shape[dim] % group.size:
        raise ConfigurationError(
            f"dim {dim} of a tensor {list(tensor.shape)} is not divisible by tensor-parallel size {group.size}; pad it "
            "or change the number of processes"
        )


def _own_part(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Return a contiguous copy of this rank's equal part of a dim."""
    _check_even(tensor, dim, group)
    return tensor.chunk(group.size, dim=dim)[group.rank].clone(memory_format=torch.contiguous_format)


def _own_rows(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return _own_part(tensor, 0, group)


def _own_columns(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return _own_part(tensor, -1, group)


def _reduce_scatter_columns(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's part of the last dim of the sum over the group."""
    if group.size == 1:
        return tensor
    _check_even(tensor, -1, group)
    parts = torch.stack(tensor.chunk(group.size, dim=-1))
    return reduce_scatter_first_dim(parts, group).squeeze(0)


def _conjugate_pair(name: str, on_tensor: Collective, on_gradient: Collective) -> type[_Region]:
    """Return a region whose forward and backward pass apply one function each to the tensor or the gradient."""

    def forward(ctx: Any, tensor: torch.Tensor, group: AnyGroup) -> torch.Tensor:
        ctx.group = group
        return on_tensor(tensor, resolve_group(group))

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return on_gradient(grad, resolve_group(ctx.group)), None

    return type(name, (_Region,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


_CopyToModelParallelRegion = _conjugate_pair("_CopyToModelParallelRegion", _view, _sum_of_copy)
_ReduceFromModelParallelRegion = _conjugate_pair("_ReduceFromModelParallelRegion", _sum_in_place, _unchanged)
_SumOverRegion = _conjugate_pair("_SumOverRegion", _sum_of_copy, _sum_of_copy)
_ScatterToModelParallelRegion = _conjugate_pair("_ScatterToModelParallelRegion", _own_columns, all_gather_last_dim)
_GatherFromModelParallelRegion = _conjugate_pair("_GatherFromModelParallelRegion", all_gather_last_dim, _own_columns)
_ScatterToSequenceParallelRegion = _conjugate_pair("_ScatterToSequenceParallelRegion", _own_rows, all_gather_first_dim)
_AllGatherFromTensorParallelRegion = _conjugate_pair(
    "_AllGatherFromTensorParallelRegion", all_gather_last_dim, _reduce_scatter_columns
)
_ReduceScatterToTensorParallelRegion = _conjugate_pair(
    "_ReduceScatterToTensorParallelRegion", _reduce_scatter_columns, all_gather_last_dim
)


class _GatherFromSequenceParallelRegion(_Region):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: AnyGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        ctx.group, ctx.output_split_sizes = group, output_split_sizes
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        return _gather_rows(tensor, resolve_group(group), output_split_sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        group = resolve_group(ctx.group)
        if ctx.tensor_parallel_output_grad:
            result = _reduce_scatter_rows(grad, group, ctx.output_split_sizes)
        elif ctx.output_split_sizes is None:
            result = _own_part(grad, 0, group)
        else:
            result = torch.split(grad, list(ctx.output_split_sizes))[group.rank].contiguous()
        return result, None, None, None, None


class _ReduceScatterToSequenceParallelRegion(_Region):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: AnyGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        ctx.group, ctx.input_split_sizes = group, input_split_sizes
        return _reduce_scatter_rows(tensor, resolve_group(group), input_split_sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group = resolve_group(ctx.group)
        if ctx.input_split_sizes is None:
            return gather_gradient(grad, group), None, None, None
        return _gather_rows(grad, group, ctx.input_split_sizes), None, None, None


class _ReduceScatterWithBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: Group, bias: torch.Tensor) -> torch.Tensor:
        ctx.tp, ctx.bias_receiver = tp, Receiver.of(bias)
        return reduce_scatter_first_dim(tensor, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        return gather_gradient(grad, ctx.tp), None, bias_gradient(grad, ctx.bias_receiver)


class _AllToAll(_Region):
    @staticmethod
    def forward(
        ctx: Any,
        group: AnyGroup,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
    ) -> torch.Tensor:
        ctx.group = group
        ctx.output_split_sizes, ctx.input_split_sizes = output_split_sizes, input_split_sizes
        return _exchange_rows(tensor, resolve_group(group), input_split_sizes, output_split_sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:
        group = resolve_group(ctx.group)
        return None, _exchange_rows(grad, group, ctx.output_split_sizes, ctx.input_split_sizes), None, None


def gather_gradient(grad: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather the gradient of an output along dim 0, overlapped with the delayed matmul of another layer.

    Shapes: ``[n, ...] -> [n * group.size, ...]``.
    """
    whole = grad.new_empty((grad.shape[0] * group.size, *grad.shape[1:]))
    gathering = all_gather_into(whole, grad.contiguous(), group, async_op=True)
    launch_delayed()
    if gathering is not None:
        gathering.wait()
    return whole


def _gather_rows(tensor: torch.Tensor, group: Group, sizes: Sequence[int] | None) -> torch.Tensor:
    """Return the ranks' rows in group order; ``sizes`` are the ranks' numbers of rows if they differ."""
    if sizes is None or group.size == 1:
        return all_gather_first_dim(tensor, group)
    rows = torch.split(all_gather_first_dim(_padded(tensor, max(sizes)), group), max(sizes))
    return torch.cat([part[:size] for part, size in zip(rows, sizes, strict=True)])


def _reduce_scatter_rows(tensor: torch.Tensor, group: Group, sizes: Sequence[int] | None) -> torch.Tensor:
    """Return this rank's rows of the sum; ``sizes`` are the ranks' numbers of rows if they differ."""
    if group.size == 1:
        return tensor
    if sizes is None:
        _check_even(tensor, 0, group)
        return reduce_scatter_first_dim(tensor, group)
    padded = torch.cat([_padded(part, max(sizes)) for part in torch.split(tensor, list(sizes))])
    return reduce_scatter_first_dim(padded, group)[: sizes[group.rank]]


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros((rows - tensor.shape[0], *tensor.shape[1:]))])


def _exchange_rows(
    tensor: torch.Tensor, group: Group, sent: Sequence[int] | None, received: Sequence[int] | None
) -> torch.Tensor:
    """Send rows to every rank and return the received rows; numbers of rows that are not given are equal."""
    equal = [tensor.shape[0] // group.size] * group.size
    return all_to_all_rows(tensor.contiguous(), sent or equal, received or equal, group)[0]


def _apply(
    function: type[torch.autograd.Function], tensor: torch.Tensor, group: AnyGroup, *others: Any
) -> torch.Tensor:
    group = resolve_group(group)
    if group.size == 1:
        return tensor
    result: torch.Tensor = function.apply(tensor, group, *others)  # type: ignore[no-untyped-call]
    return result


def copy_to_tensor_model_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Enter a tensor-parallel region with a replicated tensor. Forward: identity; backward: all-reduce.

    Shapes: ``[...] -> [...]``.
    """
    return _apply(_CopyToModelParallelRegion, input_, group)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Leave a tensor-parallel region. Forward: all-reduce; backward: identity.

    The sum is written into ``input_`` if it is contiguous, which must not be used elsewhere.
    """
    return _apply(_ReduceFromModelParallelRegion, input_, group)


def sum_over_tensor_model_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Sum a tensor whose sum each rank uses differently. Forward and backward: all-reduce.

    Shapes: ``[...] -> [...]``.
    """
    return _apply(_SumOverRegion, input_, group)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Keep this rank's part of the last dim. Forward: no communication; backward: all-gather along the last dim.

    Shapes: ``[..., n] -> [..., n/tp]``.

    Raises:
        ConfigurationError: the dim cannot be split evenly.
    """
    return _apply(_ScatterToModelParallelRegion, input_, group)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Join the ranks' parts along the last dim. Forward: all-gather; backward: this rank's part of the gradient.

    Every rank must use the result in the same way. Shapes: ``[..., n/tp] -> [..., n]``.
    """
    return _apply(_GatherFromModelParallelRegion, input_, group)


def scatter_to_sequence_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Enter a sequence-parallel region with a replicated tensor.

    Forward: this rank's part of s, without communication; backward: all-gather along s. Shapes: ``[s, ...] -> [s/tp,
    ...]``.

    Raises:
        ConfigurationError: the sequence cannot be split evenly.
    """
    return _apply(_ScatterToSequenceParallelRegion, input_, group)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    group: AnyGroup = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Enter a tensor-parallel region from a sequence-parallel one.

    Forward: all-gather along s; backward: reduce-scatter along s. Without ``tensor_parallel_output_grad`` the gradient
    is the same on all ranks, and the backward pass takes this rank's part. ``output_split_sizes`` are the ranks'
    numbers of rows if they differ. ``use_global_buffer`` has no effect.

    Shapes: ``[s/tp, ...] -> [s, ...]``.
    """
    return _apply(
        _GatherFromSequenceParallelRegion,
        input_,
        group,
        tensor_parallel_output_grad,
        output_split_sizes,
        use_global_buffer,
    )


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    group: AnyGroup = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
    *,
    bias_in_sum: torch.Tensor | None = None,
) -> torch.Tensor:
    """Leave a tensor-parallel region into a sequence-parallel one.

    ``input_split_sizes`` are the numbers of rows for each rank if they differ. ``use_global_buffer`` has no effect.
    ``bias_in_sum`` is a bias that one rank has already added to its partial sum. Its gradient covers this rank's part
    of the sequence, as if the bias were added to the result.

    Forward: reduce-scatter along s; backward: all-gather along s. Shapes: ``[s, ...] -> [s/tp, ...]``.
    """
    if bias_in_sum is not None:
        return _apply(_ReduceScatterWithBias, input_, group, bias_in_sum)
    return _apply(_ReduceScatterToSequenceParallelRegion, input_, group, input_split_sizes, use_global_buffer)


def all_gather_last_dim_from_tensor_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Join the ranks' parts along the last dim. Forward: all-gather; backward: reduce-scatter.

    Shapes: ``[..., n/tp] -> [..., n]``.
    """
    return _apply(_AllGatherFromTensorParallelRegion, input_, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Keep this rank's part of the last dim of the sum. Forward: reduce-scatter; backward: all-gather.

    Shapes: ``[..., n] -> [..., n/tp]``.
    """
    return _apply(_ReduceScatterToTensorParallelRegion, input_, group)


def all_to_all(
    group: AnyGroup,
    input_: torch.Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send rows of dim 0 to every rank of the group. Backward: the reverse exchange.

    ``input_split_sizes`` and ``output_split_sizes_`` are the numbers of rows sent to and received from each rank; equal
    numbers by default.
    """
    group = resolve_group(group)
    if group.size == 1:
        return input_
    result: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        group, input_, output_split_sizes_, input_split_sizes
    )
    return result


def all_to_all_sp2hp(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Exchange tokens sharded by sequence for tokens sharded by hidden dim.

    Shapes: ``[n/tp, h] -> [n, h/tp]``; leading dims are flattened.
    """
    group = resolve_group(group)
    flat = input_.reshape(-1, input_.shape[-1])
    return all_to_all(group, torch.cat(flat.chunk(group.size, dim=1)))


def all_to_all_hp2sp(input_: torch.Tensor, group: AnyGroup = None) -> torch.Tensor:
    """Exchange tokens sharded by hidden dim for tokens sharded by sequence.

    Shapes: ``[n, h/tp] -> [n/tp, h]``; leading dims are flattened.
    """
    group = resolve_group(group)
    flat = input_.reshape(-1, input_.shape[-1])
    return torch.cat(all_to_all(group, flat).chunk(group.size), dim=-1)
