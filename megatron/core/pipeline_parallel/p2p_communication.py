"""Point-to-point sends and receives between pipeline stages: directed links, their queues and the message order.

All ranks follow one common order of all messages, so that they cannot wait for each other in a cycle. If a rank's
communication is a queue, as on a GPU whose links may not progress independently, a receive that is posted before its
message is due blocks everything after it. With the sends and receives of all ranks in one order, the first unfinished
message is always next on both of its ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.flight_recorder import Channel, Entry, PendingWork
from megatron.core.parallel_state import make_communicator
from megatron.core.pipeline_parallel.schedule_actions import RECEIVES_AHEAD, Action, Pass, StagePlace
from megatron.core.pipeline_parallel.simulator import MessageRules, simulate
from megatron.core.process_group import Group
from megatron.core.process_state import resolve_group


class Transfer(Enum):
    """Next operation of a rank on its links."""

    SEND = "send"
    RECEIVE_ACTIVATION = "receive_activation"
    RECEIVE_GRADIENT = "receive_gradient"


def message_orders(schedule: Sequence[Sequence[Action]], num_chunks: int = 1) -> tuple[tuple[Transfer, ...], ...]:
    """Return each rank's sends and receives, as a part of one total order of all messages.

    Messages are ordered by their send times in a simulation in which sends do not block; ties go to the lower rank. A
    pass that needs a message starts after the message was sent, so that a receive is never due before a send that
    precedes it in this order.

    Raises:
        ScheduleError: the schedule cannot run.
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
    """Message orders of one rank of a pipeline, computed once for each list of actions."""

    def __init__(self, place: StagePlace) -> None:
        self._place = place
        self._known: dict[tuple[Action, ...], tuple[Transfer, ...]] = {}

    def of(self, actions_of: Callable[[int], Sequence[Action]]) -> tuple[Transfer, ...]:
        """Return the order of this rank's transfers for the schedule whose actions on rank r are ``actions_of(r)``."""
        own = tuple(actions_of(self._place.rank))
        if own not in self._known:
            schedule = [actions_of(rank) for rank in range(self._place.pp)]
            self._known[own] = message_orders(schedule, self._place.num_chunks)[self._place.rank]
        return self._known[own]


@dataclass(frozen=True, eq=False)
class Link:
    """Link between two ranks of ``pipeline`` in one direction.

    ``handle`` is a communicator in which neither rank has another link with this ``tag``, or None if the world has no
    processes. ``flight`` records its messages on both ends, if the pipeline's communications are recorded.
    """

    sender: int
    receiver: int
    handle: dist.ProcessGroup | None
    pipeline: Group
    flight: Channel | None = None
    tag: int = 0

    def send(self, tensor: torch.Tensor) -> PendingWork:
        """Start sending a contiguous tensor; this rank must be the sender."""
        entry = None if self.flight is None else self.flight.begin("send", tensor, tensor.nbytes)
        work = dist.isend(tensor, dst=self.receiver, group=self.handle, tag=self.tag)
        return self._under_way(work, entry)

    def receive(self, buffer: torch.Tensor) -> PendingWork:
        """Start receiving into a tensor; this rank must be the receiver."""
        entry = None if self.flight is None else self.flight.begin("receive", buffer, buffer.nbytes)
        work = dist.irecv(buffer, src=self.sender, group=self.handle, tag=self.tag)
        return self._under_way(work, entry)

    def _under_way(self, work: PendingWork | None, entry: Entry | None) -> PendingWork:
        assert work is not None, "this rank is not that end of the link"
        if entry is not None and self.flight is not None:
            work = self.flight.end(entry, work)
        assert work is not None
        return work


@dataclass(frozen=True, eq=False)
class PipelineLinks:
    """A rank's links to its neighbors; ``None`` for links that the rank does not have."""

    activations_in: Link | None = None
    activations_out: Link | None = None
    gradients_in: Link | None = None
    gradients_out: Link | None = None

    @property
    def post_receives_ahead(self) -> bool:
        """Return whether receives may be posted before their messages are due, because links progress independently.

        Gloo progresses each message separately. With NCCL a receive is a kernel that occupies SMs until it is matched,
        and the kernels of two communicators may not run concurrently.
        """
        handles = (link.handle for link in (self.activations_in, self.activations_out) if link is not None)
        return all(handle is None or dist.get_backend(handle) == "gloo" for handle in handles)


MessageShape = Callable[[int], tuple[int, ...]]
"""Returns the shape of a micro-batch's activations between stages: ``[s/cp/tp, b, h]``."""


def create_pipeline_links(
    pp: Group, *, wraps_around: bool = False, timeout: timedelta | None = None, device: torch.device | None = None
) -> PipelineLinks:
    """Create the communicators of the pipeline's links and return this rank's links; collective over the group.

    One element on ``device``, the device of the messages (CPU by default), is sent over every link to connect it.

    Neighboring links alternate between two communicators per direction, each over all ranks of the pipeline. A
    communicator runs its operations in order: if both directions shared one, two ranks that send to each other would
    deadlock; if the links on both sides of a rank shared one, a receive that is posted early would block the sends
    after it. One communicator for each pair of ranks is not possible: torch names a group by the number of groups that
    its members have created, which must then be equal.

    ``wraps_around`` adds the links from the last rank to the first, which interleaved chunks need. With an odd number
    of ranks these need a third communicator.
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
    # All ranks iterate in the same order: the first use of a link may block either end until the other end joins.
    for key in sorted(links):
        _connect(links[key], pp.ranks[own], device)
    return PipelineLinks(
        activations_in=links.get((False, previous)),
        activations_out=links.get((False, own)),
        gradients_in=links.get((True, own)),
        gradients_out=links.get((True, previous)),
    )


def shared_links(pp: Group, *, wraps_around: bool = False) -> PipelineLinks:
    """Return this rank's links over the pipeline's own communicator, without creating any.

    Tags distinguish activations from gradients. NCCL ignores tags, so there all ranks need one order of messages.
    """
    previous, own, following = (pp.ranks[(pp.rank + step) % pp.size] for step in (-1, 0, 1))
    has_previous, has_next = wraps_around or not pp.is_first, wraps_around or not pp.is_last
    return PipelineLinks(
        activations_in=Link(previous, own, pp.handle, pp) if has_previous else None,
        activations_out=Link(own, following, pp.handle, pp) if has_next else None,
        gradients_in=Link(following, own, pp.handle, pp, tag=1) if has_next else None,
        gradients_out=Link(own, previous, pp.handle, pp, tag=1) if has_previous else None,
    )


def message_device(pp: Group) -> torch.device:
    """Return the device of messages over the pipeline's own communicator: CUDA with NCCL, otherwise the CPU."""
    return torch.device("cuda" if pp.handle is not None and "nccl" in dist.get_backend(pp.handle) else "cpu")


def _connect(link: Link, rank: int, device: torch.device | None) -> None:
    """Send one element over a link, if it has a communicator, so that its first message finds it connected."""
    if link.handle is None:
        return
    element = torch.zeros(1, device=device)
    (link.send(element) if rank == link.sender else link.receive(element)).wait()


def _turn_of(pp: Group) -> Callable[[int], int]:
    """Return a function that maps a link, given by its first rank, to the index of its communicator."""
    return lambda index: 2 if pp.size % 2 and index == pp.size - 1 else index % 2


def _make_communicator(pp: Group, timeout: timedelta | None) -> dist.ProcessGroup | None:
    if pp.handle is None:
        return None
    return make_communicator(pp.ranks, timeout, pp.options)


class ReceiveQueue:
    """Queue that receives the messages of one iteration on one link, with ``receives_ahead`` receives posted ahead.

    If it is 0, the caller posts each receive before taking the message.
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
        """Wait for the next message and return it; if receives are posted ahead, post a later one first."""
        work, buffer = self._posted.popleft()
        work.wait()
        if self._receives_ahead:
            self.post()
        return buffer

    def post(self) -> None:
        """Post the next receive; do nothing after the last message."""
        shape = next(self._shapes, None)
        if shape is None:
            return
        buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._posted.append((self._link.receive(buffer), buffer))


class SendQueue:
    """Queue that sends messages over one link, with at most ``max_unfinished`` in flight."""

    def __init__(self, link: Link, max_unfinished: int) -> None:
        self._link = link
        self._max_unfinished = max_unfinished
        self._unfinished: deque[tuple[PendingWork, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Start sending a contiguous tensor, then wait for the oldest sends if too many are in flight."""
        self._link.pipeline.observe("send", tensor.nbytes)
        self._unfinished.append((self._link.send(tensor), tensor))
        while len(self._unfinished) > self._max_unfinished:
            self._unfinished.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until every message is sent."""
        while self._unfinished:
            self._unfinished.popleft()[0].wait()


class LocalQueue:
    """Queue between the chunks of a single-rank pipeline, as a replacement for a link from a rank to itself."""

    def __init__(self) -> None:
        self._messages: deque[torch.Tensor] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Store a message."""
        self._messages.append(tensor)

    def take(self) -> torch.Tensor:
        return self._messages.popleft()

    def finish(self) -> None:
        """Do nothing: no message is in flight."""


Tensors = torch.Tensor | list[torch.Tensor | None] | None
Shapes = Sequence[int] | Sequence[Sequence[int]]


def is_single_shape(x: object) -> bool:
    """Return whether ``x`` is one shape, not a list of shapes."""
    return isinstance(x, torch.Size) or (isinstance(x, (list, tuple)) and all(isinstance(size, int) for size in x))


class P2PCommunicator:
    """megatron-core's sends and receives between neighboring stages, for schedules of one's own.

    ``pp_group`` is the pipeline, and ``config`` has ``pipeline_dtype`` and ``variable_seq_lengths``. A method with
    several shapes takes and returns lists. Received tensors require a gradient. All methods wait for their messages,
    except with ``overlap_p2p_comm``, where they also return the works to wait for, by name.

    Each stage must receive what its neighbor sends, in the same order. Two stages that exchange messages in both
    directions use one method for both.
    """

    def __init__(self, pp_group: dist.ProcessGroup | Group, config: Any) -> None:
        self.pp = resolve_group(pp_group, "pp")
        self.pp_group, self.config = self.pp.handle, config
        self.next_rank = self.pp.ranks[(self.pp.rank + 1) % self.pp.size]
        self.prev_rank = self.pp.ranks[(self.pp.rank - 1) % self.pp.size]
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def recv_forward(self, tensor_shapes: Shapes, is_first_stage: bool) -> Tensors:
        """Receive the previous stage's output; None on the first stage."""
        return self._each(
            tensor_shapes, lambda shape, _: None if is_first_stage else self._exchange(receive_prev=shape)[0]
        )

    def recv_backward(self, tensor_shapes: Shapes, is_last_stage: bool) -> Tensors:
        """Receive the gradient of this stage's output; None on the last stage."""
        return self._each(
            tensor_shapes, lambda shape, _: None if is_last_stage else self._exchange(receive_next=shape)[1]
        )

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send this stage's output to the next stage, unless this is the last."""
        for tensor in output_tensors if isinstance(output_tensors, list) else [output_tensors]:
            if tensor is not None and not is_last_stage:
                self._exchange(to_next=tensor)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send the gradient of this stage's input to the previous stage, unless this is the first."""
        for tensor in input_tensor_grads if isinstance(input_tensor_grads, list) else [input_tensor_grads]:
            if tensor is not None and not is_first_stage:
                self._exchange(to_prev=tensor)

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Shapes, is_last_stage: bool
    ) -> Tensors:
        """Send this stage's output and receive the output's gradient; None on the last stage."""
        return self._each(
            tensor_shapes,
            lambda shape, tensor: None if is_last_stage else self._exchange(to_next=tensor, receive_next=shape)[1],
            output_tensors,
        )

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Shapes, is_first_stage: bool
    ) -> Tensors:
        """Send the gradient of this stage's input and receive the next input; None on the first stage."""
        return self._each(
            tensor_shapes,
            lambda shape, tensor: None if is_first_stage else self._exchange(to_prev=tensor, receive_prev=shape)[0],
            input_tensor_grads,
        )

    def send_forward_recv_forward(
        self,
        output_tensor: torch.Tensor | None,
        recv_prev: bool,
        tensor_shape: Sequence[int],
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send this stage's output to the next stage while receiving the previous stage's."""
        received, _, works = self._exchange(
            to_next=output_tensor, receive_prev=tensor_shape if recv_prev else None, waits=not overlap_p2p_comm
        )
        return (received, works) if overlap_p2p_comm else received

    def send_backward_recv_backward(
        self,
        input_tensor_grad: torch.Tensor | None,
        recv_next: bool,
        tensor_shape: Sequence[int],
        overlap_p2p_comm: bool = False,
    ) -> Any:
        """Send the gradient of this stage's input to the previous stage while receiving that of its output."""
        _, received, works = self._exchange(
            to_prev=input_tensor_grad, receive_next=tensor_shape if recv_next else None, waits=not overlap_p2p_comm
        )
        return (received, works) if overlap_p2p_comm else received

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: torch.Tensor | None,
        input_tensor_grad: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send to both neighbors and receive from both; return the input and the gradient of the output."""
        received, gradient, _ = self._exchange(
            to_next=output_tensor,
            to_prev=input_tensor_grad,
            receive_prev=tensor_shape if recv_prev else None,
            receive_next=tensor_shape if recv_next else None,
        )
        return received, gradient

    def _each(
        self,
        shapes: Shapes,
        exchange: Callable[[Any, torch.Tensor | None], torch.Tensor | None],
        tensors: Tensors = None,
    ) -> Tensors:
        """Exchange one tensor per shape; a single shape has a single tensor."""
        is_single = is_single_shape(shapes)
        listed = [shapes] if is_single else shapes
        if not isinstance(tensors, list):
            tensors = [None] * len(listed) if tensors is None else [tensors]
        received = [exchange(shape, tensor) for shape, tensor in zip(listed, tensors, strict=True)]
        return received[0] if is_single else received

    def _exchange(
        self,
        *,
        to_next: torch.Tensor | None = None,
        to_prev: torch.Tensor | None = None,
        receive_prev: Sequence[int] | None = None,
        receive_next: Sequence[int] | None = None,
        waits: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, PendingWork]]:
        """Send to and receive from both neighbors, and return the two received tensors and the pending works."""
        dtype = self.config.pipeline_dtype
        if dtype is None and (receive_prev is not None or receive_next is not None):
            raise RuntimeError("pipeline_dtype is None; set it to the dtype of the tensors between stages")
        device = message_device(self.pp)
        if self.config.variable_seq_lengths:
            receive_prev, receive_next = self._exchange_shapes(to_next, to_prev, receive_prev, receive_next, device)
        received = [
            None if shape is None else torch.empty(tuple(shape), dtype=dtype, device=device, requires_grad=True)
            for shape in (receive_prev, receive_next)
        ]
        works = self._start(to_next, to_prev, *received)
        if waits:
            for work in works.values():
                work.wait()
            works = {}
        return received[0], received[1], works

    def _exchange_shapes(
        self,
        to_next: torch.Tensor | None,
        to_prev: torch.Tensor | None,
        receive_prev: Sequence[int] | None,
        receive_next: Sequence[int] | None,
        device: torch.device,
    ) -> tuple[Sequence[int] | None, Sequence[int] | None]:
        """Exchange the shapes of the tensors that are about to be exchanged; they have three dims."""
        for each in (to_next, to_prev):
            assert each is None or each.dim() == 3, (
                f"variable_seq_lengths needs tensors of three dims, found shape {tuple(each.shape)}"
            )
        sent = [None if each is None else torch.tensor(each.shape, device=device) for each in (to_next, to_prev)]
        received = [
            None if each is None else torch.empty(3, dtype=torch.int64, device=device)
            for each in (receive_prev, receive_next)
        ]
        for work in self._start(*sent, *received).values():
            work.wait()
        of_prev, of_next = (None if each is None else each.tolist() for each in received)
        return of_prev, of_next

    def _start(
        self,
        to_next: torch.Tensor | None,
        to_prev: torch.Tensor | None,
        from_prev: torch.Tensor | None,
        from_next: torch.Tensor | None,
    ) -> dict[str, PendingWork]:
        """Start sends and receives together, and return their works by name."""
        names, operations = [], []
        for name, operation, tensor, peer in (
            ("recv_prev", dist.irecv, from_prev, self.prev_rank),
            ("send_next", dist.isend, to_next, self.next_rank),
            ("recv_next", dist.irecv, from_next, self.next_rank),
            ("send_prev", dist.isend, to_prev, self.prev_rank),
        ):
            if tensor is not None:
                names.append(name)
                operations.append(dist.P2POp(operation, tensor.detach().contiguous(), peer, group=self.pp_group))
        works = dist.batch_isend_irecv(operations) if operations else []
        # NCCL coalesces all of them in one work.
        return dict(zip(names, works * len(names) if len(works) == 1 else works))
