"""The flight recorder: what it keeps of communications, and what of a rank's progress."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch

from megatron.core.flight.communication import format_ranks, parse_ranks
from megatron.core.flight.recorder import FlightRecorder
from megatron.core.parallel_state import record_flight
from megatron.core.process_group import Group


def recorded_group() -> tuple[FlightRecorder, Group]:
    recorder = FlightRecorder()
    return recorder, record_flight(Group(("tp",), (0, 1), 0), recorder)


@dataclass
class Work:
    recorder: FlightRecorder
    seen: str = ""

    def wait(self) -> None:
        assert self.recorder.blocked is not None
        self.seen = self.recorder.describe(self.recorder.blocked).operation


def start(group: Group, operation: str) -> list:
    """Stand for a collective: the place of its entry is its caller."""
    return group.begin(operation, torch.empty(3, 5), 60)


def test_a_communication_is_kept_with_its_group_number_and_line() -> None:
    recorder, group = recorded_group()
    # This file stands for that of the collectives: the place is where its functions were called from.
    entry = start(group, "all_reduce")
    assert recorder.describe(entry).seconds is None
    assert recorder.blocked is entry
    assert group.end(entry) is None
    assert recorder.blocked is None
    said = recorder.describe(entry)
    assert (said.channel, said.sequence, said.operation, said.num_bytes) == ("tp[0,1]", 1, "all_reduce", 60)
    assert said.shape == (3, 5)
    assert said.seconds is not None
    assert __file__ not in said.place


def test_the_line_is_that_of_the_call(tmp_path) -> None:
    recorder, group = recorded_group()
    caller = tmp_path / "caller.py"
    caller.write_text("def call(start, group):\n    x = 1\n    return start(group, 'all_gather')\n")
    namespace: dict = {}
    exec(compile(caller.read_text(), str(caller), "exec"), namespace)
    assert recorder.describe(namespace["call"](start, group)).place == f"{caller}:3"


def test_work_that_goes_on_beside_is_over_when_it_has_been_waited_for() -> None:
    recorder, group = recorded_group()
    entry, work = start(group, "reduce_scatter"), Work(recorder)
    pending = group.end(entry, work)
    assert recorder.blocked is None
    assert recorder.describe(entry).seconds is None
    assert pending is not None
    pending.wait()
    assert work.seen == "reduce_scatter"
    assert recorder.blocked is None
    assert recorder.describe(entry).seconds is not None


def test_the_ring_keeps_the_latest_and_numbers_go_on() -> None:
    recorder, group = recorded_group()
    for _ in range(len(recorder.ring) + 7):
        group.end(start(group, "all_reduce"))
    assert [entry.sequence for entry in recorder.latest()] == list(range(8, len(recorder.ring) + 8))


def test_a_group_of_one_and_one_without_a_recorder_record_nothing() -> None:
    alone = record_flight(Group(("tp",), (3,), 0), FlightRecorder())
    assert alone.flight is None
    assert alone.begin("all_reduce") is None
    work = Work(FlightRecorder())
    assert alone.end(None, work) is work


def test_every_move_counts() -> None:
    recorder, group = recorded_group()
    moves = [recorder.moves]
    entry = start(group, "broadcast")
    moves.append(recorder.moves)
    group.end(entry)
    moves.append(recorder.moves)
    recorder.enter("forward")
    moves.append(recorder.moves)
    recorder.end_iteration(1, 0.5)
    moves.append(recorder.moves)
    assert moves == sorted(set(moves))


def test_the_longest_step_leaves_the_first_iteration_out_and_falls_slowly() -> None:
    recorder = FlightRecorder()
    for seconds in (90.0, 2.0, 1.0):
        recorder.end_iteration(1, seconds)
    assert 1.9 < recorder.longest_step_s < 2.0


def test_what_a_thread_reads_is_known_while_it_reads() -> None:
    recorder = FlightRecorder()
    with recorder.reading_of([4, 5]):
        assert list(recorder.reading.values()) == [[4, 5]]
    assert not recorder.reading


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0, 1), "0,1"), ((0, 1, 2, 3), "0-3"), ((0, 8, 16), "0-16/8"), ((5, 2), "5,2"), ((0, 3, 4), "0,3,4")],
)
def test_ranks_are_written_short_and_read_back(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text
    assert parse_ranks(f"tp[{text}]") == ranks


def test_every_collective_is_recorded() -> None:
    from megatron.core import collectives

    functions = [
        function
        for _, function in inspect.getmembers(collectives, inspect.isfunction)
        if function.__module__ == collectives.__name__ and "group=group.handle" in inspect.getsource(function)
    ]
    assert len(functions) == 12
    assert [f.__name__ for f in functions if "group.begin(" not in inspect.getsource(f)] == []
