"""Point-to-point sends and receives between pipeline stages: directed links, their queues and the message order.

All ranks keep one common order of all messages, so that no ranks wait for each other in a cycle. If a rank's
communication is a queue, as on a GPU whose links may not progress independently, a receive that is posted before its
message is due blocks whatever comes after it. With the sends and receives of all ranks in one order, the first message
that is not finished is always next on both of its ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist

from megatron.core.flight_recorder import Channel, Entry, PendingWork
from megatron.core.pipeline_parallel.schedules import RECEIVES_AHEAD, Action, Pass, StagePlace
from megatron.core.pipeline_parallel.simulator import MessageRules, simulate
from megatron.core.process_group import Group


class Transfer(Enum):
    """Name what a rank does next with its links."""

    SEND = "send"
    RECEIVE_ACTIVATION = "receive_activation"
    RECEIVE_GRADIENT = "receive_gradient"


def message_orders(schedule: Sequence[Sequence[Action]], num_chunks: int = 1) -> tuple[tuple[Transfer, ...], ...]:
    """Return each rank's sends and receives in an order that is part of one order of all messages.

    Messages are ordered by when they leave in a simulation without waits for sends, the lower rank first. A rank takes
    a message for a pass that begins when it has left or later, so that a receive is never due before a send that it
    follows here.

    Raises:
        ScheduleError: the schedule cannot run at all.
    """
    pp = len(schedule)
    timeline = simulate(schedule, num_chunks, rules=MessageRules(rendezvous=False, sends_in_flight=None))
    messages = []
    for rank, run in enumerate(timeline.ranks):
        place = StagePlace(pp, rank, num_chunks)
        for action, end in zip(run.actions, run.ends):
            if place.sends(action.kind, action.chunk):
                is_gradient = action.kind is not Pass.FORWARD
                messages.append((end, rank, place.previous_rank if is_gradient else place.next_rank, is_gradient))
    orders: list[list[Transfer]] = [[] for _ in schedule]
    for _, sender, receiver, is_gradient in sorted(messages):
        orders[sender].append(Transfer.SEND)
        orders[receiver].append(Transfer.RECEIVE_GRADIENT if is_gradient else Transfer.RECEIVE_ACTIVATION)
    return tuple(map(tuple, orders))


class MessageOrders:
    """Give one rank of a pipeline its order for every list of actions that it runs; each is worked out once."""

    def __init__(self, place: StagePlace) -> None:
        self._place = place
        self._known: dict[tuple[Action, ...], tuple[Transfer, ...]] = {}

    def of(self, actions_of: Callable[[int], Sequence[Action]]) -> tuple[Transfer, ...]:
        """Return the order of the schedule that gives each rank of the pipeline its actions."""
        own = tuple(actions_of(self._place.rank))
        if own not in self._known:
            schedule = [actions_of(rank) for rank in range(self._place.pp)]
            self._known[own] = message_orders(schedule, self._place.num_chunks)[self._place.rank]
        return self._known[own]


@dataclass(frozen=True, eq=False)
class Link:
    """Join two ranks of ``pipeline`` in one direction.

    ``handle`` is a communicator in which neither rank has another link; None where the world is only described.
    ``flight`` records its messages, on either end, where the pipeline's own are recorded.
    """

    sender: int
    receiver: int
    handle: dist.ProcessGroup | None
    pipeline: Group
    flight: Channel | None = None

    def send(self, tensor: torch.Tensor) -> PendingWork:
        """Start to send a contiguous tensor; this rank must be the sender."""
        entry = None if self.flight is None else self.flight.begin("send", tensor, tensor.nbytes)
        work = dist.isend(tensor, dst=self.receiver, group=self.handle)
        return self._under_way(work, entry)

    def receive(self, buffer: torch.Tensor) -> PendingWork:
        """Start to receive into a tensor; this rank must be the receiver."""
        entry = None if self.flight is None else self.flight.begin("receive", buffer, buffer.nbytes)
        work = dist.irecv(buffer, src=self.sender, group=self.handle)
        return self._under_way(work, entry)

    def _under_way(self, work: PendingWork | None, entry: Entry | None) -> PendingWork:
        assert work is not None, "this rank is not that end of the link"
        if entry is not None and self.flight is not None:
            work = self.flight.end(entry, work)
        assert work is not None
        return work


@dataclass(frozen=True, eq=False)
class PipelineLinks:
    """Hold a rank's links to its neighbors; ``None`` where nothing travels."""

    activations_in: Link | None = None
    activations_out: Link | None = None
    gradients_in: Link | None = None
    gradients_out: Link | None = None

    @property
    def post_receives_ahead(self) -> bool:
        """Return whether a receive may be posted before its message is due: where links progress independently.

        Gloo moves each message by itself. With NCCL a receive is a kernel, which holds multiprocessors until it is
        matched, and the kernels of two communicators need not run at the same time.
        """
        handles = (link.handle for link in (self.activations_in, self.activations_out) if link is not None)
        return all(handle is None or dist.get_backend(handle) == "gloo" for handle in handles)


MessageShape = Callable[[int], tuple[int, ...]]
"""Return the shape of a micro-batch's activations between stages: ``[s/cp/tp, b, h]``."""


def create_pipeline_links(
    pp: Group, *, wraps_around: bool = False, timeout: timedelta | None = None, device: torch.device | None = None
) -> PipelineLinks:
    """Make the communicators of the pipeline's links and return this rank's; every rank of the group must call it.

    One element of ``device``, where the messages will lie (the CPU by default), has gone along every link on return.

    Neighboring links alternate between two communicators for each direction, each over all ranks of the pipeline.
    The reason is that a communicator runs its operations in order: if both directions shared one, two ranks that send
    to each other would deadlock; if the links on both sides of a rank shared one, a receive that is posted early would
    hold up the sends behind it. One communicator for each pair of ranks would not do: torch names a group by the
    number of groups that its members have made, which must then be equal.

    ``wraps_around`` adds the links from the last rank to the first, which interleaved chunks need. With an odd number
    of ranks they take a third communicator.
    """
    if pp.size == 1:
        return PipelineLinks()
    num_links = pp.size if wraps_around else pp.size - 1
    own, previous = pp.rank, (pp.rank - 1) % pp.size
    links: dict[tuple[bool, int], Link] = {}
    for is_gradient in (False, True):
        handles = [_make_communicator(pp, timeout) for _ in range(1 + max(map(_turn_of(pp), range(num_links))))]
        for index in (own, previous):
            if index < num_links:
                ends = pp.ranks[index], pp.ranks[(index + 1) % pp.size]
                sender, receiver = ends[::-1] if is_gradient else ends
                flight = None
                if pp.flight is not None:
                    name = f"{'gradients' if is_gradient else 'activations'} {sender}->{receiver}"
                    flight = pp.flight.recorder.channel(name, (sender, receiver))
                links[is_gradient, index] = Link(sender, receiver, handles[_turn_of(pp)(index)], pp, flight)
    # All ranks share the order of the keys: the first use of a link may hold both ends until the other one comes.
    for key in sorted(links):
        _connect(links[key], pp.ranks[own], device)
    return PipelineLinks(
        activations_in=links.get((False, previous)),
        activations_out=links.get((False, own)),
        gradients_in=links.get((True, own)),
        gradients_out=links.get((True, previous)),
    )


def _connect(link: Link, rank: int, device: torch.device | None) -> None:
    """Send one element along a link that exists, so that its first message finds it connected."""
    if link.handle is None:
        return
    element = torch.zeros(1, device=device)
    (link.send(element) if rank == link.sender else link.receive(element)).wait()


def _turn_of(pp: Group) -> Callable[[int], int]:
    """Return a function from a link, by its first rank, to the number of its communicator."""
    return lambda index: 2 if pp.size % 2 and index == pp.size - 1 else index % 2


def _make_communicator(pp: Group, timeout: timedelta | None) -> dist.ProcessGroup | None:
    if pp.handle is None:
        return None
    handle: dist.ProcessGroup = dist.new_group(list(pp.ranks), timeout=timeout, use_local_synchronization=True)
    return handle


class ReceiveQueue:
    """Receive the messages of one iteration along one link in order, with ``receives_ahead`` receives posted ahead.

    Where that is 0, the caller posts each receive before it takes the message.
    """

    def __init__(
        self,
        link: Link,
        shapes: Iterable[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        receives_ahead: int = RECEIVES_AHEAD,
    ) -> None:
        self._link = link
        self._shapes = iter(shapes)
        self._dtype = dtype
        self._device = device
        self._posted: deque[tuple[PendingWork, torch.Tensor]] = deque()
        self._receives_ahead = receives_ahead
        for _ in range(receives_ahead):
            self.post()

    @property
    def is_posted(self) -> bool:
        return bool(self._posted)

    def take(self) -> torch.Tensor:
        """Wait for the next message and return it, after posting the receive of a later one where that is ahead."""
        work, buffer = self._posted.popleft()
        work.wait()
        if self._receives_ahead:
            self.post()
        return buffer

    def post(self) -> None:
        """Post the receive of the next message that has none; do nothing after the last."""
        shape = next(self._shapes, None)
        if shape is None:
            return
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._posted.append((self._link.receive(buffer), buffer))


class SendQueue:
    """Send messages along one link in order, with at most ``max_unfinished`` in flight."""

    def __init__(self, link: Link, max_unfinished: int) -> None:
        self._link = link
        self._max_unfinished = max_unfinished
        self._unfinished: deque[tuple[PendingWork, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Start sending a contiguous tensor, then wait for the oldest sends where too many are in flight."""
        self._link.pipeline.observe("send", tensor.nbytes)
        self._unfinished.append((self._link.send(tensor), tensor))
        while len(self._unfinished) > self._max_unfinished:
            self._unfinished.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until every message is sent."""
        while self._unfinished:
            self._unfinished.popleft()[0].wait()


class LocalQueue:
    """Stand in for a link from a rank to itself, between the chunks of a pipeline of one rank."""

    def __init__(self) -> None:
        self._messages: deque[torch.Tensor] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Keep a message."""
        self._messages.append(tensor)

    def take(self) -> torch.Tensor:
        return self._messages.popleft()

    def finish(self) -> None:
        """Do nothing: no message is on its way."""
