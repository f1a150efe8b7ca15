"""Machines that are lost under torchrun's elastic launch: each is a launcher of its own on this one."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.verification.faults.launch import Launch
from tests.e2e.toy_run import exact_figures, toy_args
from tests.harness.forked_training import fork_training
from tests.harness.free_port import free_port
from tests.harness.training_run import REPOSITORY, read_metrics

pytestmark = pytest.mark.long
PATIENCE_S = 300.0
FLAGS = (
    "--train-iters 400 --lr-decay-iters 400 --global-batch-size 8 --save-interval 25 --eval-interval 1000 "
    "--use-distributed-optimizer --keep-last 2"
)


class Machines:
    """Start launchers of one run, with two ranks each, which all save into one folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.metrics = folder / "checkpoints" / "metrics.jsonl"
        self.started: list[Launch] = []
        self._flags = flags
        self._endpoint = f"localhost:{free_port()}"

    def start(self) -> Launch:
        """Start one more."""
        memory = self.folder / f"memory{len(self.started)}"
        memory.mkdir()
        flags = ("--inprocess-restart", "--non-persistent-local-ckpt-dir", memory)
        copies = "--non-persistent-save-interval 1"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "2"]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", self._endpoint, "--rdzv_id", "machines"]
        # The store is the first one's, which is not lost.
        command += ["--rdzv_conf", f"is_host={'false' if self.started else 'true'}"]
        command += ["--max-restarts", "5", str(REPOSITORY / "pretrain_gpt.py")]
        command += toy_args(self.folder, FLAGS, copies, *flags, *self._flags)
        self.started.append(Launch(command, self.folder / f"output{len(self.started)}.txt", self.metrics))
        return self.started[-1]

    def wait_for(self, iteration: int) -> None:
        """Wait until the run has done an iteration."""
        deadline = time.monotonic() + PATIENCE_S
        while self.started[0].iteration() < iteration:
            assert self.started[0].look() is None, self.started[0].text[-4000:]
            assert time.monotonic() < deadline, self.started[0].text[-4000:]
            time.sleep(0.05)

    def lose(self, launch: Launch) -> None:
        """End a machine at once, with all that runs on it."""
        launch.look()
        launch.process.send_signal(signal.SIGSTOP)
        launch.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, in an environment of tests."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("PYTHONUNBUFFERED", "1"), ("MEGATRON_DEVICE", "cpu")):
        monkeypatch.setenv(name, value)
    (tmp_path / "machines").mkdir()
    return tmp_path


@pytest.fixture
def all_started() -> Iterator[list[Launch]]:
    """Yield a list of launches that are ended after the test."""
    launches: list[Launch] = []
    yield launches
    for launch in launches:
        launch.close()


def test_another_machine_takes_a_lost_ones_place_and_copies(
    folder: Path, all_started: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With its own store torchrun tells a machine that comes later no address of rank 0; the keepers' one is used.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    machines = Machines(folder / "machines", "--replication --replication-jump 2 --inprocess-barrier-timeout 200")
    machines.started = all_started
    first, second = machines.start(), machines.start()
    machines.wait_for(60)
    machines.lose(second)
    reached = first.iteration()
    machines.start()
    assert first.wait(PATIENCE_S) == 0, first.text[-6000:]
    match = re.search(r"resuming from the copies in memory, at iteration (\d+)", first.text + all_started[2].text)
    assert match is not None, first.text[-6000:]
    assert int(match.group(1)) >= reached - 1
    quiet = fork_training(toy_args(folder / "quiet", FLAGS), nproc=4, timeout_s=PATIENCE_S).check()
    assert exact_figures(read_metrics(machines.metrics)) == exact_figures(quiet.metrics)


def test_a_run_goes_on_with_fewer_machines_and_the_same_batch(folder: Path, all_started: list[Launch]) -> None:
    machines = Machines(folder / "machines", "--inprocess-barrier-timeout 5")
    machines.started = all_started
    first, second = machines.start(), machines.start()
    machines.wait_for(60)
    machines.lose(second)
    assert first.wait(PATIENCE_S) == 0, first.text[-6000:]
    assert "using world size: 2" in first.text
    assert "successfully loaded checkpoint" in first.text
    lines = read_metrics(machines.metrics)
    quiet = fork_training(toy_args(folder / "quiet", FLAGS), nproc=4, timeout_s=PATIENCE_S).check()
    iterations = [line for line in lines if "split" not in line]
    assert [line["consumed_samples"] for line in iterations] == list(range(8, 8 * 401, 8))
    assert [line["sample_ids_hash"] for line in iterations] == [line["sample_ids_hash"] for line in quiet.iterations()]
    assert iterations[-1]["lm_loss"] == pytest.approx(quiet.losses()[-1], rel=1e-4)
