"""The watchdogs of several ranks over one store, in one process: what they report, and what they let be."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.cli.hang_report import main
from megatron.config.arguments import resolve_arguments
from megatron.core.device import Device
from megatron.core.flight_recorder import DeviceMark, FlightRecorder
from megatron.core.parallel_state import describe_parallel_state
from megatron.training.fault_tolerance.hang_report import HangReportError, read_hang_report
from megatron.training.fault_tolerance.hang_timeout import Patience
from megatron.training.fault_tolerance.node_board import NodeBoard, enter, processes_in
from megatron.training.fault_tolerance.processes import kill, state_of, this_process
from megatron.training.fault_tolerance.rank_state import RankState
from megatron.training.fault_tolerance.watchdog import Surroundings, Watchdog, watching
from megatron.training.initialize import LaunchEnvironment, initialize_runtime
from tests.unit.config.command_lines import MINIMAL
from tests.unit.core.test_flight_recorder import FakeDevice

SECONDS = 0.6
BEAT_S = 0.05
SOON_S = 20.0


@dataclass
class Ranks:
    """Hold the watchdogs of two ranks that have done an iteration, and what they did in the end.

    ``node_of`` has the first rank of each one's node.
    """

    folder: Path
    node_of: tuple[int, ...] = (0, 0)
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.num_connections = 0
        for rank, node in enumerate(self.node_of):
            enter(self.folder / f"node-{node}", RankState(rank, this_process()))
        self.recorders = [FlightRecorder(phase="forward", iterations_done=2) for _ in range(2)]
        self.watchdogs = [self._watchdog(rank, store) for rank in range(2)]

    def _watchdog(self, rank: int, store: dist.Store) -> Watchdog:
        def leave(status: int) -> None:
            self.statuses[rank] = status
            if len(self.statuses) == 2:
                self.ended.set()

        def connect() -> dist.Store:
            self.num_connections += 1
            return store

        folder = self.folder / f"node-{self.node_of[rank]}"
        around = Surroundings(
            rank,
            2,
            processes_in(folder),
            self.folder,
            error_file=str(self.folder / "error.json"),
            count_failure=lambda: self.failures.append(rank),
            leave=leave,
        )
        recorder = self.recorders[rank]
        board = NodeBoard(rank, folder, self.node_of, "test", connect)
        if self.node_of[rank] == rank:
            board.open()
        return Watchdog(board, recorder, Patience(recorder, SECONDS), around, BEAT_S)

    def move(self, rank: int, seconds: float) -> None:
        """Let a rank get something done for some time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.recorders[rank].tick()
            time.sleep(BEAT_S)

    def close(self) -> None:
        for watchdog in self.watchdogs:
            watchdog.close()


@pytest.fixture(params=[(0, 0), (0, 1)], ids=["one node", "two nodes"])
def ranks(tmp_path: Path, monkeypatch, request):
    # The ranks are one process: none of them waits for the end of another.
    monkeypatch.setattr("megatron.training.fault_tolerance.watchdog._ENDING_S", 0.0)
    made = Ranks(tmp_path, request.param)
    yield made
    made.close()


def wait_in(recorder: FlightRecorder, sequence: int) -> None:
    """Let a rank wait in an all-reduce."""
    channel = recorder.channel("tp", (0, 1))
    for number in range(sequence):
        entry = channel.begin("all_reduce", None, 96)
        if number < sequence - 1:
            channel.end(entry)


def test_who_has_not_entered_is_named_and_all_end(ranks: Ranks, capsys) -> None:
    wait_in(ranks.recorders[0], 3)
    channel = ranks.recorders[1].channel("tp", (0, 1))
    channel.end(channel.begin("all_reduce", None, 96))
    assert ranks.ended.wait(SOON_S)
    assert ranks.statuses == {0: 1, 1: 1}
    assert ranks.failures == [0]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"HANG: rank 1 on {this_process().host} (pid {os.getpid()}) is in phase forward at ")
    assert " and has not entered all_reduce #3 of tp[0,1], 96 bytes (" in last
    assert last.endswith(", where rank 0 waits")
    told = json.loads((ranks.folder / "error.json").read_text())["message"]["extraInfo"]["py_callstack"]
    assert told == last


def test_a_device_that_does_not_come_to_a_communication_is_named_where_hosts_wait_for_none(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on NCCL: both hosts have begun all and read a number; one device is in a kernel that does not end."""
    for recorder, reached in zip(ranks.recorders, (5, 4)):
        device = FakeDevice(reached=reached)
        recorder.mark = device.mark
        channel = recorder.channel("tp", (0, 1))
        for _ in range(4):
            channel.end(channel.begin("all_reduce", None, 96))
    assert ranks.ended.wait(SOON_S)
    said = capsys.readouterr().err.splitlines()
    (waiting,) = [line for line in said if line.startswith("0 ") and "all_reduce #3 of tp[0,1], 96 bytes" in line]
    assert " on its device " in waiting
    assert waiting.endswith("rank 1")
    last = said[-1]
    assert last.startswith(f"HANG: rank 1 on {this_process().host} (pid {os.getpid()}) is in phase forward at ")
    assert ", with a device that is still running work before all_reduce #3 of tp[0,1], 96 bytes (" in last
    assert ", and has not entered all_reduce #3 of tp[0,1], 96 bytes (" in last
    assert last.endswith(", where rank 0 waits")
    (path,) = ranks.folder.glob("hang-*.json")
    report = read_hang_report(path)
    assert report.culprit_lines() == [last.removeprefix("HANG: ")]
    assert report.states[0].on_device is not None
    assert dict(report.states[0].on_device.entered) == {"tp[0,1]": 3}


def test_the_report_is_kept_and_read_back(ranks: Ranks, capsys) -> None:
    wait_in(ranks.recorders[0], 1)
    assert ranks.ended.wait(SOON_S)
    capsys.readouterr()
    (path,) = ranks.folder.glob("hang-*.json")
    report = read_hang_report(path)
    assert [culprit.rank for culprit in report.diagnosis.culprits] == [1]
    assert report.diagnosis.waits_for == {0: (1,), 1: ()}
    assert {stack["thread"] for stack in report.answers[1]["stacks"]} >= {"MainThread"}
    assert main([str(path)]) == 0
    assert report.culprit_lines()[0] in capsys.readouterr().out
    picture = path.with_suffix(".svg")
    assert main([str(path), "--output", str(picture)]) == 0
    assert "all_reduce" in picture.read_text()


def test_a_leader_that_is_gone_is_replaced_and_the_hang_found(ranks: Ranks, monkeypatch, capsys) -> None:
    monkeypatch.setattr("megatron.training.fault_tolerance.watchdog._LEADER_SILENCE_S", 0.5)
    ranks.watchdogs[0].close(is_over=False)
    wait_in(ranks.recorders[1], 1)
    deadline = time.monotonic() + SOON_S
    while ranks.statuses != {1: 1}:
        assert time.monotonic() < deadline
        time.sleep(BEAT_S)
    assert "HANG: rank 0" in capsys.readouterr().err
    assert ranks.failures == [1]
    # On one node the second rank opens a connection when the first one has been silent for long.
    assert ranks.num_connections == 2


def test_a_node_has_one_connection_while_its_speaker_speaks(ranks: Ranks) -> None:
    for _ in range(10):
        ranks.move(0, BEAT_S)
        ranks.move(1, BEAT_S)
    assert ranks.num_connections == len(set(ranks.node_of))


@pytest.mark.parametrize("trouble", ["connection", "folder"])
def test_nothing_is_watched_only_with_a_warning(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if trouble == "connection":
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.delenv("MASTER_PORT", raising=False)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 8)
        reason = "MASTER_ADDR and MASTER_PORT are not set to the address of the processes' store"
    else:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
        monkeypatch.setattr("megatron.training.fault_tolerance.watchdog.StackFile", UnlinkedStackFile)
        reason = "No such file or directory"
    recorder = FlightRecorder()
    with watching(recorder, describe_parallel_state(0, 1), MarkedDevice("cpu"), 60):
        assert recorder.mark is None
    line = capsys.readouterr().err
    assert line.startswith("WARNING: hangs are neither detected nor reported: rank 0: ")
    assert reason in line
    assert line.endswith("; only --distributed-timeout-minutes ends a hang\n")


class UnlinkedStackFile:
    path = ""

    def close(self) -> None:
        pass


def test_a_watchdog_that_loses_the_store_says_so(ranks: Ranks, monkeypatch, capsys) -> None:
    monkeypatch.setattr("megatron.training.fault_tolerance.watchdog._SHUTDOWN_S", 0.1)

    class LostStore(CountingStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer\nand a stack of C++")

    ranks.watchdogs[0]._board._store = LostStore()
    ranks.move(1, 0.5)
    said = capsys.readouterr().err.splitlines()
    lost = "WARNING: rank 0 no longer monitors for hangs: Connection reset by peer"
    assert said[0].startswith(lost)


class CountingStore:
    """Be a store in memory that counts what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.requests: collections.Counter[str] = collections.Counter()
        self.num_connections = 0

    def connect(self) -> CountingStore:
        self.num_connections += 1
        return self

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        return [self.values[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        raise AssertionError("nobody claims the lead")


@pytest.mark.long
def test_16384_ranks_open_a_connection_per_node_and_the_leader_reads_nodes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    num_ranks, per_node = 16_384, 8
    node_of = [rank - rank % per_node for rank in range(num_ranks)]
    store = CountingStore()
    boards = []
    for rank, node in enumerate(node_of):
        folder = tmp_path / str(node)
        enter(folder, RankState(rank, this_process(), beat=1))
        boards.append(NodeBoard(rank, folder, node_of, "run", store.connect))
    for board, node in zip(boards, node_of):
        if board._rank == node:
            board.open()
            board.forward()
    assert store.num_connections == num_ranks // per_node == 2_048
    recorder = FlightRecorder(phase="forward", iterations_done=2)
    around = Surroundings(0, num_ranks, processes_in(tmp_path / "0"))
    leader = Watchdog(boards[0], recorder, Patience(recorder, 60.0), around)
    for _ in range(2):
        store.requests.clear()
        assert leader._round()
    assert sorted(leader._views) == list(range(num_ranks))
    assert all(view.state.process == this_process() for view in leader._views.values())
    # Its node's states and its word, and all nodes' states in one request.
    assert store.requests == {"set": 2, "multi_get": 1}
    assert leader._beat_s == 16.0
    # A rank that does not speak for its node asks the store for nothing.
    store.requests.clear()
    follower = Watchdog(boards[9], recorder, Patience(recorder, 60.0), Surroundings(9, num_ranks, {9: this_process()}))
    assert follower._round()
    assert store.requests == {}
    # Its node's speaker writes one value and reads the leader's word.
    speaker = Watchdog(boards[8], recorder, Patience(recorder, 60.0), Surroundings(8, num_ranks, {8: this_process()}))
    assert speaker._round()
    assert store.requests == {"set": 1, "check": 1, "get": 1}
    assert store.num_connections == 2_048


def test_ranks_that_move_are_let_be_and_those_who_wait_for_them(ranks: Ranks, capsys) -> None:
    wait_in(ranks.recorders[0], 2)
    ranks.move(1, 3 * SECONDS)
    assert ranks.statuses == {}
    assert capsys.readouterr().err == ""


def test_a_run_that_is_over_is_watched_no_more(ranks: Ranks) -> None:
    ranks.close()
    time.sleep(2 * SECONDS)
    assert ranks.statuses == {}


@dataclass
class GrowingChannel:
    """Be a channel beside which the training thread opens another one whenever the watchdog looks at it."""

    channels: dict[str, GrowingChannel]

    def _open_another(self) -> None:
        self.channels[f"tp[{len(self.channels)}]"] = self

    @property
    def entered(self) -> int:
        self._open_another()
        return 1

    @property
    def ranks(self) -> tuple[int, ...]:
        self._open_another()
        return (0, 1)


def test_channels_that_open_during_a_hang_do_not_end_the_watchdog(ranks: Ranks, capsys) -> None:
    ranks.close()
    channels: dict[str, GrowingChannel] = {}
    ranks.recorders[1].channels = channels  # type: ignore[assignment]
    channels["tp[0]"] = GrowingChannel(channels)
    ranks.watchdogs[1]._speak_alone(this_process(), 9.0)
    assert "HANG: rank 0" in capsys.readouterr().err
    (path,) = ranks.folder.glob("hang-*.json")
    assert read_hang_report(path).states[1].entered == {"tp[0]": 1}


def test_a_process_is_killed_only_if_it_is_the_one_that_was_named() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        name = type(this_process())("host", this_process().machine, child.pid, 12345)
        assert state_of(name) == "gone"
        kill(name)
        assert child.poll() is None
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        kill(type(name)("host", name.machine, child.pid, started))
        assert child.wait(SOON_S) == -9
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "megatron hang report 1"}', "[" * 100_000])
def test_another_file_is_refused_in_one_line(text: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "hang-1.json"
    path.write_text(text)
    with pytest.raises(HangReportError):
        read_hang_report(path)
    with pytest.raises(SystemExit) as exit_info:
        main([str(path)])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@dataclass(frozen=True)
class MarkedDevice(Device):
    """Stand for a device whose marks are wanted."""

    def marker(self) -> Callable[[DeviceMark | None], DeviceMark | None]:
        return lambda old: None


def test_marks_are_made_only_while_somebody_watches() -> None:
    recorder, device = FlightRecorder(), MarkedDevice("cpu")
    state = describe_parallel_state(0, 1)
    with watching(recorder, state, device, 0):
        assert recorder.mark is None
    with watching(recorder, state, device, 60):
        assert recorder.mark is not None
    assert recorder.mark is None
    runtime = initialize_runtime(resolve_arguments([*MINIMAL], 1).config, LaunchEnvironment())
    assert runtime.flight.mark is None
