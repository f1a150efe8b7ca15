"""Schedules as data: the order in which a rank runs the passes of its micro-batches.

Every schedule is a pure function of the pipeline's size, a rank, the number of micro-batches, the number of model
chunks that each rank holds, and the size of the groups in which interleaved chunks take micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megatron.core.errors import ConfigurationError
from megatron.core.pipeline_parallel.action import Action, Pass
from megatron.core.pipeline_parallel.interleaved_schedule import interleaved, microbatch_groups
from megatron.core.pipeline_parallel.zero_bubble_schedule import zero_bubble

Schedule = Callable[[int, int, int, int, int | None], tuple[Action, ...]]
"""Return a rank's actions from (pp, rank, num_microbatches, num_chunks, microbatch_group_size)."""


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
    """Return forward and backward of each micro-batch in turn: one micro-batch's activations are alive at a time."""
    return tuple(
        Action(kind, microbatch, chunk)
        for microbatch in range(num_microbatches)
        for kind, chunks in ((Pass.FORWARD, range(num_chunks)), (Pass.BACKWARD, range(num_chunks - 1, -1, -1)))
        for chunk in chunks
    )


def one_forward_one_backward(
    pp: int, rank: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[Action, ...]:
    """Return 1F1B: ``pp - rank - 1`` forward passes, then one forward and one backward in turn, then the rest.

    At most ``pp - rank`` micro-batches are alive; the bubble is (p - 1) / m of the busy time.
    Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.
    """
    assert num_chunks == 1, "several chunks need the interleaved schedule"
    warmup = min(num_microbatches, pp - rank - 1)
    actions = [Action(Pass.FORWARD, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches):
        if warmup + microbatch < num_microbatches:
            actions.append(Action(Pass.FORWARD, warmup + microbatch))
        actions.append(Action(Pass.BACKWARD, microbatch))
    return tuple(actions)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "forward-only": forward_only,
        "no-pipelining": without_pipelining,
        "1f1b": one_forward_one_backward,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble,
    }
)
"""Every schedule by the name that a command line gives it."""

_ONE_CHUNK_ONLY = ("1f1b", "zero-bubble")


def default_schedule(pp: int, num_chunks: int) -> str:
    """Return the name of the training schedule of a layout for which none was asked."""
    if num_chunks > 1:
        return "interleaved"
    return "1f1b" if pp > 1 else "no-pipelining"


def schedule_problems(
    name: str, pp: int, num_microbatches: int, num_chunks: int = 1, microbatch_group_size: int | None = None
) -> tuple[str, ...]:
    """Return why a schedule cannot run, one line each, with what would work."""
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
    """Return the action lists of all ranks.

    Raises:
        ConfigurationError: the schedule cannot run; all reasons together.
    """
    problems = schedule_problems(name, pp, num_microbatches, num_chunks, microbatch_group_size)
    if problems:
        raise ConfigurationError(problems)
    schedule = SCHEDULES[name]
    return tuple(schedule(pp, rank, num_microbatches, num_chunks, microbatch_group_size) for rank in range(pp))
