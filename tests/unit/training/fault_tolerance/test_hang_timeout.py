"""For how long nothing need get done."""

from __future__ import annotations

import pytest

from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_state import record_flight
from megatron.core.process_group import Group
from megatron.training.fault_tolerance import hang_timeout
from megatron.training.fault_tolerance.hang_timeout import Patience


class Machine:
    """Stand for the clock, the processor's time and the disk of a process."""

    def __init__(self, monkeypatch) -> None:
        self.now = self.cpu_s = 100.0
        self.bytes = 0
        monkeypatch.setattr(hang_timeout.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(hang_timeout.time, "process_time", lambda: self.cpu_s)
        monkeypatch.setattr(hang_timeout, "bytes_moved", lambda: self.bytes)
        monkeypatch.setattr(hang_timeout, "_waits_for_disk", lambda: False)


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def test_a_step_may_take_five_times_the_longest_one() -> None:
    recorder = FlightRecorder(iterations_done=3, phase="forward", longest_step_s=30.0)
    assert Patience(recorder, 20).allowance_s() == 150.0
    recorder.longest_step_s = 1.0
    assert Patience(recorder, 20).allowance_s() == 20.0
    assert Patience(recorder, None).allowance_s() == 60.0


def test_what_has_no_measure_may_take_longer() -> None:
    recorder = FlightRecorder(iterations_done=3)
    for phase, seconds in (("setup", 200.0), ("load", 200.0), ("save", 25.0), ("evaluate", 20.0), ("data", 20.0)):
        recorder.enter(phase)
        assert Patience(recorder, 20).allowance_s() == seconds
    assert Patience(FlightRecorder(phase="forward"), 20).allowance_s() == 200.0
    assert Patience(FlightRecorder(phase="forward", iterations_done=2), 20, settling=4).allowance_s() == 200.0


def test_a_process_that_gets_nothing_done_is_idle(machine: Machine) -> None:
    recorder = FlightRecorder(iterations_done=3, phase="forward")
    patience = Patience(recorder, 20)
    assert patience.idle_s() == 0.0
    machine.now += 7.0
    machine.cpu_s += 7.0  # it may spin in a wait
    assert patience.idle_s() == 7.0
    recorder.tick()
    assert patience.idle_s() == 0.0


@pytest.mark.parametrize(("cpu_s", "num_bytes"), [(0.9, 0), (0.0, 10**6)])
def test_one_that_computes_or_writes_is_at_work_in_a_save_but_not_for_ever(
    machine: Machine, cpu_s: float, num_bytes: int
) -> None:
    patience = Patience(FlightRecorder(iterations_done=3, phase="save"), 20)
    patience.idle_s()
    idle = []
    for _ in range(300):
        machine.now += 1.0
        machine.cpu_s += cpu_s
        machine.bytes += num_bytes
        idle.append(patience.idle_s())
    assert set(idle[:249]) == {0.0}
    assert idle[-1] == pytest.approx(51.0, abs=2.0)


def test_one_that_sleeps_in_a_save_is_idle(machine: Machine) -> None:
    patience = Patience(FlightRecorder(iterations_done=3, phase="save"), 20)
    patience.idle_s()
    for _ in range(30):
        machine.now += 1.0
        machine.cpu_s += 0.01
        machine.bytes += 3000
        idle_s = patience.idle_s()
    assert idle_s == 30.0


def test_time_in_which_the_process_did_not_run_is_forgotten(machine: Machine) -> None:
    patience = Patience(FlightRecorder(iterations_done=3, phase="forward"), 20)
    patience.idle_s()
    machine.now += 3600.0
    patience.start_again()
    machine.now += 1.0
    assert patience.idle_s() == 1.0


class Mark:
    """Stand for an event of a device, which has come past it or not."""

    is_passed = False

    def query(self) -> bool:
        return self.is_passed


def test_a_host_that_spins_until_a_device_answers_is_not_at_work(machine: Machine) -> None:
    marks: list[Mark] = []

    def mark(old: object) -> Mark:
        marks.append(Mark())
        return marks[-1]

    recorder = FlightRecorder(mark=mark)
    group = record_flight(Group(("tp",), (0, 1), 0), recorder)
    queue = [True]
    patience = Patience(recorder, 20, device_has_work=lambda: queue[0])
    for _ in range(2):
        group.end(group.begin("all_reduce"))

    def idle_after(seconds: int) -> float:
        for _ in range(seconds):
            machine.now += 1.0
            machine.cpu_s += 1.0
            idle_s = patience.idle_s()
        return idle_s

    idle_after(2)
    assert idle_after(30) == 30.0
    # The device gets on.
    marks[0].is_passed = marks[1].is_passed = True
    assert idle_after(1) == 0.0
    assert idle_after(30) == 30.0
    # It is past the last communication, and has other work.
    marks[2].is_passed = marks[3].is_passed = True
    assert idle_after(1) == 0.0
    assert idle_after(30) == 30.0
    # It has none, so that the host is at work of its own.
    queue[0] = False
    assert idle_after(30) == 0.0
