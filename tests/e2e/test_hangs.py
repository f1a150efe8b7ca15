"""A run whose rank stops or sleeps: it is named with its group, operation and line, and all end soon after."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron.training.fault_tolerance.hang_report import read_hang_report
from tests.e2e import test_text_generation_server as server_tests
from tests.e2e.test_torchrun import Launch
from tests.e2e.toy_run import newest, toy_args
from tests.harness.faults import Faults
from tests.harness.training_run import REPOSITORY, run_training

llama = server_tests.llama
SECONDS = 3
NAMED_S = 30.0
GONE_S = 10.0
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "dp2": "",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2": "--context-parallel-size 2",
    "sp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "zero": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
# What the others wait in: operation, number, group and line.
COMMUNICATION = re.compile(
    r"(is inside|has not entered) \w+ #\d+ of [\w> -]+\[(0,1|1,0)\](, \d+ bytes)? \(megatron/\S+\.py:\d+\)"
)
MICROBATCH = 40


def args(folder: Path, *more: str) -> list[str]:
    return toy_args(folder, "--train-iters 100000 --eval-interval 100000", f"--hang-timeout-seconds {SECONDS}", *more)


def run_of(folder: Path, layout: str, faults: Faults, *more: str) -> Launch:
    return Launch(folder, args(folder, LAYOUTS[layout], *more), faults)


def rank_of(process: psutil.Process) -> int:
    return int(process.environ()["RANK"])


def stop(run: Launch, rank: int) -> None:
    """Stop a rank at some moment of an iteration."""
    run.wait_for("iteration       10/")
    for process in run.ranks():
        if rank_of(process) == rank:
            process.send_signal(signal.SIGSTOP)


def check(run: Launch, rank: int, *words: str) -> str:
    """Check that the hang is reported in time, by the rank's name, and that nothing is left; return the last line."""
    run.wait_for("HANG: rank", NAMED_S + 60.0)
    pids = [process.pid for process in run.ranks()]
    assert run.wait(GONE_S + 20.0) == 1
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    output = run.output.read_text()
    ours, _, launchers = output.partition("torch/distributed/elastic")
    last = ours.splitlines()[-2] if ours.splitlines()[-1].startswith(("E", "W")) else ours.splitlines()[-1]
    assert last.startswith(f"HANG: rank {rank} on "), ours[-3000:]
    assert COMMUNICATION.search(last), last
    for word in words:
        assert word in last
    # What torchrun prints last is the same.
    root_cause = launchers.partition("Root Cause")[2]
    assert f"rank      : {rank} " in root_cause
    assert last in root_cause
    return last


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        pytest.param("tp2", 1, id="tp2-1"),
        *(
            pytest.param(layout, rank, id=f"{layout}-{rank}", marks=pytest.mark.long)
            for layout in LAYOUTS
            for rank in (0, 1)
            if (layout, rank) != ("tp2", 1)
        ),
    ],
)
def test_a_stopped_rank_is_named_and_all_end(layout: str, rank: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, layout, Faults(), "--save-interval 5")
    try:
        stop(run, rank)
        check(run, rank, "stopped by a signal")
        (path,) = (tmp_path / "checkpoints").glob("hang-*.json")
        report = read_hang_report(path)
        assert report.diagnosis.waits_for[1 - rank] == (rank,)
        assert json.loads((newest(tmp_path / "checkpoints") / "index.json").read_text())
    finally:
        run.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.long
def test_a_rank_that_sleeps_in_its_forward_pass_is_named(layout: str, rank: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, layout, Faults(rank=rank, sleep_at=MICROBATCH))
    try:
        check(run, rank, "is in phase forward at tests/harness/faults.py:", " in sleep_for_ever")
    finally:
        run.close()


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        pytest.param("dp2", 2, id="dp2-2"),
        pytest.param("dp2", 0, id="dp2-0", marks=pytest.mark.long),
        pytest.param("tp2", 2, id="tp2-2", marks=pytest.mark.long),
        pytest.param("pp2", 1, id="pp2-1", marks=pytest.mark.long),
    ],
)
def test_a_sample_that_is_never_read_is_named_with_who_reads_it(layout: str, workers: int, tmp_path: Path) -> None:
    faults = Faults(rank=0, endless_sample=81)
    run = run_of(tmp_path, layout, faults, f"--num-workers {workers}")
    try:
        last = check(run, 0, "is in phase data at tests/harness/faults.py:", " in sleep_for_ever")
        # Ranks of one model copy read whole batches, those of different ones each their samples.
        assert re.search(r"reading samples \[\[8[01], 8[12]\]\]", last), last
    finally:
        run.close()


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
@pytest.mark.long
def test_a_rank_that_sleeps_in_saving_is_named(layout: str, tmp_path: Path) -> None:
    faults = Faults(rank=1, sleep_at=MICROBATCH, sleep_in="save")
    run = run_of(tmp_path, layout, faults, "--save-interval 15")
    try:
        check(run, 1, "is in phase save at tests/harness/faults.py:", " in sleep_for_ever")
        assert newest(tmp_path / "checkpoints").is_dir()
    finally:
        run.close()


@pytest.mark.parametrize(("stopped", "num_processes"), [(1, 2), pytest.param(0, 2, marks=pytest.mark.long)])
def test_a_stopped_rank_of_a_server_is_named_and_all_end(stopped: int, num_processes: int, llama: Path, capfd) -> None:
    # Rank 0 has the store as well: where it is stopped, nobody can ask anybody.
    with server_tests.serving(llama, num_processes, "--hang-timeout-seconds", str(SECONDS)) as server:
        assert server.put({"prompts": ["3 14"], "tokens_to_generate": 3, "top_k": 1})[0] == 200
        time.sleep(1.5 * SECONDS)  # waiting for requests is no hang
        assert [process.poll() for process in server.processes] == [None] * num_processes
        server.processes[stopped].send_signal(signal.SIGSTOP)
        statuses = [process.wait(NAMED_S + GONE_S) for process in server.processes]
    assert statuses[stopped] == -signal.SIGKILL
    assert statuses[1 - stopped] == 1
    last = [line for line in capfd.readouterr().err.splitlines() if line.startswith("HANG: rank")][-1]
    assert last.startswith(f"HANG: rank {stopped} on ")
    assert "stopped by a signal" in last
    assert COMMUNICATION.search(last), last


@pytest.mark.long
def test_a_long_run_with_a_slow_save_and_an_evaluation_is_let_be(tmp_path: Path) -> None:
    flags = "--train-iters 2000 --eval-interval 700 --eval-iters 20 --save-interval 900 --hang-timeout-seconds 20"
    faults = Faults(rank=1, slow_save_s=20.0)
    result = run_training(
        toy_args(tmp_path, flags, "--log-interval 500"),
        2,
        script="tests/harness/faults.py",
        env={"MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(REPOSITORY), **faults.environment()},
        timeout_s=590.0,
    ).check()
    assert "HANG" not in result.stderr
    assert len(result.iterations()) == 2000


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.long
def test_a_rank_that_holds_the_lock_is_named_with_its_line(rank: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, "tp2", Faults(rank=rank, sleep_at=MICROBATCH, sleep_in="lock"))
    try:
        check(run, rank, "does not answer at tests/harness/faults.py:", " in _hold_the_lock")
    finally:
        run.close()


@pytest.mark.long
def test_a_process_alone_that_sleeps_is_named(tmp_path: Path) -> None:
    result = run_training(
        args(tmp_path),
        script="tests/harness/faults.py",
        env={"MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(REPOSITORY), **Faults(sleep_at=MICROBATCH).environment()},
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("HANG: rank 0 on ")
    assert "is in phase forward at tests/harness/faults.py:" in last


@pytest.mark.long
def test_all_ranks_suspended_for_long_and_continued_go_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, "dp2", Faults())
    try:
        run.wait_for("iteration       10/")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in run.ranks():
                process.send_signal(number)
            time.sleep(3.0 * SECONDS)
        assert run.process.poll() is None
        assert "HANG" not in run.output.read_text()
    finally:
        run.close()
