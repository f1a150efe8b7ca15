"""The watchdogs of several ranks over one store, in one process: what they report, and what they let be."""

from __future__ import annotations

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

from megatron.commands.reliability.read_flight import main
from megatron.core.device import Device
from megatron.core.flight.communication import DeviceMark
from megatron.core.flight.recorder import FlightRecorder
from megatron.core.parallel_state import describe_parallel_state
from megatron.training.config.arguments import resolve_arguments
from megatron.training.process.hang.hang_report import HangReportError, read_hang_report
from megatron.training.process.hang.patience import Patience
from megatron.training.process.hang.processes import kill, state_of, this_process
from megatron.training.process.hang.watchdog import Surroundings, Watchdog
from megatron.training.process.hang.watching import watching
from megatron.training.process.initialize import LaunchEnvironment, initialize_runtime
from tests.unit.core.flight.test_recorder import PretendedDevice
from tests.unit.training.config.command_lines import MINIMAL

SECONDS = 0.6
BEAT_S = 0.05
SOON_S = 20.0


@dataclass
class Ranks:
    """Hold the watchdogs of two ranks that have done an iteration, and what they did in the end."""

    folder: Path
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.recorders = [FlightRecorder(phase="forward", iterations_done=2) for _ in range(2)]
        self.watchdogs = [self._watchdog(rank, store) for rank in range(2)]

    def _watchdog(self, rank: int, store: dist.Store) -> Watchdog:
        def leave(status: int) -> None:
            self.statuses[rank] = status
            if len(self.statuses) == 2:
                self.ended.set()

        around = Surroundings(
            rank,
            [this_process()] * 2,
            "test",
            self.folder,
            error_file=str(self.folder / "error.json"),
            count_failure=lambda: self.failures.append(rank),
            leave=leave,
        )
        recorder = self.recorders[rank]
        return Watchdog(store, recorder, Patience(recorder, SECONDS), around, BEAT_S)

    def move(self, rank: int, seconds: float) -> None:
        """Let a rank get something done for some time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.recorders[rank].tick()
            time.sleep(BEAT_S)

    def close(self) -> None:
        for watchdog in self.watchdogs:
            watchdog.close()


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch):
    # The ranks are one process: none of them waits for the end of another.
    monkeypatch.setattr("megatron.training.process.hang.ending._ENDING_S", 0.0)
    made = Ranks(tmp_path)
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
        device = PretendedDevice(reached=reached)
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
    assert ", with a device that is at work before all_reduce #3 of tp[0,1], 96 bytes (" in last
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
    monkeypatch.setattr("megatron.training.process.hang.watchdog._LEADER_SILENCE_S", 0.5)
    ranks.watchdogs[0].close(is_over=False)
    wait_in(ranks.recorders[1], 1)
    deadline = time.monotonic() + SOON_S
    while ranks.statuses != {1: 1}:
        assert time.monotonic() < deadline
        time.sleep(BEAT_S)
    assert "HANG: rank 0" in capsys.readouterr().err
    assert ranks.failures == [1]


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
