"""The simulator finds what cannot run, and its times are those of the rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.errors import DataError
from megatron.core.pipeline_parallel.schedule_actions import (
    Action,
    Pass,
    StagePlace,
    build_schedule,
    sends_in_flight,
    with_deferred_grads,
)
from megatron.core.pipeline_parallel.simulator import Durations, MessageRules, ScheduleError, simulate
from megatron.core.pipeline_parallel.timeline import RankTimeline, Timeline, read_timeline, write_timeline


def forward(microbatch: int, chunk: int = 0) -> Action:
    return Action(Pass.FORWARD, microbatch, chunk)


def backward(microbatch: int, chunk: int = 0) -> Action:
    return Action(Pass.BACKWARD, microbatch, chunk)


def test_ranks_that_wait_in_a_circle_are_named() -> None:
    schedule = [[forward(0), backward(0), forward(1), backward(1)], [forward(0), forward(1), backward(0), backward(1)]]
    with pytest.raises(
        ScheduleError,
        match=r"2 of 2 ranks wait for each other: rank 0: backward of micro-batch 0, chunk 0 waits for its message; "
        "rank 1: forward of micro-batch 1, chunk 0 waits",
    ):
        simulate(schedule)


def test_different_orders_on_two_ranks_are_found() -> None:
    schedule = [[forward(0), forward(1), backward(0), backward(1)], [forward(1), backward(1), forward(0), backward(0)]]
    with pytest.raises(
        ScheduleError, match="rank 1: forward of micro-batch 1, chunk 0 receives the message for micro-b"
    ):
        simulate(schedule)


@pytest.mark.parametrize("actions", [[backward(0), forward(0)], [forward(0), backward(0), backward(0)]])
def test_a_backward_pass_without_its_forward_pass_is_found(actions: list[Action]) -> None:
    with pytest.raises(ScheduleError, match="is out of order or is repeated"):
        simulate([actions])


def test_blocking_rendezvous_sends_deadlock_where_asynchronous_ones_do_not() -> None:
    schedule = build_schedule("interleaved", 2, 5, 2)
    assert simulate(schedule, 2).makespan > 0
    with pytest.raises(ScheduleError, match=r"2 of 2 ranks wait for each other: .*waits to send"):
        simulate(schedule, 2, rules=MessageRules(sends_in_flight=0))


def test_an_enlarged_group_needs_its_surplus_of_sends_in_flight() -> None:
    schedule = build_schedule("interleaved", 4, 11, 2)
    assert {sends_in_flight(4, actions) for actions in schedule} == {3}
    assert simulate(schedule, 2).worst_bubble == pytest.approx(3 / 22)
    with pytest.raises(ScheduleError):
        simulate(schedule, 2, rules=MessageRules(sends_in_flight=1))


def test_times_follow_the_durations() -> None:
    durations = Durations(forward=2.0, backward=5.0, transfer=0.5)
    timeline = simulate(build_schedule("1f1b", 2, 2), 1, durations)
    first, last = timeline.ranks
    assert (first.starts, first.ends) == ((0.0, 2.0, 10.0, 17.0), (2.0, 4.0, 15.0, 22.0))
    assert (last.starts, last.ends) == ((2.5, 4.5, 9.5, 11.5), (4.5, 9.5, 11.5, 16.5))
    assert timeline.makespan == 22.0
    assert timeline.bubble(0) == pytest.approx(8 / 14)


def test_a_rendezvous_transfer_begins_when_the_receive_is_posted() -> None:
    forwards = tuple(forward(microbatch) for microbatch in range(3))
    schedule = [forwards, forwards]
    slow_transfer = Durations(forward=1.0, transfer=3.0)
    buffered = simulate(schedule, 1, slow_transfer, MessageRules(rendezvous=False, sends_in_flight=None))
    rendezvous = simulate(schedule, 1, slow_transfer, MessageRules(sends_in_flight=None))
    assert buffered.ranks[1].starts == (4.0, 5.0, 6.0)
    assert rendezvous.ranks[1].starts == (4.0, 7.0, 10.0)


def test_large_pipelines_take_the_formula_too() -> None:
    for name, num_chunks, part in (("1f1b", 1, 1.0), ("interleaved", 2, 0.5), ("zero-bubble", 1, 1 / 3)):
        timeline = simulate(build_schedule(name, 64, 256, num_chunks), num_chunks)
        assert timeline.worst_bubble == pytest.approx(part * 63 / 256)


def test_global_stages_go_around_the_ranks() -> None:
    place = StagePlace(pp=3, rank=2, num_chunks=2)
    assert (place.previous_rank, place.next_rank) == (1, 0)
    assert [place.sends(Pass.FORWARD, chunk) for chunk in (0, 1)] == [True, False]
    assert [place.receives(Pass.BACKWARD, chunk) for chunk in (0, 1)] == [True, False]
    assert not place.receives(Pass.BACKWARD_WEIGHT, 0)


def test_a_forward_only_rank_keeps_one_activation() -> None:
    timeline = simulate(build_schedule("forward-only", 3, 5))
    assert [rank.peak_activations for rank in timeline.ranks] == [1, 1, 1]


def test_timelines_survive_a_file(tmp_path: Path) -> None:
    timeline = simulate(build_schedule("zero-bubble", 3, 4))
    write_timeline(tmp_path / "run.json", timeline)
    assert read_timeline(tmp_path / "run.json") == timeline


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"pipeline_model_parallel_size": 1, "events": [[0, "sideways", 0, 0, 0.0, 1.0]]}',
        '{"pipeline_model_parallel_size": 1, "events": [[1, "forward", 0, 0, 0.0, 1.0]]}',
        '{"pipeline_model_parallel_size": 1, "events": [[0, "forward", 0, 0, 2.0, 1.0]]}',
        '{"pipeline_model_parallel_size": 1, "events": [[0, "forward", 0.5, 0, 0.0, 1.0]]}',
    ],
)
def test_files_that_are_no_timeline_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"run\.json is not a recorded timeline"):
        read_timeline(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_timeline(tmp_path / "absent.json")


def test_an_empty_timeline_has_no_bubble() -> None:
    assert Timeline(()).worst_bubble == 0.0
    assert (Timeline(()).num_microbatches, Timeline(()).num_chunks) == (0, 1)


def test_planning_needs_no_torch() -> None:
    names = ("schedule_actions", "simulator", "stage_layout", "timeline")
    program = (
        f"import sys\nfrom megatron.core.pipeline_parallel import {', '.join(names)}\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[4])


def test_deferred_weight_gradients_hide_behind_other_ranks() -> None:
    """Each rank but the first gets its gradient earlier by the weight gradients after the first backward passes."""
    schedule = build_schedule("1f1b", 3, 4)
    durations = Durations(output_weight=0.5)

    def changed(*, delays: bool = False, defers: bool = False, limit: int = 0) -> Timeline:
        lists = [
            with_deferred_grads(actions, StagePlace(3, rank), delays=delays, defers=defers, max_microbatches=limit)
            for rank, actions in enumerate(schedule)
        ]
        return simulate(lists, durations=durations)

    assert simulate(schedule, durations=durations).makespan == 18
    assert changed(delays=True, defers=True).makespan == 16
    late = changed(defers=True)
    assert late.makespan == 17
    assert [action.kind for action in late.ranks[2].actions[-4:]] == [Pass.OUTPUT_WEIGHT] * 4
    assert late.ranks[2].busy == changed().ranks[2].busy == 12
    assert [action.microbatch for action in changed(defers=True, limit=1).ranks[2].actions[-2:]] == [3, 3]
    assert [rank.actions for rank in late.ranks[:2]] == [rank.actions for rank in changed().ranks[:2]]


def test_an_output_weight_without_its_backward_pass_is_found() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0: output weight of micro-batch 1, chunk 0 is out of order"):
        simulate([[Action(Pass.FORWARD, 1), Action(Pass.OUTPUT_WEIGHT, 1), Action(Pass.BACKWARD, 1)]])


def test_an_output_weight_comes_once() -> None:
    late = Action(Pass.OUTPUT_WEIGHT, 0)
    simulate([[forward(0), backward(0), late]])
    with pytest.raises(ScheduleError, match="output weight of micro-batch 0, chunk 0 is out of order"):
        simulate([[forward(0), backward(0), late, late]])


@pytest.mark.parametrize(
    ("actions", "peak"),
    [
        ([], 0),
        ([forward(0)], 1),
        ([forward(0), forward(1)], 1),
        ([forward(0), backward(0), forward(1), backward(1)], 1),
        ([forward(0), forward(1), backward(0)], 2),
        ([forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)], 2),
        ([forward(0), forward(1), Action(Pass.BACKWARD_INPUT, 0), Action(Pass.BACKWARD_WEIGHT, 0), backward(1)], 2),
    ],
)
def test_the_peak_is_what_waits_for_backward_passes_at_once(actions: list[Action], peak: int) -> None:
    assert RankTimeline(tuple(actions)).peak_activations == peak
