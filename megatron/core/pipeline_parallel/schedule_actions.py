"""Pipeline schedules as data: the order in which a rank runs the passes of its micro-batches.

A pipeline schedule is a pure function of the pipeline's size, a rank, the number of micro-batches, the number of model
chunks on each rank, and the size of the groups in which interleaved chunks take micro-batches. It returns actions: an
action is one pass of one micro-batch through one model chunk, with its receives and sends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from megatron.core.errors import ConfigurationError

RECEIVES_AHEAD = 1
"""Number of receives that a rank posts ahead on each link, before it needs the messages."""


class Pass(Enum):
    """A forward pass, a backward pass, one half of a split backward pass, or a deferred part of a backward pass.

    For each micro-batch and chunk, a pipeline schedule has either BACKWARD, or BACKWARD_INPUT and later
    BACKWARD_WEIGHT. OUTPUT_WEIGHT may follow a BACKWARD.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    """Compute the input gradient, which the previous stage waits for."""
    BACKWARD_WEIGHT = "backward_weight"
    """Compute the weight gradient, which no other stage waits for."""
    OUTPUT_WEIGHT = "output_weight"
    """Compute only the gradient of the output layer's weight, which the backward pass has deferred."""

    # Enum's own hash formats a string each time, and large schedules are hashed often.
    __hash__ = object.__hash__

    @property
    def sends_gradient(self) -> bool:
        return self in (Pass.BACKWARD, Pass.BACKWARD_INPUT)

    @property
    def frees_activations(self) -> bool:
        return self in (Pass.BACKWARD, Pass.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One pass of one micro-batch through one model chunk of this rank."""

    kind: Pass
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class StagePlace:
    """One rank of a pipeline of ``pp`` ranks with ``num_chunks`` model chunks each.

    Chunk ``c`` of rank ``r`` is the global stage ``c * pp + r``. A forward pass receives the activation of the previous
    global stage, a backward pass the gradient of the next global stage. Both are on neighboring ranks, with the first
    rank following the last one.
    """

    pp: int = 1
    rank: int = 0
    num_chunks: int = 1

    @property
    def next_rank(self) -> int:
        return (self.rank + 1) % self.pp

    @property
    def previous_rank(self) -> int:
        return (self.rank - 1) % self.pp

    def is_first(self, chunk: int) -> bool:
        return chunk == 0 and self.rank == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk is the model's last."""
        return chunk == self.num_chunks - 1 and self.rank == self.pp - 1

    def receives(self, kind: Pass, chunk: int) -> bool:
        """Return whether a pass of a chunk needs a message from another stage."""
        if kind is Pass.FORWARD:
            return not self.is_first(chunk)
        return kind.sends_gradient and not self.is_last(chunk)

    def sends(self, kind: Pass, chunk: int) -> bool:
        """Return whether a pass of a chunk sends a message to another stage."""
        if kind is Pass.FORWARD:
            return not self.is_last(chunk)
        return kind.sends_gradient and not self.is_first(chunk)


def sends_in_flight(pp: int, actions: Sequence[Action]) -> int:
    """Return the smallest number of sends in flight per link with which a rank neither deadlocks nor waits needlessly.

    One is enough if neighbors are at most one message apart. If a chunk takes more than ``pp`` micro-batches in a row,
    the surplus of the group is in flight between the last rank and the first, and waiting for those sends would
    deadlock. The tests compare the times with those of unlimited sends.
    """
    forwards = (action.chunk for action in actions if action.kind is Pass.FORWARD)
    longest_run = max((sum(1 for _ in run) for _, run in groupby(forwards)), default=0)
    one_chunk = all(action.chunk == 0 for action in actions)
    return 1 if one_chunk else max(1, longest_run - pp + 1)


PipelineSchedule = Callable[[int, int, int, int, int | None], tuple[Action, ...]]
"""Returns a rank's actions from (pp, rank, num_microbatches, num_chunks, microbatch_group_size)."""


def microbatch_groups(pp: int, num_microbatches: int, group_size: int | None = None) -> tuple[range, ...]:
    """Split the micro-batches into the groups that one chunk processes in a row before the next chunk's turn.

    Groups have about ``group_size`` micro-batches (by default ``pp``) and nearly equal sizes. No group is smaller than
    ``pp`` unless it is the only one: a group smaller than the pipeline stalls the first rank until the last rank sends
    the group on, and a short last group deadlocks 1F1B.
    """
    count = -(-num_microbatches // (group_size or pp))
    if num_microbatches < count * pp:
        count = max(1, num_microbatches // pp)
    base, num_larger = divmod(num_microbatches, count)
    groups, start = [], 0
    for index in range(count):
        end = start + base + (index < num_larger)
        groups.append(range(start, end))
        start = end
    return tuple(groups)


def forward_only(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return only forward passes, for evaluation; chunks process the micro-batches in the interleaved order."""
    return tuple(
        Action(Pass.FORWARD, microbatch, chunk)
        for group in microbatch_groups(pp, num_microbatches, microbatch_group_size if num_chunks > 1 else None)
        for chunk in range(num_chunks)
        for microbatch in group
    )


def without_pipelining(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return forward and backward of each micro-batch in turn, with one micro-batch in flight at a time."""
    return tuple(
        Action(kind, microbatch, chunk)
        for microbatch in range(num_microbatches)
        for kind, chunks in ((Pass.FORWARD, range(num_chunks)), (Pass.BACKWARD, range(num_chunks - 1, -1, -1)))
        for chunk in chunks
    )


def interleaved(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return 1F1B, interleaved if a rank has several chunks: warmup, alternating forward and backward, cooldown.

    With one chunk the warmup has ``pp - rank - 1`` forward passes, at most ``pp - rank`` micro-batches are in flight,
    and the bubble is (p - 1) / m of the busy time.

    With v chunks all ranks process (group, chunk, micro-batch) in the same order. The warmup has ``(v - 1) * group``
    forward passes, and two more for each later rank. The bubble is (p - 1) / (v * m) of the busy time if m is at least
    p.

    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.
    """
    groups = microbatch_groups(pp, num_microbatches, microbatch_group_size)
    chunks = range(num_chunks)
    forwards = [Action(Pass.FORWARD, m, chunk) for group in groups for chunk in chunks for m in group]
    backwards = [Action(Pass.BACKWARD, m, chunk) for group in groups for chunk in reversed(chunks) for m in group]
    lead = (pp - rank - 1) * (2 if num_chunks > 1 else 1)
    warmup = min(len(forwards), lead + (num_chunks - 1) * len(groups[0]))
    actions = forwards[:warmup]
    for index, backward in enumerate(backwards):
        actions += forwards[warmup + index : warmup + index + 1]
        actions.append(backward)
    return tuple(actions)


def zero_bubble(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return ZB-H1: 1F1B with split backward passes, whose weight gradients fill most of the bubble.

    Rank ``r`` defers weight gradients by ``r`` micro-batches, so that at most ``pp`` micro-batches are in flight on
    every rank, as on the first rank under 1F1B. If forward, input-gradient and weight-gradient passes take equally
    long, the bubble is a third of 1F1B's.

    Qi et al. 2023, https://arxiv.org/abs/2401.10241.
    """
    assert num_chunks == 1, "several chunks need the interleaved schedule"
    actions = []
    for action in interleaved(pp, rank, num_microbatches):
        if action.kind is Pass.FORWARD:
            actions.append(action)
            continue
        actions.append(Action(Pass.BACKWARD_INPUT, action.microbatch))
        if action.microbatch >= rank:
            actions.append(Action(Pass.BACKWARD_WEIGHT, action.microbatch - rank))
    deferred = range(max(0, num_microbatches - rank), num_microbatches)
    return (*actions, *(Action(Pass.BACKWARD_WEIGHT, microbatch) for microbatch in deferred))


def with_delayed_weight_grads(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Split each whole backward pass, so that its input gradient is sent before the weight gradients are computed."""
    halves = (Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)
    return tuple(
        action._replace(kind=kind)
        for action in actions
        for kind in (halves if action.kind is Pass.BACKWARD else (action.kind,))
    )


def with_late_output_grads(actions: Sequence[Action], chunk: int, max_microbatches: int = 0) -> tuple[Action, ...]:
    """Defer the gradients of the output layer's weight, in ``chunk``, to the end of the actions.

    Only the last ``max_microbatches`` backward passes defer theirs, or all if it is 0.
    """
    passes = [action for action in actions if action.kind is Pass.BACKWARD and action.chunk == chunk]
    return (*actions, *(action._replace(kind=Pass.OUTPUT_WEIGHT) for action in passes[-max_microbatches:]))


def with_deferred_grads(
    actions: Sequence[Action], place: StagePlace, *, delays: bool, defers: bool, max_microbatches: int = 0
) -> tuple[Action, ...]:
    """Return a rank's actions with weight gradients deferred according to the flags.

    ``delays`` is ``--delay-wgrad-compute``. ``defers`` is ``--defer-embedding-wgrad-compute``, which has no effect with
    ``delays``. ``max_microbatches`` is ``--wgrad-deferral-limit``.
    """
    if delays:
        return with_delayed_weight_grads(actions)
    if defers and place.rank == place.pp - 1:
        return with_late_output_grads(actions, place.num_chunks - 1, max_microbatches)
    return tuple(actions)


SCHEDULES: Mapping[str, PipelineSchedule] = MappingProxyType(
    {
        "forward-only": forward_only,
        "no-pipelining": without_pipelining,
        "1f1b": interleaved,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble,
    }
)
"""Every pipeline schedule by its name on the command line."""

_ONE_CHUNK_ONLY = ("1f1b", "zero-bubble")


def default_schedule(pp: int, num_chunks: int) -> str:
    """Return the name of the default pipeline schedule of a layout."""
    if num_chunks > 1:
        return "interleaved"
    return "1f1b" if pp > 1 else "no-pipelining"


def schedule_problems(
    name: str, pp: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[str, ...]:
    """Return why a pipeline schedule cannot run, one line per reason, with values that would work."""
    problems = []
    if name not in SCHEDULES:
        problems.append(f"there is no pipeline schedule {name!r}; use one of {', '.join(SCHEDULES)}")
    if num_microbatches < 1:
        problems.append(
            f"{num_microbatches} micro-batches cannot be scheduled; raise --global-batch-size to at least "
            "--micro-batch-size x data-parallel size"
        )
    if name in _ONE_CHUNK_ONLY and num_chunks > 1:
        problems.append(
            f"the {name} schedule runs one model chunk per rank, but there are {num_chunks}; use the interleaved "
            "schedule or --num-virtual-stages-per-pipeline-rank 1"
        )
    if microbatch_group_size is not None and microbatch_group_size < pp:
        problems.append(
            f"--microbatch-group-size-per-virtual-pipeline-stage {microbatch_group_size} is below "
            f"--pipeline-model-parallel-size {pp}, so stages would deadlock; use {pp} or more"
        )
    return tuple(problems)


def build_schedule(
    name: str, pp: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of every rank of a pipeline.

    Raises:
        ConfigurationError: the schedule cannot run; lists all reasons.
    """
    problems = schedule_problems(name, pp, num_microbatches, num_chunks, microbatch_group_size)
    if problems:
        raise ConfigurationError(problems)
    schedule = SCHEDULES[name]
    return tuple(schedule(pp, rank, num_microbatches, num_chunks, microbatch_group_size) for rank in range(pp))


_ROUNDS, _MOST_ROUNDS = 3, 64
"""Micro-batches per stage after which a schedule only repeats itself, for equal and for unequal rounds."""


# A search requests the same lists thousands of times.
@functools.lru_cache(maxsize=1024)
def first_actions(
    name: str, pp: int, stage: int, num_microbatches: int, num_chunks: int, group_size: int | None
) -> tuple[Action, ...]:
    """Return a stage's actions of one step in a pipeline schedule, limited to the first of many rounds."""
    round_size = max(group_size or 0, pp)
    if num_microbatches % round_size == 0:
        num_microbatches = min(num_microbatches, _ROUNDS * round_size)
    elif num_microbatches > _MOST_ROUNDS * round_size:
        num_microbatches = _MOST_ROUNDS * round_size + num_microbatches % round_size
    return SCHEDULES[name](pp, stage, num_microbatches, num_chunks, group_size)


@functools.lru_cache(maxsize=1024)
def most_passes_in_flight(
    name: str, pp: int, stage: int, num_microbatches: int, num_chunks: int, group_size: int | None
) -> int:
    """Return the largest number of a stage's forward passes that wait for their backward passes at one time."""
    actions = first_actions(name, pp, stage, num_microbatches, num_chunks, group_size)
    return most_in_flight(actions, [1] * num_chunks)


def most_in_flight(actions: Iterable[Action], sizes: Sequence[int]) -> int:
    """Return the peak of the saved activations, if a forward pass of chunk ``c`` saves ``sizes[c]``."""
    in_flight = most = 0
    for kind, _, chunk in actions:
        if kind is Pass.FORWARD:
            in_flight += sizes[chunk]
            most = max(most, in_flight)
        elif kind in (Pass.BACKWARD, Pass.BACKWARD_INPUT):
            in_flight -= sizes[chunk]
    return most
