"""What users of torchrun and `megatron train` see when a run ends before its time, or the launcher is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.toy_run import DATA, exact_figures, leftovers, newest, toy_args
from tests.harness.child_process import ends_with_parent
from tests.harness.faults import Faults
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY, launch_prefix, read_metrics, run_training

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
                preexec_fn=ends_with_parent(),
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


MEGATRON = [sys.executable, "-m", "megatron"]
FAULTY = str(REPOSITORY / "tests/harness/faults.py")
ENDLESS = "--train-iters 100000 --lr-decay-iters 100 --save-interval 100000"


class Command:
    """Run a command in the background, with all that it prints in one file."""

    def __init__(self, folder: Path, words: list[str], faults: Faults = Faults()) -> None:
        self.output = folder / "output.txt"
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MEGATRON_DEVICE": "cpu"}
        environment |= {"PYTHONPATH": str(REPOSITORY), **faults.environment()}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=ends_with_parent(),
            )

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in: {self.output.read_text()[-4000:]}"
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            time.sleep(0.05)

    def end(self) -> tuple[int, list[str]]:
        """Wait for the end and return the exit status and the lines that were printed."""
        status = self.process.wait(60.0)
        return status, self.output.read_text().splitlines()


@pytest.fixture
def command(tmp_path: Path):
    """Return a function that starts a command; it is killed after the test where it still runs."""
    started: list[Command] = []

    def start(words: list[str], faults: Faults = Faults()) -> Command:
        started.append(Command(tmp_path, words, faults))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_ctrl_c_saves_and_ends_all_ranks(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, ENDLESS, "--tensor-model-parallel-size 2")
    run = command([*MEGATRON, "train", "--nproc", "2", *args])
    run.wait_for("iteration      3/100000 |")
    run.process.send_signal(signal.SIGINT)
    status, lines = run.end()
    assert status == 130
    assert sum(line.startswith("stopping after this step") for line in lines) == 1
    assert lines[-2].startswith("exiting program at iteration ")
    assert lines[-1] == f" > to resume: megatron train --resume {tmp_path}/checkpoints"
    assert newest(tmp_path / "checkpoints").is_dir()


@pytest.mark.long
def test_ctrl_c_saves_and_ends_one_process(command, tmp_path: Path) -> None:
    run = command([*MEGATRON, "train", *toy_args(tmp_path, ENDLESS)])
    run.wait_for("iteration      3/100000 |")
    run.process.send_signal(signal.SIGINT)
    status, lines = run.end()
    assert status == 130
    assert lines[-2].startswith("exiting program at iteration ")
    assert lines[-1] == f" > to resume: megatron train --resume {tmp_path}/checkpoints"
    assert newest(tmp_path / "checkpoints").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_second_ctrl_c_ends_at_once(nproc: int, command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, ENDLESS)
    slow = Faults(rank=0, sleep_at=6)
    run = command([*MEGATRON, "train", "--nproc", str(nproc), "--script", FAULTY, *args], slow)
    run.wait_for("iteration      2/100000 |")
    time.sleep(1.0)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping after this step")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(10.0) in (130, -signal.SIGINT)
    assert not (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.long
def test_a_rank_that_fails_is_named_in_the_last_line(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--tensor-model-parallel-size 2 --train-iters 5")
    run = command([*MEGATRON, "train", "--nproc", "2", "--script", FAULTY, *args], Faults(rank=1, raise_at=3))
    status, lines = run.end()
    reason = "ValueError: a fault of micro-batch 3 on rank 1"
    assert status == 1
    assert lines[-1] == f"error: rank 1: {reason} (its traceback is above)"
    assert sum("Traceback" in line for line in lines) == 1
    assert sum(line.startswith("error: ") for line in lines) == 1


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_in_the_last_line(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, ENDLESS)
    run = command([*MEGATRON, "train", "--nproc", "2", *args])
    run.wait_for("iteration      3/100000 |")
    listed = subprocess.run(
        ["pgrep", "-P", str(run.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(listed[1]), signal.SIGKILL)
    status, lines = run.end()
    assert status == 137
    assert lines[-1].startswith(f"error: rank 1 (process {listed[1]}) was ended by SIGKILL; ")


@pytest.mark.long
def test_a_refusal_of_the_ranks_is_the_last_line_and_status_2(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--data-path", tmp_path / "missing", data=False)
    status, lines = command([*MEGATRON, "train", "--nproc", "2", *args]).end()
    assert status == 2
    lines = [line for line in lines if not line.startswith(" ... ")]  # signs of life on a busy machine
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert str(tmp_path / "missing") in lines[0]


@pytest.mark.long
def test_under_torchrun_a_refusal_is_said_once_and_last(command, tmp_path: Path) -> None:
    status, lines = command([*launch_prefix(2), str(REPOSITORY / "pretrain_gpt.py"), "--hiden-size", "3"]).end()
    assert status == 1
    first = lines.index("error: unknown flag --hiden-size; did you mean --hidden-size?")
    assert all(line.startswith("error: ") for line in lines[first:])
    assert any("ChildFailedError" in line for line in lines[:first])
    assert not any(line.startswith("error: ") for line in lines[:first])


@pytest.mark.long
def test_under_torchrun_the_reason_of_a_failure_is_the_last_line_too(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--tensor-model-parallel-size 2 --train-iters 5")
    status, lines = command([*launch_prefix(2), FAULTY, *args], Faults(rank=1, raise_at=3)).end()
    assert status == 1
    assert lines[-1] == "error: rank 1: ValueError: a fault of micro-batch 3 on rank 1 (its traceback is above)"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--nproc 0", "--nproc 0: a number from 1 to 4096 is expected"),
        ("--nproc 2 --master-port 5", "--master-port: not needed on a single node; add --nnodes, or omit them"),
        ("--nnodes 2 --nproc 2", "--nnodes 2 needs --node-rank and --master-addr on each node"),
        ("--nnodes 2 --node-rank 2 --master-addr h", "--node-rank 2: a number from 0 to 1 is expected"),
        ("--nproc", "--nproc/--nproc-per-node: a value is missing; see megatron train --help"),
        ("--script no.py", "--script no.py does not exist; pass a Python training script"),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(words: str, reason: str, capsys) -> None:
    from megatron.cli.train import main

    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"error: {reason}\n"


FLAGS = "--save-interval 1 --keep-last 3 --train-iters 4000 --lr-decay-iters 60 --eval-interval 500 --bf16"
LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + RANKS_MUST_BE_GONE_S
    while running := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def kill_launcher(launch: Launch) -> list[psutil.Process]:
    """Kill torchrun and nothing else; return its ranks."""
    ranks = launch.ranks()
    assert len(ranks) == 2
    launch.process.kill()
    launch.process.wait()
    return ranks


def newest_complete(checkpoints: Path) -> int:
    return max(saved_iterations(checkpoints), default=0)


def test_ranks_end_with_their_launcher_and_the_next_start_goes_on(tmp_path: Path) -> None:
    args = toy_args(tmp_path, FLAGS, "--tensor-model-parallel-size 2")
    checkpoints = tmp_path / "checkpoints"
    first = Launch(tmp_path, args, Faults())
    try:
        first.wait_for("successfully saved checkpoint at iteration       3 ")
        ranks = kill_launcher(first)
        # The next one does not wait for the ranks of the first to end.
        again = Launch(tmp_path, [*args, "--exit-interval", "1"], Faults())
        try:
            wait_until_gone(ranks)
            assert again.wait(90.0) == 0, again.output.read_text()[-4000:]
        finally:
            again.close()
    finally:
        first.close()
    match = LOADED.search(again.output.read_text())
    assert match is not None
    loaded = int(match.group(1))
    assert loaded >= 3
    assert saved_iterations(checkpoints)[-3:] == [loaded - 1, loaded, loaded + 1]
    assert leftovers(checkpoints) == []
    iterations = [line["iteration"] for line in read_metrics(checkpoints / "metrics.jsonl") if "split" not in line]
    assert iterations == list(range(1, loaded + 2))


def test_a_run_without_a_launcher_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = (
        "import pathlib, sys, time\n"
        "from megatron.training.exit_reason import launch_environment_or_exit\n"
        "launch_environment_or_exit()\n"
        "sys.stdin.read()\n"
        "time.sleep(1.0)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
    )
    command = f"{sys.executable} -c '{program}' {done} & read line"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    shell = subprocess.Popen(
        ["bash", "-c", f"exec 3<&0; {command.replace('&', '<&3 &', 1)}"],
        stdin=subprocess.PIPE,
        cwd=REPOSITORY,
        env=environment | {"RANK": "0", "WORLD_SIZE": "1"},
    )
    assert shell.stdin is not None
    time.sleep(0.5)
    shell.kill()
    shell.wait()
    shell.stdin.close()
    deadline = time.monotonic() + 30.0
    while not done.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


HOW = ("a rank", "all ranks", "the launcher")
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "dp2": "--use-distributed-optimizer --overlap-param-gather",
    "pp2": "--pipeline-model-parallel-size 2",
}


@pytest.mark.long
@pytest.mark.parametrize("saving", ["", "--async-save"], ids=["sync", "async"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_seventeen_kills_of_ranks_and_launchers_lose_nothing(layout: str, saving: str, tmp_path: Path) -> None:
    """Six times this is a hundred kills; each start follows its predecessor's end at once."""
    rng = random.Random(f"{layout} {saving}")
    args = toy_args(tmp_path, FLAGS, LAYOUTS[layout], saving)
    checkpoints = tmp_path / "checkpoints"
    for number in range(17):
        before = newest_complete(checkpoints) if checkpoints.exists() else 0
        how = HOW[number % 3]
        launch = Launch(tmp_path, args, Faults())
        try:
            launch.wait_for("[before the start of training step]", timeout_s=180.0)
            match = LOADED.search(launch.output.read_text())
            assert (int(match.group(1)) if match else 0) >= before
            time.sleep(rng.uniform(0.0, 2.0))
            ranks = launch.ranks()
            assert len(ranks) == 2
            if how == "the launcher":
                launch.process.kill()
            for rank in {"a rank": [rng.choice(ranks)], "all ranks": ranks}.get(how, []):
                rank.send_signal(signal.SIGKILL)
            launch.process.wait(60.0)
            if how == "the launcher" and number % 2:
                continue  # the next one starts while these end
            wait_until_gone(ranks)
        finally:
            if how != "the launcher":
                launch.close()
        assert newest_complete(checkpoints) >= before
    last = Launch(tmp_path, [*args, "--exit-interval", "1"], Faults())
    try:
        assert last.wait(180.0) == 0, last.output.read_text()[-4000:]
    finally:
        last.close()
    assert "damaged" not in last.output.read_text()
    assert leftovers(checkpoints) == []
    figures = exact_figures(read_metrics(checkpoints / "metrics.jsonl"))
    assert [line[0] for line in figures if line[1] is None] == list(range(1, newest_complete(checkpoints) + 1))
