"""The schedule that a recorded one would have been, had no pass waited for more than what it needs."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from megatron.core.pipeline_parallel.schedules import Pass
from megatron.core.pipeline_parallel.simulator import Durations, simulate
from megatron.core.pipeline_parallel.timeline import RankTimeline, Timeline


def planned_timeline(recorded: Timeline) -> Timeline:
    """Return the same passes in the same order on each rank, as early as they can run.

    Each takes as long as the median of its kind on its rank, and messages take no time.

    Raises:
        ScheduleError: the passes are those of no schedule.
    """
    return simulate(
        [rank.actions for rank in recorded.ranks], recorded.num_chunks, [_durations(rank) for rank in recorded.ranks]
    )


def _durations(rank: RankTimeline) -> Durations:
    seconds: dict[Pass, list[float]] = defaultdict(list)
    lengths = [(action, end - start) for action, start, end in zip(rank.actions, rank.starts, rank.ends, strict=True)]
    late = {
        (action.microbatch, action.chunk): length for action, length in lengths if action.kind is Pass.OUTPUT_WEIGHT
    }
    for action, length in lengths:
        # A backward pass counts with what it leaves for later.
        left = late.get((action.microbatch, action.chunk), 0.0) if action.kind is Pass.BACKWARD else 0.0
        seconds[action.kind].append(length + left)
    usual = {kind: median(found) for kind, found in seconds.items()}
    return Durations(
        forward=usual.get(Pass.FORWARD, 0.0),
        backward=usual.get(Pass.BACKWARD, 0.0),
        backward_input=usual.get(Pass.BACKWARD_INPUT, 0.0),
        backward_weight=usual.get(Pass.BACKWARD_WEIGHT, 0.0),
        output_weight=usual.get(Pass.OUTPUT_WEIGHT, 0.0),
    )
