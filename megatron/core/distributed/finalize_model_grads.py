"""Final gradient reductions between the last backward pass and the optimizer, and normalization of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.collectives import all_reduce, broadcast
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.flat_parameters import ParamShard
from megatron.core.parallel_state import ParallelState
from megatron.core.process_group import Group
from megatron.core.timers import Timers


def finalize_model_grads(
    model_chunks: Sequence[DistributedDataParallel],
    state: ParallelState,
    num_tokens: torch.Tensor | None = None,
    timers: Timers | None = None,
) -> None:
    """Finish the data-parallel reduction, sum partial gradients over ranks with copies, and normalize.

    Copies exist within the tensor-parallel group, and of the word embedding on the first and the last pipeline stage.
    ``num_tokens`` is the number of tokens in this rank's loss sums over all micro-batches of the iteration; only the
    last pipeline stage's value is used. If it is given, every gradient is divided by its total over the global batch.
    ``timers`` time the two sums.

    Shapes: ``num_tokens: []``.
    """
    for chunk in model_chunks:
        chunk.finish_grad_sync()
    shards = [shard for chunk in model_chunks for shard in chunk.shards]
    timers = timers or Timers()
    if state.tp.size > 1:
        with timers("layernorm-grads-all-reduce", log_level=1):
            reduce_partial_gradients(shards, state.tp)
    if state.embedding.size > 1:
        with timers("embedding-grads-all-reduce", log_level=1):
            reduce_tied_gradients(shards, state.embedding)
    if num_tokens is not None:
        total = num_tokens.to(torch.float64, copy=True)
        broadcast(total, state.pp, source=state.pp.size - 1)
        all_reduce(total, state.dp_cp)
        divisor = total.clamp(min=1).reciprocal()
        for chunk in model_chunks:
            chunk.scale_gradients(divisor)


def reduce_tied_gradients(shards: Sequence[ParamShard], embedding: Group) -> None:
    """All-reduce the gradients of tied weights over the first and the last pipeline stage.

    Each copy has its own bucket, so that both ranks hold the same elements of it.
    """
    if embedding.size == 1:
        return
    tied = [shard for shard in shards if shard.spec.is_tied_over_pipeline]
    for shard in sorted(tied, key=lambda shard: (shard.spec.name, shard.start)):
        all_reduce(shard.gradient, embedding)


def reduce_partial_gradients(shards: Sequence[ParamShard], tp: Group) -> None:
    """All-reduce the gradients of replicated parameters of which each tensor-parallel rank has only a partial gradient.

    Copies are on consecutive ranks: on all ranks for a norm under sequence parallelism, or on the ranks that share a
    key-value head. One all-reduce per dtype handles all parameters: each set of copies has a separate slot in it.
    """
    if tp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[ParamShard]] = {}
    for shard in shards:
        if "tp" in shard.spec.gradient_sum_axes:
            by_dtype.setdefault(shard.gradient.dtype, []).append(shard)
    for dtype, shards_of_dtype in by_dtype.items():
        _reduce_in_slots(shards_of_dtype, dtype, tp)


def _reduce_in_slots(shards: Sequence[ParamShard], dtype: torch.dtype, tp: Group) -> None:
    slots: list[tuple[torch.Tensor, int, int]] = []
    length = 0
    for shard in shards:
        spec, grad = shard.spec, shard.gradient
        assert tp.rank % spec.num_replicas == spec.replica_index, f"{spec.name}: copies are not consecutive ranks"
        start = length + tp.rank // spec.num_replicas * grad.numel()
        slots.append((grad, start, start + grad.numel()))
        length += tp.size // spec.num_replicas * grad.numel()
    flat = torch.zeros(length, dtype=dtype, device=slots[0][0].device)
    gradients, own = [grad for grad, _, _ in slots], [flat[start:end] for _, start, end in slots]
    torch._foreach_copy_(own, gradients)
    all_reduce(flat, tp)
    torch._foreach_copy_(gradients, own)
