"""Stragglers: a rank's own time, who is slow beside its like, and when ranks tell each other their times."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import pretrain_gpt
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import Group
from megatron.core.timers import Timers
from megatron.training.callbacks import stragglers
from megatron.training.callbacks.stragglers import PARTS, PartsClock, StragglerReport, Stragglers, slowest
from tests.harness.distributed import run_distributed
from tests.unit.config.command_lines import MINIMAL


def row(**seconds: float) -> list[float]:
    return [seconds.get(part, 0.0) for part in PARTS]


def test_waiting_is_taken_from_the_part_that_it_lies_in(monkeypatch) -> None:
    now = 10.0
    monkeypatch.setattr(stragglers, "time", SimpleNamespace(perf_counter=lambda: now))
    recorder = FlightRecorder()
    clock = PartsClock(recorder, torch.device("cpu"))
    for phase, seconds, waited_s in (
        ("setup", 100.0, 50.0),
        ("data", 1.0, 0.0),
        ("forward", 4.0, 1.0),
        ("backward", 6.0, 2.0),
        ("forward", 2.0, 0.0),
        ("gradients", 3.0, 3.0),
        ("optimizer", 0.5, 0.0),
        ("", 7.0, 0.0),
        ("save", 9.0, 4.0),
    ):
        clock.mark(phase)
        now += seconds
        recorder.waited_s += waited_s
    clock.mark("")
    assert dict(zip(PARTS, clock.take(), strict=True)) == {
        "forward": 5.0,
        "backward": 4.0,
        "data": 1.0,
        "other": 0.5,
        "communication": 6.0,
    }
    assert clock.take() == [0.0] * len(PARTS)


def test_the_slow_one_of_two_is_named_with_its_part() -> None:
    seconds = [row(forward=1.0, backward=2.0, communication=1.9), row(forward=1.1, backward=3.9)]
    assert slowest(seconds, [0, 0]) == (1, pytest.approx(5.0 / 3.0), "backward")


def test_stages_have_different_work_and_are_not_compared() -> None:
    seconds = [row(forward=1.0), row(forward=1.0), row(forward=3.0), row(forward=3.6)]
    assert slowest(seconds, [0, 0, 1, 1]) == (3, pytest.approx(1.2), "forward")


def test_a_rank_alone_on_its_stage_is_compared_with_all() -> None:
    assert slowest([row(data=1.0), row(data=1.0), row(data=4.0)], [0, 1, 2])[0] == 2


def test_the_line_says_who_at_what_and_since_when() -> None:
    seconds = [row(forward=0.002), row(forward=0.001, data=0.009), row(forward=0.003)]
    report = StragglerReport(11, 20, seconds, 1, 5.0, "data", 6)
    assert report.line(2) == (
        " stragglers | iterations 11 to 20 | rank 1 takes 5.00 times as long as its peers, most at data (9.0 ms per "
        "iteration), since iteration 6 | slowest: 1 (10.0 ms), 2 (3.0 ms) | fastest: 0 (2.0 ms), 2 (3.0 ms) |"
    )
    assert report.figures()["slow_rank"] == 1
    assert report.scalars()["straggler-rank"] == 1.0


def test_nobody_is_slow_by_a_little() -> None:
    report = StragglerReport(1, 10, [row(forward=1.0), row(forward=1.05)], 1, 1.05, "forward", None)
    assert "| none |" in report.line(1)
    assert report.figures()["slow_rank"] is None


def test_a_run_that_goes_back_divides_by_the_iterations_that_it_had(monkeypatch) -> None:
    now = 10.0
    monkeypatch.setattr(stragglers, "time", SimpleNamespace(perf_counter=lambda: now))
    device = torch.device("cpu")
    clock = PartsClock(FlightRecorder(), device)
    watched = Stragglers(clock, describe_parallel_state(0, 1), device, 0)
    reports = []
    # Iteration 10 is reported, 12 goes back to 4, and 5 to 7 come again; 8 is passed over.
    for iteration in (9, 10, 11, 5, 6, 7, 9, 10):
        clock.mark("forward")
        now += 2.0
        watched.end_iteration(iteration)
        if iteration in (10, 7):
            reports.append(watched.report(iteration))
    assert [(report.first, report.last, report.seconds[0][0]) for report in reports] == [
        (1, 10, 2.0),
        (5, 7, 2.0),
        (8, 10, 2.0),
    ]


def gathers_of_a_run(level: int) -> list[int]:
    """Return over how many iterations the times were that were gathered after iterations."""
    of_iterations: list[int] = []
    gather = Timers.gather

    def counted(timers: Timers, group: Group, names: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        if "normalizer" in options:
            of_iterations.append(options["normalizer"])
        return gather(timers, group, names, *rest, **options)

    words = ["--train-iters", "5", "--log-interval", "2", "--eval-iters", "0", "--timing-log-level", str(level)]
    with (
        patch.object(Timers, "gather", counted),
        patch("megatron.training.pretraining.shut_down"),  # the process group is the test's
    ):
        assert pretrain_gpt.main([*MINIMAL, *words]) == 0
    return of_iterations


@pytest.mark.parametrize(("level", "iterations"), [(0, []), (1, [2, 2])])
def test_times_are_gathered_where_something_is_timed(level: int, iterations: list[int]) -> None:
    assert run_distributed(1, gathers_of_a_run, level) == [iterations]
