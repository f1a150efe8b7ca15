"""What a recorded schedule is compared with: the same passes without needless waits."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.core.pipeline_parallel.simulator import Durations, ScheduleError, simulate
from megatron.core.pipeline_parallel.timeline import RankTimeline, Timeline
from megatron.plotting.run_folder import planned_timeline


def test_a_late_pass_is_planned_with_the_usual_time_of_its_kind() -> None:
    ideal = simulate(build_schedule("1f1b", 2, 5), 1, Durations(forward=1.0, backward=2.0))
    last = ideal.ranks[1]
    late = dataclasses.replace(
        last,
        starts=(*last.starts[:3], *(start + 7.0 for start in last.starts[3:])),
        ends=(*last.ends[:2], *(end + 7.0 for end in last.ends[2:])),
    )
    recorded = Timeline((ideal.ranks[0], late))
    assert recorded.makespan == ideal.makespan + 7.0 - (ideal.ranks[0].ends[-1] - last.ends[-1])
    assert planned_timeline(recorded) == ideal


def test_passes_of_no_schedule_are_refused() -> None:
    ranks = simulate(build_schedule("1f1b", 2, 3), 1).ranks
    backwards = RankTimeline(ranks[0].actions[::-1], ranks[0].starts, ranks[0].ends)
    with pytest.raises(ScheduleError):
        planned_timeline(Timeline((backwards, ranks[1])))
