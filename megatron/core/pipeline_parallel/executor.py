"""Run a pipeline schedule: call the model chunks, exchange activations with neighbors, run the backward passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from megatron.core.collectives import all_gather_objects
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.main_grad import WeightGradQueue
from megatron.core.pipeline_parallel.p2p_communication import (
    Link,
    LocalQueue,
    MessageOrders,
    MessageShape,
    PipelineLinks,
    ReceiveQueue,
    SendQueue,
    Transfer,
)
from megatron.core.pipeline_parallel.schedule_actions import RECEIVES_AHEAD, Action, Pass, StagePlace, sends_in_flight
from megatron.core.pipeline_parallel.timeline import RankTimeline, Timeline
from megatron.core.process_group import Group
from megatron.core.timers import Timer, Timers


class StageInput:
    """Captures the gradient of hidden states from the previous chunk, without keeping the hidden states alive."""

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None
        self._anchor = torch.empty(0, requires_grad=True)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states as the start of an autograd graph."""
        result: torch.Tensor = _Enter.apply(self._anchor, hidden, self)  # type: ignore[no-untyped-call]
        return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, entrance: StageInput) -> torch.Tensor:
        ctx.entrance = entrance
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.entrance.grad = grad
        return None, None, None


@dataclass(frozen=True)
class MicrobatchLoss:
    """A micro-batch's masked loss sum, the number of tokens in it, and the last chunk's auxiliary losses.

    Under context parallelism each rank has the sum over its own tokens, and an equal, possibly fractional, share of the
    micro-batch's number of tokens. ``samples`` has the loss sum and the number of tokens of each sample, for this
    rank's own tokens; it is needed if losses are reported per dataset of a blend.

    Shapes: both ``[]``; the sum in at least float32, differentiable. ``samples: [b, 2]`` float64, detached.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    auxiliary: Sequence[AuxiliaryLoss] = ()
    samples: torch.Tensor | None = None


@dataclass(frozen=True)
class ScheduleResult:
    """Loss sum and token count over all micro-batches of this rank, detached.

    Both are zero on a rank without the model's last chunk. ``auxiliary`` has the sum and the count of each auxiliary
    loss of this rank's chunks by name. ``timeline`` is set if a clock was given. ``data_sets`` has the loss sum and the
    token count of each dataset of a blend, if the caller distinguishes them.

    Shapes: both ``[]`` float64; auxiliary losses ``[2]`` float64; ``data_sets: [n, 2]`` float64.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    auxiliary: Mapping[str, torch.Tensor]
    timeline: RankTimeline | None = None
    data_sets: torch.Tensor | None = None


ChunkResult = torch.Tensor | LayerOutput | MicrobatchLoss
"""Result of a chunk for a micro-batch: the loss for the last chunk, otherwise hidden states, with or without losses."""

ChunkForward = Callable[[int, torch.Tensor | None], ChunkResult]
"""Runs one micro-batch through a chunk, given its index and the previous chunk's hidden states (None for the first).

The micro-batches of one chunk come in order."""


class NoSync(Protocol):
    """Factory of the context for a backward pass that is followed by more gradients.

    Without ``ends_microbatch`` a later pass computes the rest of this micro-batch's gradients.
    """

    def __call__(self, *, ends_microbatch: bool = True) -> AbstractContextManager[None]:
        """Return the context."""
        ...


def _no_reduction(*, ends_microbatch: bool = True) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, eq=False)
class ModelChunk:
    """One model chunk, as the executor needs it.

    ``no_sync`` wraps every backward pass but the last. ``weight_grad_queue`` defers the weight gradients of
    ``BACKWARD_INPUT`` passes until their ``BACKWARD_WEIGHT``; without one they are computed at once. ``late_grads``
    defers the gradients for an ``OUTPUT_WEIGHT`` pass of the same micro-batch.
    """

    forward: ChunkForward
    no_sync: NoSync = _no_reduction
    weight_grad_queue: WeightGradQueue | None = None
    late_grads: WeightGradQueue | None = None


@dataclass(frozen=True, eq=False)
class PipelineConnection:
    """This rank's position in the pipeline, and its connection to its neighbors.

    ``message_shape`` and ``dtype`` describe the messages; a gradient has the shape and dtype of its activation.
    ``gradient_shape`` describes the received gradients if this rank sends activations of another shape than it
    receives.
    ``orders`` is set if the ranks follow one order of all messages; without it receives are posted ahead. Without
    ``overlaps_sends`` each send blocks, which requires ``orders``.
    """

    place: StagePlace
    links: PipelineLinks
    message_shape: MessageShape
    dtype: torch.dtype
    orders: MessageOrders | None = None
    overlaps_sends: bool = True
    gradient_shape: MessageShape | None = None

    def order_of(self, actions_of: Callable[[int], Sequence[Action]]) -> Sequence[Transfer] | None:
        """Return this rank's part of the order of all messages, given each rank's actions; None without an order."""
        return None if self.orders is None else self.orders.of(actions_of)


@dataclass
class _SavedActivations:
    """State that a backward pass needs from its forward pass: the input of the graph, and its roots with gradients.

    The first root is the loss sum or the hidden states, and the others are sums of auxiliary losses. Hidden states have
    no gradient yet: the next stage sends it.

    Hidden states are not kept, neither received nor sent ones: their memory is freed unless the graph needs it.
    """

    entrance: StageInput | None
    roots: list[GradientEdge]
    grads: list[torch.Tensor | None]


def run_schedule(
    actions: Sequence[Action],
    chunks: Sequence[ModelChunk],
    *,
    device: torch.device,
    connection: PipelineConnection | None = None,
    order: Sequence[Transfer] | None = None,
    calculate_per_token_loss: bool = False,
    num_replicas: int = 1,
    loss_scale: float = 1.0,
    clock: Callable[[], float] | None = None,
    timers: Timers | None = None,
) -> ScheduleResult:
    """Run this rank's actions of one iteration and return its losses.

    The backward pass of a micro-batch starts from its mean loss divided by the number of micro-batches, or from its
    loss sum with ``calculate_per_token_loss`` (the caller then divides by the number of tokens of the whole batch). The
    mean is also divided by ``num_replicas``, so that a sum over that many replicas is their average. ``loss_scale``
    multiplies either. An auxiliary loss starts its backward pass in the chunk that computes it, and is scaled in the
    same way by its own number of tokens. Without backward passes in the list no activations are saved.

    ``connection`` is required if the pipeline has several ranks, and so is ``order``, from its ``order_of``, if it has
    ``orders``. ``clock`` records when each action's computation starts and ends; it must synchronize an asynchronous
    device. ``timers`` time backward passes, sends and receives.
    """
    assert connection is None or connection.place.num_chunks == len(chunks)
    assert connection is None or (connection.orders is None) == (order is None), "the order of the messages is missing"
    timers = timers or Timers()
    run = _Run(actions, chunks, device, connection, order, calculate_per_token_loss, num_replicas, loss_scale, timers)
    return run.run(clock)


def gather_timeline(timeline: RankTimeline, pp: Group) -> Timeline:
    """Collect the timelines of all ranks of a pipeline on every rank; their clocks must be synchronized."""
    return Timeline(tuple(all_gather_objects(timeline, pp)))


class _Run:
    """Execution of one iteration."""

    def __init__(
        self,
        actions: Sequence[Action],
        chunks: Sequence[ModelChunk],
        device: torch.device,
        connection: PipelineConnection | None,
        order: Sequence[Transfer] | None,
        calculate_per_token_loss: bool,
        num_replicas: int,
        loss_scale: float,
        timers: Timers,
    ) -> None:
        self.actions = tuple(actions)
        self.chunks = chunks
        self.place = StagePlace(num_chunks=len(chunks)) if connection is None else connection.place
        self.calculate_per_token_loss = calculate_per_token_loss
        self.num_replicas = num_replicas
        self.loss_scale = loss_scale
        self._timers = timers
        self.num_microbatches = sum(a.kind is Pass.FORWARD and a.chunk == 0 for a in actions)
        self.trains = any(action.kind.sends_gradient for action in actions)
        # The last pass of each kind, because the last gradient contributions of a split backward pass come in two
        # passes.
        self._last_passes = {(a.kind, a.chunk): index for index, a in enumerate(actions)}
        self._late_passes = {(a.microbatch, a.chunk) for a in actions if a.kind is Pass.OUTPUT_WEIGHT}
        self._stashes: dict[tuple[int, int], _SavedActivations] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.num_tokens = torch.zeros((), dtype=torch.float64, device=device)
        self.auxiliary: dict[str, torch.Tensor] = {}
        self._factors: dict[tuple[torch.dtype, float], torch.Tensor] = {}
        self._order = None if order is None else deque(order)
        self.activations_in: ReceiveQueue | LocalQueue
        self.activations_out: SendQueue | LocalQueue
        self.gradients_in: ReceiveQueue | LocalQueue
        self.gradients_out: SendQueue | LocalQueue
        if self.place.pp == 1:
            self.activations_in = self.activations_out = LocalQueue()
            self.gradients_in = self.gradients_out = LocalQueue()
            return
        assert connection is not None, "a pipeline of several ranks needs a connection"
        self.activations_in, self.gradients_in = (
            self._receive_queue(link, connection, is_gradient, device)
            for link, is_gradient in ((connection.links.activations_in, False), (connection.links.gradients_in, True))
        )
        limit = sends_in_flight(self.place.pp, self.actions) if connection.overlaps_sends else 0
        self.activations_out, self.gradients_out = (
            LocalQueue() if link is None else SendQueue(link, limit)
            for link in (connection.links.activations_out, connection.links.gradients_out)
        )

    def _receive_queue(
        self, link: Link | None, connection: PipelineConnection, is_gradient: bool, device: torch.device
    ) -> ReceiveQueue | LocalQueue:
        if link is None:
            return LocalQueue()
        shape = connection.gradient_shape if is_gradient else None
        expected = [
            (shape or connection.message_shape)(action.microbatch)
            for action in self.actions
            if (action.kind is not Pass.FORWARD) == is_gradient and self.place.receives(action.kind, action.chunk)
        ]
        ahead = RECEIVES_AHEAD if self._order is None else 0
        return ReceiveQueue(link, expected, connection.dtype, device, ahead)

    def run(self, clock: Callable[[], float] | None) -> ScheduleResult:
        """Run every action and wait until all sends have finished."""
        starts, ends = [], []
        now = clock or (lambda: 0.0)
        for index, action in enumerate(self.actions):
            message = self._receive(action)
            starts.append(now())
            leaving = self._compute(index, action, message)
            del message
            ends.append(now())
            if leaving is not None:
                self._send(action, leaving)
            del leaving
        self.activations_out.finish()
        self.gradients_out.finish()
        assert not self._stashes or not self.trains, "the schedule leaves micro-batches without a backward pass"
        timeline = None if clock is None else RankTimeline(self.actions, tuple(starts), tuple(ends))
        return ScheduleResult(self.loss_sum, self.num_tokens, self.auxiliary, timeline)

    def _receive(self, action: Action) -> torch.Tensor | None:
        if not self.place.receives(action.kind, action.chunk):
            return None
        queue = self.activations_in if action.kind is Pass.FORWARD else self.gradients_in
        if isinstance(queue, LocalQueue):
            return queue.take()
        with self._timer(action, "recv"):
            return self._receive_from(queue)

    def _timer(self, action: Action, part: str) -> Timer:
        return self._timers(f"{'forward' if action.kind is Pass.FORWARD else 'backward'}-{part}", log_level=2)

    def _send(self, action: Action, leaving: torch.Tensor) -> None:
        queue = self.activations_out if action.kind is Pass.FORWARD else self.gradients_out
        with nullcontext() if isinstance(queue, LocalQueue) else self._timer(action, "send"):
            if self._order is not None:
                self._post_receives_before_send(self._order)
            queue.send(leaving)

    def _receive_from(self, queue: ReceiveQueue) -> torch.Tensor:
        while self._order is not None and not queue.is_posted:
            self._post_receive(self._order.popleft())
        return queue.take()

    def _post_receives_before_send(self, order: deque[Transfer]) -> None:
        while (transfer := order.popleft()) is not Transfer.SEND:
            self._post_receive(transfer)

    def _post_receive(self, transfer: Transfer) -> None:
        queue = self.activations_in if transfer is Transfer.RECEIVE_ACTIVATION else self.gradients_in
        assert transfer is not Transfer.SEND, "the order is not that of these actions"
        assert isinstance(queue, ReceiveQueue)
        queue.post()

    def _compute(self, index: int, action: Action, message: torch.Tensor | None) -> torch.Tensor | None:
        """Run an action and return the tensor to send to a neighbor, if any."""
        if action.kind is Pass.FORWARD:
            return self._forward(action, message)
        chunk = self.chunks[action.chunk]
        is_last = index == self._last_passes[action.kind, action.chunk]
        ends_microbatch = action.kind is not Pass.BACKWARD_INPUT
        with (
            self._timer(action, "compute"),
            nullcontext() if is_last else chunk.no_sync(ends_microbatch=ends_microbatch),
        ):
            if not action.kind.sends_gradient:
                leaving = None
                queue = chunk.late_grads if action.kind is Pass.OUTPUT_WEIGHT else chunk.weight_grad_queue
                if queue is not None:
                    queue.run(action.microbatch)
            elif action.kind is Pass.BACKWARD_INPUT and chunk.weight_grad_queue is not None:
                with chunk.weight_grad_queue.collecting(action.microbatch):
                    leaving = self._backward(action, message)
            elif action[1:] in self._late_passes and chunk.late_grads is not None:
                with chunk.late_grads.collecting(action.microbatch):
                    leaving = self._backward(action, message)
            else:
                leaving = self._backward(action, message)
        return leaving

    def _forward(self, action: Action, hidden: torch.Tensor | None) -> torch.Tensor | None:
        entrance = None if hidden is None or not self.trains else StageInput()
        with torch.set_grad_enabled(self.trains):
            if hidden is not None and entrance is not None:
                hidden = entrance.enter(hidden)
            output = self.chunks[action.chunk].forward(action.microbatch, hidden)
            is_last = self.place.is_last(action.chunk)
            assert isinstance(output, MicrobatchLoss) == is_last, "the last chunk, and no other, returns the loss"
        root_grad: torch.Tensor | None = None
        if isinstance(output, MicrobatchLoss):
            root, losses = output.loss_sum, output.auxiliary
            root_grad = self._count_loss(output)
        else:
            root, losses = output if isinstance(output, LayerOutput) else LayerOutput(output)
        roots = [(root, root_grad), *self._count_auxiliary(losses)]
        if self.trains:
            self._stashes[action.microbatch, action.chunk] = _SavedActivations(
                entrance, [get_gradient_edge(root) for root, _ in roots], [root_grad for _, root_grad in roots]
            )
        return None if is_last else root.detach().contiguous()

    def _count_loss(self, loss: MicrobatchLoss) -> torch.Tensor | None:
        """Add a micro-batch's loss to the sums, and return the gradient of its loss sum if the schedule trains."""
        self.loss_sum += loss.loss_sum.detach()
        self.num_tokens += loss.num_tokens
        return self._gradient_of(loss.loss_sum, loss.num_tokens) if self.trains else None

    def _count_auxiliary(self, losses: Sequence[AuxiliaryLoss]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Add auxiliary losses to the sums, and return those to differentiate with their gradients."""
        roots = []
        for loss in losses:
            values = torch.stack((loss.loss_sum.detach().double(), loss.num_tokens.double()))
            self.auxiliary[loss.name] = self.auxiliary.get(loss.name, 0) + values
            # Before the first LoRA adapter no parameter is trained, so the loss requires no gradient.
            if self.trains and loss.coefficient and loss.loss_sum.requires_grad:
                grad = self._gradient_of(loss.loss_sum, loss.num_tokens, loss.coefficient)
                roots.append((loss.loss_sum, grad))
        return roots

    def _gradient_of(self, loss_sum: torch.Tensor, num_tokens: torch.Tensor, coefficient: float = 1.0) -> torch.Tensor:
        """Return the gradient of a loss sum: what divides and scales it, without autograd's kernels for that."""
        key = loss_sum.dtype, coefficient
        if key not in self._factors:
            factor = loss_sum.new_full((), coefficient, requires_grad=False)
            self._factors[key] = factor if self.loss_scale == 1.0 else factor * self.loss_scale
        if self.calculate_per_token_loss:
            # A copy per backward pass, because autograd may add later gradients to the memory of an earlier one.
            return self._factors[key].clone()
        divisor = _nonzero(num_tokens) * (self.num_microbatches * self.num_replicas)
        return (self._factors[key] / divisor).to(loss_sum.dtype)

    def _backward(self, action: Action, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Run a backward pass and return the gradient of the chunk's input."""
        stash = self._stashes.pop((action.microbatch, action.chunk))
        first, *others = stash.grads
        # torch.autograd.backward would import sympy to compare shapes: half a second of processor time at start-up.
        # The engine itself compares them too.
        grads = (grad if first is None else first, *others)
        _engine_run_backward(tuple(stash.roots), grads, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if stash.entrance is None:
            return None
        assert stash.entrance.grad is not None, "the chunk's output does not depend on its input"
        return stash.entrance.grad.contiguous()


def _nonzero(num_tokens: torch.Tensor) -> torch.Tensor:
    """Return the divisor of a loss sum: 1 if no token counts and the sum is 0."""
    if not num_tokens.is_floating_point():
        return num_tokens.clamp(min=1)
    # A rank's share of a token is fractional under context parallelism.
    return torch.where(num_tokens > 0, num_tokens, 1)
