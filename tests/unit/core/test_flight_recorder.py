"""The flight recorder: what it keeps of communications, and what of a rank's progress."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from megatron.core import collectives
from megatron.core.flight_recorder import DeviceMark, FlightRecorder, GivenUpError, format_ranks, parse_ranks
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
    assert (recorder.num_begun, recorder.num_ended) == (1, 0)
    assert group.end(entry) is None
    assert recorder.blocked is None
    assert (recorder.num_begun, recorder.num_ended) == (1, 1)
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


@dataclass
class Mark:
    """Stand for an event of a device: past it once the device has come so far."""

    place: int
    device: FakeDevice

    def query(self) -> bool:
        if self.device.failure:
            raise RuntimeError(self.device.failure)
        return self.device.reached >= self.place


@dataclass
class FakeDevice:
    """Stand for a device that works through what it is given: kernels and marks, as far as ``reached``."""

    given: int = 0
    reached: int = 0
    failure: str = ""

    made: int = 0

    def mark(self, old: DeviceMark | None) -> Mark:
        """Move an old mark to the end of what was given, or make one."""
        self.given += 1
        if isinstance(old, Mark):
            old.place = self.given
            return old
        self.made += 1
        return Mark(self.given, self)


@dataclass(eq=False)
class BesideWork(Work):
    """Stand for a communication beside, which a device has done when ``device`` says so."""

    is_over = False

    def is_completed(self) -> bool:
        return self.is_over


def names_on(recorder: FlightRecorder) -> tuple[str | None, str | None, dict[str, int]]:
    view = recorder.on_device()
    assert view is not None
    first = next(iter((*view.inside, *view.beside)), None)
    said = (None if entry is None else recorder.describe(entry) for entry in (first, view.ahead))
    blocked, ahead = (None if each is None else f"{each.operation} #{each.sequence} of {each.channel}" for each in said)
    return blocked, ahead, dict(view.entered)


def test_a_host_that_waits_for_all_has_nothing_to_ask_a_device() -> None:
    recorder, group = recorded_group()
    group.end(start(group, "all_reduce"))
    assert recorder.on_device() is None


def test_the_oldest_communication_that_a_device_has_not_finished_is_known() -> None:
    device = FakeDevice()
    recorder = FlightRecorder(mark=device.mark)
    tp, dp = (record_flight(Group((name,), (0, 1), 0), recorder) for name in ("tp", "dp"))
    for group, operation in ((tp, "all_reduce"), (dp, "all_gather"), (tp, "reduce_scatter")):
        group.end(start(group, operation))
    assert recorder.blocked is None
    # Two marks each: before and behind.
    assert names_on(recorder) == (None, "all_reduce #1 of tp[0,1]", {"tp[0,1]": 0, "dp[0,1]": 0})
    device.reached = 1
    assert names_on(recorder) == (
        "all_reduce #1 of tp[0,1]",
        "all_gather #1 of dp[0,1]",
        {"tp[0,1]": 1, "dp[0,1]": 0},
    )
    device.reached = 3
    assert names_on(recorder)[0] == "all_gather #1 of dp[0,1]"
    device.reached = 4
    assert names_on(recorder) == (None, "reduce_scatter #2 of tp[0,1]", {"tp[0,1]": 1, "dp[0,1]": 1})
    device.reached = 6
    assert names_on(recorder) == (None, None, {"tp[0,1]": 2, "dp[0,1]": 1})
    device.failure = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        recorder.on_device()


def test_a_communication_beside_is_asked_for_itself_until_it_is_waited_for() -> None:
    device = FakeDevice(reached=1)
    recorder = FlightRecorder(mark=device.mark)
    group = record_flight(Group(("dp",), (0, 1), 0), recorder)
    work = BesideWork(recorder)
    pending = group.end(start(group, "reduce_scatter"), work)
    assert pending is not None
    assert names_on(recorder)[0] == "reduce_scatter #1 of dp[0,1]"
    work.is_over = True
    assert names_on(recorder)[0] is None
    work.is_over = False
    pending.wait()
    assert names_on(recorder)[0] == "reduce_scatter #1 of dp[0,1]"
    device.reached = 2
    assert names_on(recorder)[0] is None
    # One that is waited for by work that is recorded as a graph has no mark.
    pending = group.end(start(group, "all_gather"), work)
    recorder.mark = lambda old: None
    assert pending is not None
    pending.wait()
    device.reached = 3
    assert names_on(recorder)[0] == "all_gather #2 of dp[0,1]"
    work.is_over = True
    assert names_on(recorder)[0] is None


def test_what_was_over_when_it_was_waited_for_hides_nothing_behind_it() -> None:
    device = FakeDevice(reached=1)
    recorder = FlightRecorder(mark=device.mark)
    dp, tp = (record_flight(Group((name,), (0, 1), 0), recorder) for name in ("dp", "tp"))
    work = BesideWork(recorder)
    pending = dp.end(start(dp, "reduce_scatter"), work)
    tp.end(start(tp, "all_reduce"))
    work.is_over = True
    assert pending is not None
    pending.wait()
    device.reached = 2
    assert names_on(recorder)[0] == "all_reduce #1 of tp[0,1]"
    view = recorder.on_device()
    assert view is not None
    assert view.beside == ()


def test_what_is_over_before_the_device_comes_to_the_wait_stands_behind_what_the_device_is_in() -> None:
    """The host has waited long before: the mark behind the wait says nothing of when the communication ended."""
    device = FakeDevice(reached=1)
    recorder = FlightRecorder(mark=device.mark)
    dp, tp = (record_flight(Group((name,), (0, 1), 0), recorder) for name in ("dp", "tp"))
    pending = dp.end(start(dp, "reduce_scatter"), BesideWork(recorder))
    tp.end(start(tp, "all_reduce"))
    assert pending is not None
    pending.wait()
    device.reached = 2
    view = recorder.on_device()
    assert view is not None
    said = [[recorder.describe(entry).operation for entry in entries] for entries in (view.inside, view.beside)]
    assert said == [["all_reduce"], ["reduce_scatter"]]


def test_marks_are_made_once_for_each_place_in_the_ring() -> None:
    device = FakeDevice()
    recorder = FlightRecorder(mark=device.mark)
    group = record_flight(Group(("tp",), (0, 1), 0), recorder)
    size = len(recorder.ring)
    for number in range(3 * size):
        work = BesideWork(recorder) if number % 5 == 0 else None
        pending = group.end(start(group, "all_reduce"), work)
        if pending is not None and number % 10 == 0:
            pending.wait()
    assert device.given == 6 * size - 3 * size // 10
    assert device.made <= 2 * size
    device.reached = device.given
    view = recorder.on_device()
    assert view is not None
    assert not view.inside
    assert view.ahead is None


def test_a_mark_that_is_moved_while_it_is_asked_says_nothing_of_the_old_entry() -> None:
    device = FakeDevice()
    recorder = FlightRecorder(mark=device.mark)
    group = record_flight(Group(("tp",), (0, 1), 0), recorder)
    first = start(group, "all_reduce")
    group.end(first)
    (mark,) = [each for each in first if isinstance(each, Mark) and each.place == 1]
    device.reached = 2

    class Moving(Mark):
        """Be moved by the thread that communicates just when another one asks."""

        def query(self) -> bool:
            for _ in range(len(recorder.ring)):
                group.end(start(group, "all_gather"))
            return super().query()

    mark.__class__ = Moving
    first[next(index for index, each in enumerate(first) if isinstance(each, Mark) and each.place == 2)] = None
    view = recorder.on_device()
    assert view is not None
    assert first not in view.inside
    assert view.ahead is not first


def test_what_is_recorded_as_a_graph_is_given_to_no_device() -> None:
    recorder = FlightRecorder(mark=lambda old: None)
    group = record_flight(Group(("tp",), (0, 1), 0), recorder)
    group.end(start(group, "all_reduce"))
    assert names_on(recorder) == (None, None, {"tp[0,1]": 1})


@pytest.mark.parametrize("mark", [None, lambda old: None, FakeDevice().mark])
def test_the_ring_keeps_no_work_that_was_waited_for(mark: Callable | None) -> None:
    """It would keep its tensors."""
    recorder = FlightRecorder(mark=mark)
    group = record_flight(Group(("tp",), (0, 1), 0), recorder)
    for is_watched in (True, False):
        work = BesideWork(recorder)
        seen = weakref.ref(work)
        pending = group.end(start(group, "all_gather"), work)
        if not is_watched:
            recorder.mark = None
        assert pending is not None
        pending.wait()
        del work, pending
        assert seen() is None


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_work_that_leaves_the_ring_before_anybody_waits_for_it_is_let_go(is_waited_for: bool) -> None:
    recorder = FlightRecorder(mark=FakeDevice().mark)
    group = record_flight(Group(("tp",), (0, 1), 0), recorder)
    work = BesideWork(recorder)
    seen = weakref.ref(work)
    pending = group.end(start(group, "all_gather"), work)
    for _ in range(len(recorder.ring)):
        group.end(start(group, "all_reduce"))
    assert pending is not None
    if is_waited_for:
        pending.wait()
    del work, pending
    assert seen() is None


def test_a_group_may_be_used_first_while_a_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FlightRecorder(mark=FakeDevice().mark)
    group = record_flight(Group(("tp",), (0, 1), 0), recorder)
    group.end(start(group, "all_reduce"))
    in_order = recorder._in_order

    def begin_elsewhere() -> list:
        entries = in_order()
        start(record_flight(Group(("dp",), (0, 2), 0), recorder), "all_gather")
        return entries

    monkeypatch.setattr(recorder, "_in_order", begin_elsewhere)
    view = recorder.on_device()
    assert view is not None
    assert view.entered["tp[0,1]"] == 0


def test_numbers_that_were_given_up_are_refused() -> None:
    recorder, group = recorded_group()
    group.ensure_not_given_up()
    recorder.give_up()
    with pytest.raises(GivenUpError, match="the received data is incomplete"):
        group.ensure_not_given_up()
    Group(("tp",), (0,), 0).ensure_not_given_up()


def test_bytes_from_one_rank_to_another_are_counted_for_these_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that send nothing count nothing: what a group has done together stays the same number on all."""
    monkeypatch.setattr(collectives.dist, "P2POp", lambda *arguments, **more: arguments)
    monkeypatch.setattr(collectives.dist, "batch_isend_irecv", lambda works: [])
    recorder = FlightRecorder()
    world = record_flight(Group(("dp",), (4, 5, 6), 1), recorder)
    device, data = torch.device("cpu"), torch.zeros(7, dtype=torch.uint8)
    collectives.exchange_bytes(data, 2, None, None, world, device)
    collectives.exchange_bytes(data, 2, data.clone(), 0, world, device)
    collectives.exchange_bytes(data, 1, data.clone(), 1, world, device)
    assert {name: channel.entered for name, channel in recorder.channels.items()} == {
        "dp[4-6]": 0,
        "dp 5->6[5,6]": 2,
        "dp 4->5[4,5]": 1,
    }
    assert all(entry.seconds is not None for entry in recorder.latest())
    assert recorder.latest()[-1].operation == "receive_bytes"
    assert parse_ranks("dp 5->6[5,6]") == (5, 6)
