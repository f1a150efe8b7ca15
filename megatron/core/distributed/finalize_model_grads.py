"""What is left to do to gradients between the last backward pass and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.collectives import all_reduce, broadcast
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group
from megatron.core.sharding import spec_of


def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    state: ParallelState,
    num_tokens: torch.Tensor | None = None,
) -> None:
    """Finish the data-parallel reduction, sum partial gradients over the tensor-parallel ranks, apply the divisor.

    ``num_tokens`` is the number of tokens that this rank's loss sums ran over in all micro-batches of the iteration
    (only the last pipeline stage's value is used); given, every gradient is divided by its total over the batch.

    Shapes: ``num_tokens: []``.
    """
    for chunk in model_chunks:
        chunk.finish_grad_sync()
    reduce_partial_gradients([parameter for chunk in model_chunks for parameter in chunk.parameters()], state.tp)
    if num_tokens is not None:
        total = num_tokens.to(torch.float64, copy=True)
        broadcast(total, state.pp, source=state.pp.size - 1)
        all_reduce(total, state.dp_cp)
        divisor = total.clamp(min=1).reciprocal()
        for chunk in model_chunks:
            chunk.scale_gradients(divisor)


def reduce_partial_gradients(parameters: Sequence[torch.nn.Parameter], tp: Group) -> None:
    """Sum over the copies of a parameter where each tensor-parallel rank has computed only a part of its gradient.

    Copies within the group are consecutive ranks: all of them for a norm under sequence parallelism, the sharers of
    a key-value head otherwise. Whoever shares, one collective for each dtype carries everything: every set of copies
    has a slot of its own in it.
    """
    if tp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        main_grad = main_grad_of(parameter)
        if main_grad is not None and "tp" in spec_of(parameter).gradient_sum_axes:
            by_dtype.setdefault(main_grad.tensor.dtype, []).append(parameter)
    for dtype, group_parameters in by_dtype.items():
        _reduce_in_slots(group_parameters, dtype, tp)


def _reduce_in_slots(parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype, tp: Group) -> None:
    slots: list[tuple[torch.Tensor, int, int]] = []
    length = 0
    for parameter in parameters:
        spec = spec_of(parameter)
        assert tp.rank % spec.num_replicas == spec.replica_index, f"{spec.name}: copies are not consecutive ranks"
        main_grad = main_grad_of(parameter)
        assert main_grad is not None
        grad = main_grad.tensor
        start = length + tp.rank // spec.num_replicas * grad.numel()
        slots.append((grad, start, start + grad.numel()))
        length += tp.size // spec.num_replicas * grad.numel()
    flat = torch.zeros(length, dtype=dtype, device=slots[0][0].device)
    for grad, start, end in slots:
        flat[start:end].copy_(grad.view(-1))
    all_reduce(flat, tp)
    for grad, start, end in slots:
        grad.view(-1).copy_(flat[start:end])
