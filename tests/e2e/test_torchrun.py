"""What users of torchrun see when a run ends before its time: each test starts real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.toy_run import DATA, leftovers, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY, launch_prefix, run_training

SCRIPT = "tests/harness/faults.py"
RANKS_MUST_BE_GONE_S = 10.0


class Launch:
    """Run torchrun with two ranks in the background and keep what it prints in a file."""

    def __init__(self, folder: Path, args: list[str], faults: Faults, nproc: int = 2) -> None:
        self.output = folder / "output.txt"
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MEGATRON_DEVICE": "cpu"}
        environment |= {"PYTHONPATH": str(REPOSITORY), **faults.environment()}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*launch_prefix(nproc), str(REPOSITORY / SCRIPT), *args],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> list[psutil.Process]:
        """Return the rank processes that live."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if SCRIPT in " ".join(_command_line(child))]

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        """Wait until the output holds ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in: {self.output.read_text()[-4000:]}"
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            time.sleep(0.05)

    def wait_until_ranks_are_gone(self) -> None:
        """Wait for the end of every rank, which must come soon."""
        deadline = time.monotonic() + RANKS_MUST_BE_GONE_S
        while self.ranks():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the end and return the exit status."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End whatever still runs."""
        for process in (*self.ranks(), self.process):
            try:
                process.kill()
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        self.process.wait()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def launch(tmp_path: Path):
    """Return a function that starts torchrun; what it started is ended after the test."""
    started: list[Launch] = []

    def start(args: list[str], faults: Faults = Faults(), nproc: int = 2) -> Launch:
        started.append(Launch(tmp_path, args, faults, nproc))
        return started[-1]

    yield start
    for item in started:
        item.close()


@pytest.mark.parametrize(
    "layout",
    [pytest.param("--tensor-model-parallel-size 2", id="tp2"), pytest.param("", id="dp2", marks=pytest.mark.long)],
)
def test_a_rank_that_raises_ends_the_run_and_has_the_last_word(layout: str, launch, tmp_path: Path) -> None:
    run = launch(toy_args(tmp_path, layout), Faults(rank=1, raise_at=5))
    run.wait_for("ValueError: a fault of micro-batch 5 on rank 1")
    run.wait_until_ranks_are_gone()
    assert run.wait() == 1
    ours, _, _ = run.output.read_text().partition("torch/distributed/elastic")
    tracebacks = ours.count("Traceback (most recent call last)")
    assert tracebacks == 1, ours[-6000:]


@pytest.mark.long
def test_ranks_that_cannot_hear_are_gone_too(launch, tmp_path: Path) -> None:
    run = launch(toy_args(tmp_path, ""), Faults(rank=1, raise_at=5, deaf_at=5))
    run.wait_for("ValueError: a fault of micro-batch 5 on rank 1")
    run.wait_until_ranks_are_gone()
    assert run.wait() == 1


@pytest.mark.long
def test_a_rank_that_is_alone_with_its_reason_says_it(launch, tmp_path: Path) -> None:
    run = launch(toy_args(tmp_path, "--tensor-model-parallel-size 2"), Faults(rank=1, data_error_at=5))
    assert run.wait() == 1
    output, _, _ = run.output.read_text().partition("torch/distributed/elastic")
    assert output.count("error: rank 1: a file is gone in micro-batch 5; put it back\n") == 1
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("flags", "sample", "reader"),
    [
        # The second rank waits for what the first one reads.
        pytest.param("--tensor-model-parallel-size 2", 9, "", id="tp2", marks=pytest.mark.long),
        pytest.param("--tensor-model-parallel-size 2 --num-workers 0", 9, "", id="tp2-0", marks=pytest.mark.long),
        # Both read it.
        pytest.param("--pipeline-model-parallel-size 2", 9, "", id="pp2", marks=pytest.mark.long),
        pytest.param("--context-parallel-size 2", 9, "", id="cp2", marks=pytest.mark.long),
        # Samples 8 and 9 are the first rank's, 10 and 11 the second's, which gives the first the time to say why.
        pytest.param("", 10, "rank 1: ", id="dp2", marks=pytest.mark.long),
    ],
)
def test_a_sample_that_cannot_be_read_ends_the_run_by_its_name(
    flags: str, sample: int, reader: str, launch, tmp_path: Path
) -> None:
    run = launch(toy_args(tmp_path, flags), Faults(unreadable_sample=sample))
    reason = f"error: {reader}sample {sample} from {DATA}: [Errno 5] Input/output error\n"
    run.wait_for(reason)
    run.wait_until_ranks_are_gone()
    assert run.wait() == 1
    output, _, _ = run.output.read_text().partition("torch/distributed/elastic")
    assert output.count("error: ") == output.count(reason) == 1
    assert "Traceback" not in output
    assert "iteration        2/" in output
    assert "iteration        3/" not in output


@pytest.mark.parametrize(
    "to_all",
    [
        pytest.param(False, id="torchrun-alone", marks=pytest.mark.long),
        pytest.param(True, id="every-process", marks=pytest.mark.long),
    ],
)
def test_sigterm_saves_and_ends_with_status_0(to_all: bool, launch, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--tensor-model-parallel-size 2 --train-iters 100000 --lr-decay-iters 100")
    run = launch(args)
    run.wait_for("iteration        3/")
    ranks = run.ranks()
    assert len(ranks) == 2
    if to_all:
        os.killpg(run.process.pid, signal.SIGTERM)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
    else:
        run.process.send_signal(signal.SIGTERM)
    run.wait()
    output = run.output.read_text()
    assert "exiting program at iteration" in output
    checkpoint = newest(tmp_path / "checkpoints")
    assert f"successfully saved checkpoint at iteration {int(checkpoint.name[5:]):7d}" in output
    assert leftovers(tmp_path / "checkpoints") == []
    assert "Traceback" not in output.partition("torch/distributed/elastic")[0]


@pytest.mark.long
def test_sigterm_to_one_process_without_a_launcher(launch, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--train-iters 100000 --lr-decay-iters 100")
    run = launch(args, nproc=1)
    run.wait_for("iteration        3/")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0
    assert newest(tmp_path / "checkpoints").is_dir()


@pytest.mark.long
def test_the_entry_script_trains_from_any_folder(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--tensor-model-parallel-size 2 --train-iters 5 --log-throughput")
    run = run_training(args, 2, cwd=tmp_path, env={"MEGATRON_DEVICE": "cpu"}).check()
    assert len(run.iterations()) == 5
    assert "throughput per GPU (TFLOP/s/GPU):" in run.stdout
