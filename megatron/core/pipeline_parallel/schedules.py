"""Pipeline schedules as data: the order in which a rank runs the passes of its micro-batches.

A pipeline schedule is a pure function of the pipeline's size, a rank, the number of micro-batches, the number of model
chunks on each rank, and the size of the groups in which interleaved chunks take micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron.core.errors import ConfigurationError
from megatron.core.pipeline_parallel.action import Action, Pass, StagePlace

PipelineSchedule = Callable[[int, int, int, int, int | None], tuple[Action, ...]]
"""Return a rank's actions from (pp, rank, num_microbatches, num_chunks, microbatch_group_size)."""


def microbatch_groups(pp: int, num_microbatches: int, group_size: int | None = None) -> tuple[range, ...]:
    """Cut the micro-batches into the groups that one chunk takes in a row before the next chunk's turn.

    Groups have about ``group_size`` micro-batches (by default ``pp``) and nearly equal sizes. None is below ``pp``
    unless there is only one: a group smaller than the pipeline stalls the first rank until the last rank sends the
    group on, and a short last group deadlocks 1F1B.
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
    """Return the forward passes alone, for evaluation; chunks take the micro-batches in the interleaved order."""
    return tuple(
        Action(Pass.FORWARD, microbatch, chunk)
        for group in microbatch_groups(pp, num_microbatches, microbatch_group_size if num_chunks > 1 else None)
        for chunk in range(num_chunks)
        for microbatch in group
    )


def without_pipelining(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return forward and backward of each micro-batch in turn: one micro-batch is in flight at a time."""
    return tuple(
        Action(kind, microbatch, chunk)
        for microbatch in range(num_microbatches)
        for kind, chunks in ((Pass.FORWARD, range(num_chunks)), (Pass.BACKWARD, range(num_chunks - 1, -1, -1)))
        for chunk in chunks
    )


def interleaved(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return 1F1B, interleaved where a rank holds several chunks: warm-up, one forward and one backward in turn, rest.

    With one chunk the warm-up has ``pp - rank - 1`` forward passes, at most ``pp - rank`` micro-batches are in flight,
    and the bubble is (p - 1) / m of the busy time.

    With v chunks all ranks take (group, chunk, micro-batch) in the same order. The warm-up has ``(v - 1) * group``
    forward passes and two more for each rank behind this one. The bubble is (p - 1) / (v * m) of the busy time where m
    is at least p.

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
    """Return ZB-H1: 1F1B with the backward pass split, whose weight gradients fill most of the bubble.

    Rank ``r`` defers weight gradients by ``r`` micro-batches, so that at most ``pp`` micro-batches are in flight on
    every rank: as many as on the first rank under 1F1B. Where forward, input-gradient and weight-gradient passes take
    equally long, the bubble is a third of 1F1B's.

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
    """Return the actions with each whole backward pass split: its input gradient leaves before the weights' follow."""
    halves = (Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)
    return tuple(
        action._replace(kind=kind)
        for action in actions
        for kind in (halves if action.kind is Pass.BACKWARD else (action.kind,))
    )


def with_late_output_grads(actions: Sequence[Action], chunk: int, max_microbatches: int = 0) -> tuple[Action, ...]:
    """Return the actions of the rank that has the output layer, in ``chunk``, with its weight's gradients after all.

    The last ``max_microbatches`` backward passes leave theirs, all where it is 0.
    """
    passes = [action for action in actions if action.kind is Pass.BACKWARD and action.chunk == chunk]
    return (*actions, *(action._replace(kind=Pass.OUTPUT_WEIGHT) for action in passes[-max_microbatches:]))


def with_deferred_grads(
    actions: Sequence[Action], place: StagePlace, *, delays: bool, defers: bool, max_microbatches: int = 0
) -> tuple[Action, ...]:
    """Return a rank's actions with weight gradients where the flags put them.

    ``delays`` is ``--delay-wgrad-compute``, ``defers`` ``--defer-embedding-wgrad-compute``, which counts without the
    former, and ``max_microbatches`` ``--wgrad-deferral-limit``.
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
    """Return the name of the pipeline schedule that trains a layout where the user named none."""
    if num_chunks > 1:
        return "interleaved"
    return "1f1b" if pp > 1 else "no-pipelining"


def schedule_problems(
    name: str, pp: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[str, ...]:
    """Return why a pipeline schedule cannot run, one line a reason, with what would work."""
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
            f"the {name} schedule runs one model chunk a rank and there are {num_chunks}; use the interleaved schedule "
            "or --num-virtual-stages-per-pipeline-rank 1"
        )
    if microbatch_group_size is not None and microbatch_group_size < pp:
        problems.append(
            f"--microbatch-group-size-per-virtual-pipeline-stage {microbatch_group_size} is below "
            f"--pipeline-model-parallel-size {pp}, so that stages would wait for each other; use {pp} or more"
        )
    return tuple(problems)


def build_schedule(
    name: str, pp: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of every rank of a pipeline.

    Raises:
        ConfigurationError: the schedule cannot run; all reasons together.
    """
    problems = schedule_problems(name, pp, num_microbatches, num_chunks, microbatch_group_size)
    if problems:
        raise ConfigurationError(problems)
    schedule = SCHEDULES[name]
    return tuple(schedule(pp, rank, num_microbatches, num_chunks, microbatch_group_size) for rank in range(pp))
