"""The status of a run, from the files that it leaves in its folder."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.plotting.run_status import duration, read_status
from megatron.training.fault_tolerance.processes import ProcessIdentity, identify
from megatron.training.fault_tolerance.run_lock import OwnerRecord
from tests.unit.plotting.test_plot import write_run

NOW = 1_800_000_000.0
ELSEWHERE = ProcessIdentity("node7", "another machine", 4321, 99)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that runs until the end of the test."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def run_of(folder: Path, age_s: float = 1.0, **start: Any) -> Path:
    """Write 12 iterations of 2 s each, the last ``age_s`` ago, and the record of their start."""
    write_run(folder, iterations=12, step_time_s=2.0)
    (folder / "run_record").mkdir()
    (folder / "run_record" / "starts.jsonl").write_text(
        json.dumps({"iteration": 0, "train_iters": 9}) + "\n" + json.dumps({"train_iters": 100, **start}) + "\n"
    )
    os.utime(folder / "metrics.jsonl", (NOW - age_s,) * 2)
    return folder


def lock(
    folder: Path, process: ProcessIdentity, since: float = NOW - 1000, prefix: str = ".owner", **more: Any
) -> Path:
    path = folder / f"{prefix}.00000003"
    purpose = more.get("purpose", "a training run")
    path.write_text(json.dumps(dataclasses.asdict(OwnerRecord(process, None, "0123abcd", purpose, since))))
    return path


def end(folder: Path, iteration: int, error: str | None = None, at: float = NOW - 1) -> None:
    path = folder / "run_record" / "end.json"
    path.write_text(json.dumps({"ended": "2027-01-15T08:00:00", "iteration": iteration, "error": error}))
    os.utime(path, (at, at))


def status(folder: Path) -> tuple[str, str]:
    found = read_status(folder, NOW)
    return found.state, found.reason


def gone(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    """Return the identity of a process after its end."""
    found = identify(process.pid)
    process.kill()
    process.wait()
    return found


def test_a_run_that_writes_lines_is_running(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run = run_of(tmp_path / "run", age_s=3.0)
    lock(run, identify(process.pid))
    found = read_status(run, NOW)
    assert (found.state, found.reason, found.iteration, found.total, found.age_s) == ("running", "", 12, 100, 3.0)
    assert found.progress() == "iteration 12 of 100"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 13, "lm_lo')
    assert read_status(run, NOW).iteration == 12


def test_a_run_without_a_line_since_its_start_sets_up(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run = run_of(tmp_path / "run", age_s=5000.0)
    lock(run, identify(process.pid), since=NOW - 400)
    assert status(run) == ("running", "setting up for 7 min")


@pytest.mark.parametrize(
    ("age_s", "start", "expected"),
    [
        (59.0, {}, ("running", "")),
        (61.0, {}, ("hung", "no iteration for 61 s; an iteration usually takes 2.0 s")),
        (61.0, {"hang_timeout_seconds": 90}, ("running", "")),
        (61.0, {"hang_timeout_seconds": 0}, ("hung", "no iteration for 61 s; an iteration usually takes 2.0 s")),
        (61.0, {"eval_interval": 4}, ("running", "evaluating or saving for 61 s")),
        (61.0, {"eval_interval": 5, "save_interval": 6}, ("running", "evaluating or saving for 61 s")),
        (
            61.0,
            {"eval_interval": 0, "save_interval": None, "train_iters": 12},
            ("running", "evaluating or saving for 61 s"),
        ),
    ],
)
def test_a_run_hangs_without_a_line_for_longer_than_the_watchdog_allows(
    tmp_path: Path, process: subprocess.Popen[bytes], age_s: float, start: dict[str, Any], expected: tuple[str, str]
) -> None:
    run = run_of(tmp_path / "run", age_s, **start)
    lock(run, identify(process.pid))
    assert status(run) == expected


def test_the_limit_is_five_times_the_longest_of_the_last_iterations(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    run = write_run(tmp_path / "run", iterations=12, step_time_s=30.0)
    lock(run, identify(process.pid))
    for age_s, state in ((149.0, "running"), (151.0, "hung")):
        os.utime(run / "metrics.jsonl", (NOW - age_s,) * 2)
        assert status(run)[0] == state


def test_a_stopped_process_and_a_reported_hang_are_hangs(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run = run_of(tmp_path / "run")
    lock(run, identify(process.pid))
    report = run / "hang-20270115-080000.json"
    report.touch()
    os.utime(report, (NOW, NOW))
    assert status(run) == ("hung", f"{report.name} reports a hang")
    os.utime(report, (NOW - 60, NOW - 60))
    assert status(run)[0] == "running"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    state, reason = status(run)
    assert (state, reason.startswith(f"process {process.pid} on ")) == ("hung", True)
    assert reason.endswith("is stopped by a signal")


def test_a_run_that_ended_says_how(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    end(run, 100)
    assert status(run) == ("finished", "")
    end(run, 12)
    assert status(run) == ("stopped", "on request, before the last iteration")
    end(run, 12, "the disk is full")
    assert status(run) == ("crashed", "the disk is full")


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    run, killed = run_of(tmp_path / "run"), gone(process)
    lock(run, killed)
    words = f"process {killed.pid} on {killed.host} "
    assert status(run) == ("crashed", f"{words}was killed, or its node failed")
    report = run / "hang-20270115-080000.json"
    report.touch()
    os.utime(report, (NOW, NOW))
    assert status(run) == ("crashed", f"{words}ended after the hang in {report.name}")
    # It ended by itself, and did not get to release the folder.
    end(run, 12, "out of memory", at=NOW - 1)
    assert status(run) == ("crashed", "out of memory")
    # It was killed while it loaded, before it removed the record of an earlier end.
    end(run, 100, at=NOW - 2000)
    assert status(run)[0] == "crashed"


def test_a_process_of_another_node_is_alive_if_it_renewed_its_record(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    path = lock(run, ELSEWHERE)
    assert status(run)[0] == "running"
    os.utime(path, (time.time() - 100,) * 2)
    assert status(run) == ("crashed", "process 4321 on node7 was killed, or its node failed")


def test_a_conversion_in_the_folder_is_no_training(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    end(run, 100)
    lock(run, identify(os.getpid()), purpose="a conversion")
    assert status(run)[0] == "finished"


def test_a_metrics_file_outside_of_the_save_folder_has_its_own_lock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", iterations=12)
    os.utime(run / "metrics.jsonl", (NOW - 1,) * 2)
    lock(run, identify(os.getpid()), prefix=".metrics.jsonl.owner")
    assert status(run) == ("running", "")


def test_what_left_no_record_is_not_called_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", iterations=12)
    assert status(run) == ("ended", "the run left no record of how it ended")
    assert read_status(run).total is None
    (run / "run_record").mkdir()
    (run / "run_record" / "starts.jsonl").write_text('{"train_iters": 12}\n')
    assert status(run) == ("finished", "")
    (run / "run_record" / "starts.jsonl").write_text('{"train_it')
    (run / "run_record" / "end.json").write_text("[1]")
    assert status(run)[0] == "ended"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (9000, "2 h"), (3e5, "3 d")]
)
def test_durations_have_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
