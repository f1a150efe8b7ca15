"""Timers under a clock that the test moves."""

from __future__ import annotations

import pytest

from megatron.core.errors import MegatronError
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.timers import Timers, format_report


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.events: list[str] = []

    def __call__(self) -> float:
        self.events.append("clock")
        return self.now_s

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def barrier(self) -> None:
        self.events.append("barrier")

    def timers(self, log_level: int = 2, log_option: str = "minmax") -> Timers:
        return Timers(log_level, log_option, synchronize=self.synchronize, barrier=self.barrier, clock=self)


STATE = describe_parallel_state(0, 1)


def test_stretches_add_up_until_reset() -> None:
    clock = Clock()
    timers = clock.timers()
    for seconds in (1.5, 2.0):
        with timers("forward"):
            clock.now_s += seconds
        clock.now_s += 10.0
    assert timers.elapsed_s(reset=False) == {"forward": 3.5}
    assert timers.elapsed_s() == {"forward": 3.5}
    assert timers.elapsed_s() == {}


def test_a_running_timer_is_read_and_goes_on() -> None:
    clock = Clock()
    timer = clock.timers()("interval-time")
    timer.start()
    clock.now_s += 4.0
    assert timer.elapsed_s() == 4.0
    clock.now_s += 3.0
    assert timer.elapsed_s(reset=False) == 3.0
    clock.now_s += 1.0
    timer.stop()
    assert timer.elapsed_s() == 4.0
    assert "barrier" not in clock.events


def test_device_is_waited_for_and_ranks_only_when_asked() -> None:
    clock = Clock()
    timer = clock.timers()("save-checkpoint")
    timer.start()
    timer.stop(barrier=True)
    assert clock.events == ["synchronize", "clock", "barrier", "synchronize", "clock"]


def test_timers_above_the_level_do_nothing() -> None:
    clock = Clock()
    timers = clock.timers(log_level=1)
    with timers("forward-compute", log_level=2):
        clock.now_s += 1.0
    with timers("optimizer", log_level=1):
        clock.now_s += 1.0
    assert timers.elapsed_s() == {"optimizer": 1.0}
    assert "barrier" not in clock.events
    assert clock.events.count("clock") == 2


def test_without_a_level_only_timers_without_one_run() -> None:
    noted: list[str] = []
    timers = Timers(note=noted.append)
    for name, level in (("interval-time", 0), ("optimizer", 1)):
        with timers(name, log_level=level):
            pass
    with timers("interval-time"):
        pass
    assert list(timers.elapsed_s()) == ["interval-time"]
    assert noted == ["interval-time", "optimizer", "interval-time"]


def test_misuse_is_named() -> None:
    timer = Clock().timers()("optimizer")
    with pytest.raises(MegatronError, match="optimizer was stopped"):
        timer.stop()
    timer.start()
    with pytest.raises(MegatronError, match="optimizer was started twice"):
        timer.start()


def test_report_has_megatrons_form() -> None:
    clock = Clock()
    timers = clock.timers()
    with timers("load-checkpoint"):
        clock.now_s += 0.25
    assert timers.report(STATE, normalizer=10) == (
        "(min, max) time across ranks (ms):\n    load-checkpoint ................................: (25.00, 25.00)"
    )
    assert timers.report(STATE) == ""


def test_report_of_chosen_names_leaves_the_others_running() -> None:
    clock = Clock()
    timers = clock.timers(log_option="max")
    for name in ("first", "second"):
        with timers(name):
            clock.now_s += 1.0
    assert "second" not in timers.report(STATE, names=["first", "absent"])
    assert timers.elapsed_s() == {"second": 1.0}


TIMES = [{"all-grads-sync": 3.0, "only-here": 1.0}, {"all-grads-sync": 2.5}, {"all-grads-sync": 7.25}]


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        (
            "minmax",
            [
                "(min, max) time across ranks (ms):",
                "    all-grads-sync .................................: (2.50, 7.25)",
                "    only-here ......................................: (1.00, 1.00)",
            ],
        ),
        (
            "max",
            [
                "max time across ranks (ms):",
                "    all-grads-sync .................................: 7.25",
                "    only-here ......................................: 1.00",
            ],
        ),
        (
            "all",
            [
                "times across ranks (ms):",
                "  all-grads-sync:",
                "     rank  0: 3.00",
                "     rank  1: 2.50",
                "     rank  2: 7.25",
                "  only-here:",
                "     rank  0: 1.00",
            ],
        ),
    ],
)
def test_report_over_ranks(option: str, lines: list[str]) -> None:
    assert format_report(TIMES, option).splitlines() == lines


def test_times_are_of_one_iteration_and_begin_anew_unless_said_otherwise() -> None:
    clock = Clock()
    timers = Timers(clock=clock)
    with timers("load-checkpoint"):
        clock.now_s += 0.25
    assert timers.gather(STATE, reset=False) == [{"load-checkpoint": 250.0}]
    assert timers.report(STATE, reset=False).splitlines()[1].endswith(": (250.00, 250.00)")
    assert timers.report(STATE).splitlines()[1].endswith(": (250.00, 250.00)")
    assert timers.gather(STATE) == [{}]
    with timers("load-checkpoint"):
        clock.now_s += 1.0
    assert [timers.gather(STATE), timers.gather(STATE)] == [[{"load-checkpoint": 1000.0}], [{}]]
