"""Collectives over a ``Group``; each returns at once for a group of one rank.

Every communication outside pipeline sends goes through these functions, so that the traffic of a parallel layout can be
inspected, counted and traced in one place. Ranks must start the collectives of all groups in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.core.errors import MegatronError
from megatron.core.flight_recorder import PendingWork
from megatron.core.process_group import Group
from megatron.core.shared_memory import shared_memory_of

Result = TypeVar("Result")
_PIECE_BYTES = 1 << 26

# torch 2.13 deprecates the *_tensor names; older releases know only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}


def _is_alone(group: Group) -> bool:
    """Return whether the group has a single rank."""
    assert group.size == 1 or group.handle is not None, f"group {group.name} is only described: it has no communicator"
    return group.size == 1


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum", async_op: bool = False) -> PendingWork | None:
    """Reduce ``tensor`` in place over the group; return a handle to wait for when ``async_op``."""
    if _is_alone(group):
        return None
    group.observe("all_reduce", tensor.nbytes, op)
    entry = group.begin("all_reduce", tensor, tensor.nbytes)
    memory = shared_memory_of(group, tensor) if op == "sum" and tensor.is_contiguous() else None
    if memory is not None:
        return group.end(entry, memory.all_reduce(tensor, async_op))
    return group.end(entry, dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=group.handle, async_op=async_op))


def all_gather_into(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, async_op: bool = False
) -> PendingWork | None:
    """Gather equal contiguous tensors into ``output``, concatenated along dim 0 in group order."""
    if _is_alone(group):
        output.view_as(tensor).copy_(tensor)
        return None
    group.observe("all_gather", output.nbytes)
    entry = group.begin("all_gather", output, output.nbytes)
    memory = shared_memory_of(group, tensor)
    if memory is not None:
        return group.end(entry, memory.all_gather(output, tensor, async_op))
    return group.end(entry, _all_gather_single(output, tensor, group=group.handle, async_op=async_op))


def reduce_scatter_into(
    output: torch.Tensor, tensor: torch.Tensor, group: Group, op: str = "sum", async_op: bool = False
) -> PendingWork | None:
    """Reduce a contiguous ``tensor`` over the group and write this rank's equal shard along dim 0 to ``output``."""
    if _is_alone(group):
        output.view_as(tensor).copy_(tensor)
        return None
    group.observe("reduce_scatter", tensor.nbytes, op)
    entry = group.begin("reduce_scatter", tensor, tensor.nbytes)
    memory = shared_memory_of(group, tensor) if op == "sum" else None
    if memory is not None:
        return group.end(entry, memory.reduce_scatter(output, tensor, async_op))
    work = _reduce_scatter_single(output, tensor, op=_REDUCE_OPS[op], group=group.handle, async_op=async_op)
    return group.end(entry, work)


def all_gather_first_dim(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the group's tensors concatenated along dim 0.

    Shapes: ``[n, ...] -> [n * group.size, ...]``.
    """
    if _is_alone(group):
        return tensor
    output = tensor.new_empty((tensor.shape[0] * group.size, *tensor.shape[1:]))
    all_gather_into(output, tensor.contiguous(), group)
    return output


def reduce_scatter_first_dim(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's shard along dim 0 of the sum over the group.

    Shapes: ``[n, ...] -> [n / group.size, ...]``.
    """
    if _is_alone(group):
        return tensor
    output = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
    reduce_scatter_into(output, tensor.contiguous(), group)
    return output


def all_gather_last_dim(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the group's tensors concatenated along the last dim.

    Shapes: ``[..., n] -> [..., n * group.size]``.
    """
    if _is_alone(group):
        return tensor
    return torch.cat(all_gather_first_dim(tensor, group).chunk(group.size), dim=-1)


def all_to_all_first_dim(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Send row i of ``tensor`` to the group's rank i, and return the received rows in group order.

    Shapes: ``[group.size, ...] -> [group.size, ...]``.
    """
    if _is_alone(group):
        return tensor
    group.observe("all_to_all", tensor.nbytes)
    output = tensor.new_empty(tensor.shape)
    entry = group.begin("all_to_all", tensor, tensor.nbytes)
    dist.all_to_all_single(output, tensor.contiguous(), group=group.handle)
    group.end(entry)
    return output


def all_to_all_rows(
    tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Group, async_op: bool = False
) -> tuple[torch.Tensor, PendingWork | None]:
    """Send ``sent[i]`` rows of ``tensor`` to the group's rank i, and return the received rows in group order.

    With ``async_op`` the result may be used only after waiting for the returned work.

    Shapes: ``[sum(sent), ...] -> [sum(received), ...]``.
    """
    if _is_alone(group):
        return tensor, None
    group.observe("all_to_all", tensor.nbytes)
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    entry = group.begin("all_to_all", tensor, tensor.nbytes)
    work = dist.all_to_all_single(
        output, tensor.contiguous(), list(received), list(sent), group=group.handle, async_op=async_op
    )
    return output, group.end(entry, work)


@dataclass(frozen=True)
class _Together:
    """Wait for several communications as for a single one."""

    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True)
class RingExchange:
    """Ring exchange in flight; neither of its tensors may be used before ``wait``."""

    sent: torch.Tensor
    received: torch.Tensor
    works: tuple[PendingWork, ...]

    def wait(self) -> torch.Tensor:
        """Wait for the exchange and return the tensor that the previous rank sent."""
        for work in self.works:
            work.wait()
        return self.received


def start_ring_exchange(tensor: torch.Tensor, group: Group, received: torch.Tensor | None = None) -> RingExchange:
    """Start sending a contiguous tensor to the next rank of the group and receiving one from the previous rank.

    The result is written to ``received`` if it is given.
    """
    if _is_alone(group):
        return RingExchange(tensor, tensor, ())
    received = torch.empty_like(tensor) if received is None else received
    next_rank = group.ranks[(group.rank + 1) % group.size]
    previous_rank = group.ranks[(group.rank - 1) % group.size]
    group.observe("send", tensor.nbytes)
    entry = group.begin("ring_exchange", tensor, tensor.nbytes)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, next_rank, group=group.handle),
            dist.P2POp(dist.irecv, received, previous_rank, group=group.handle),
        ]
    )
    pending = group.end(entry, _Together(tuple(works)))
    return RingExchange(tensor, received, () if pending is None else (pending,))


def exchange_bytes(
    sent: torch.Tensor | None,
    target: int | None,
    received: torch.Tensor | None,
    source: int | None,
    group: Group,
    device: torch.device,
) -> None:
    """Send bytes to one rank of the group while receiving bytes from another; either side may be None.

    Both tensors are in host memory and are staged through ``device`` in chunks. The two ends of a message pass tensors
    of the same size. A rank that sends to itself passes both tensors.

    Shapes: ``sent: [n]``, ``received: [m]`` uint8.

    Raises:
        GivenUpError: communication was given up; ``received`` is incomplete.
    """
    if target == group.rank and sent is not None and received is not None:
        received.copy_(sent)
        return
    outgoing, incoming = _pieces(sent), _pieces(received)
    own, entries = group.ranks[group.rank], []
    if sent is not None and target is not None:
        entries.append(group.begin("send_bytes", sent, sent.nbytes, (own, group.ranks[target])))
    if received is not None and source is not None:
        entries.append(group.begin("receive_bytes", received, received.nbytes, (group.ranks[source], own)))
    for out, into in zip_longest(outgoing, incoming):
        works, landed = [], None
        if out is not None and target is not None:
            works.append(dist.P2POp(dist.isend, out.to(device), group.ranks[target], group=group.handle))
        if into is not None and source is not None:
            landed = into if device.type == "cpu" else torch.empty_like(into, device=device)
            works.append(dist.P2POp(dist.irecv, landed, group.ranks[source], group=group.handle))
        for work in dist.batch_isend_irecv(works):
            work.wait()
        if landed is not None and landed is not into:
            into.copy_(landed)
    for entry in entries:
        group.end(entry)
    group.ensure_not_given_up()


def _pieces(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    length = 0 if tensor is None else tensor.numel()
    return [] if tensor is None else [tensor[start : start + _PIECE_BYTES] for start in range(0, length, _PIECE_BYTES)]


def broadcast(tensor: torch.Tensor, group: Group, source: int = 0, async_op: bool = False) -> PendingWork | None:
    """Overwrite ``tensor`` with the copy of the group's rank ``source``."""
    if _is_alone(group):
        return None
    group.observe("broadcast", tensor.nbytes)
    entry = group.begin("broadcast", tensor, tensor.nbytes)
    return group.end(entry, dist.broadcast(tensor, src=group.ranks[source], group=group.handle, async_op=async_op))


def broadcast_object(value: Any, group: Group, source: int = 0) -> Any:
    """Return the picklable value of the group's rank ``source`` on every rank."""
    if _is_alone(group):
        return value
    box = [value if group.rank == source else None]
    entry = group.begin("broadcast_object")
    dist.broadcast_object_list(box, src=group.ranks[source], group=group.handle)
    group.end(entry)
    return box[0]


def all_gather_objects(value: Any, group: Group) -> list[Any]:
    """Return every rank's picklable value in group order."""
    if _is_alone(group):
        return [value]
    values: list[Any] = [None] * group.size
    entry = group.begin("all_gather_objects")
    dist.all_gather_object(values, value, group=group.handle)
    group.end(entry)
    return values


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Return every rank's picklable value in group order on the group's first rank, and nothing on the others."""
    if _is_alone(group):
        return [value]
    values: list[Any] | None = [None] * group.size if group.is_first else None
    entry = group.begin("gather_objects")
    dist.gather_object(value, values, dst=group.ranks[0], group=group.handle)
    group.end(entry)
    return values or []


def any_rank(flag: bool, group: Group) -> bool:
    """Return on every rank whether ``flag`` is true on any rank of the group."""
    if _is_alone(group):
        return flag
    device = "cuda" if dist.get_backend(group.handle) == "nccl" else "cpu"
    total = torch.tensor(float(flag), device=device)
    all_reduce(total, group, "max")
    is_any = bool(total.item())
    group.ensure_not_given_up()
    return is_any


def raise_on_all_ranks(error: MegatronError | None, group: Group) -> None:
    """Raise on every rank the error of the first rank that reports one; return if no rank does.

    The error objects are exchanged only if there is an error.
    """
    if any_rank(error is not None, group):
        raise next(reported for reported in all_gather_objects(error, group) if reported is not None)


def run_on_all_ranks(action: Callable[[], Result], group: Group) -> Result:
    """Return the result of ``action`` on this rank, and raise an error of any rank on all ranks; collective.

    Raises:
        MegatronError: the action raised it on at least one rank.
    """
    result: list[Result] = []
    error: MegatronError | None = None
    try:
        result.append(action())
    except MegatronError as failure:
        error = failure
    raise_on_all_ranks(error, group)
    return result[0]


def barrier(group: Group) -> None:
    """Wait until every rank of the group has reached the barrier."""
    if not _is_alone(group):
        entry = group.begin("barrier")
        dist.barrier(group=group.handle)
        group.end(entry)
