"""Two torchrun agents, each with a folder, data and an index cache of its own, train together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.toy_run import DATA, MODEL, TRAINING, exact_figures, leftovers
from tests.harness.forked_training import fork_training
from tests.harness.free_port import free_port
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY, read_metrics

TIMEOUT_S = 240.0


def start_agents(folders: list[Path], nproc: int, flags: str) -> list[subprocess.Popen[str]]:
    """Start one agent a folder, with the same words for each."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MEGATRON_DEVICE": "cpu"}
    agents = []
    for node_rank, folder in enumerate(folders):
        launcher = f"--nnodes 2 --node_rank {node_rank} --nproc_per_node {nproc} --master_addr 127.0.0.1"
        words = [*launcher.split(), "--master_port", str(port), str(REPOSITORY / "pretrain_gpt.py")]
        words += [*MODEL.split(), *TRAINING.split(), "--train-iters", "4", "--data-path", DATA.name, *flags.split()]
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return agents


def finish(agents: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Wait for all; none is left behind when one does not end."""
    try:
        outputs = [agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
    return [agent.returncode for agent in agents], outputs


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Make two folders that hold a copy of the data each."""
    made = [tmp_path / "node0", tmp_path / "node1"]
    for folder in made:
        folder.mkdir()
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{DATA}{suffix}", folder)
    return made


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        pytest.param(1, "--use-distributed-optimizer", id="dp2-sharded"),
        pytest.param(
            2,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
            id="tp2-pp2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_two_agents_train_what_one_does(nproc: int, layout: str, folders: list[Path], tmp_path: Path) -> None:
    flags = f"{layout} --metrics-jsonl metrics.jsonl --data-cache-path cache"
    statuses, outputs = finish(start_agents(folders, nproc, flags))
    assert statuses == [0, 0], "\n".join(output[-4000:] for output in outputs)
    # What is noted of a file's lengths is named after the file as one machine has it; indices are after the lengths.
    caches = [
        sorted(path.name for path in (folder / "cache").iterdir() if "IndexedDataset-lengths" not in path.name)
        for folder in folders
    ]
    assert any("GPTDataset" in name for name in caches[0])
    assert caches[0] == caches[1]
    assert not (folders[1] / "metrics.jsonl").exists()
    words = [*MODEL.split(), *TRAINING.split(), "--train-iters", "4", "--data-path", str(DATA), *layout.split()]
    words += ["--metrics-jsonl", str(tmp_path / "alone.jsonl"), "--data-cache-path", str(tmp_path / "cache")]
    alone = fork_training(words, 2 * nproc).check()
    assert exact_figures(read_metrics(folders[0] / "metrics.jsonl")) == exact_figures(alone.metrics)


@pytest.mark.long
def test_checkpoints_stay_on_their_machines_and_resume_there(folders: list[Path], tmp_path: Path) -> None:
    flags = "--save checkpoints --load checkpoints --save-interval 1 --keep-last 2 --async-save --data-cache-path cache"
    sharded = f"{flags} --use-distributed-optimizer"
    for last in (2, 4):
        statuses, outputs = finish(start_agents(folders, 1, f"{sharded} --exit-interval {last}"))
        assert statuses == [0, 0], "\n".join(output[-4000:] for output in outputs)
    assert "successfully loaded checkpoint from checkpoints at iteration 2" in outputs[0]
    for rank, folder in enumerate(folders):
        assert saved_iterations(folder / "checkpoints") == [3, 4]
        shards = [path.name for path in (folder / "checkpoints" / "iter_0000004").glob("*.safetensors")]
        assert shards == [f"shard_{rank:05d}.safetensors"]
        assert leftovers(folder / "checkpoints") == []
    words = [*MODEL.split(), *TRAINING.split(), "--train-iters", "4", "--data-path", str(DATA)]
    words += ["--use-distributed-optimizer", "--data-cache-path", str(tmp_path / "cache")]
    alone = fork_training([*words, "--metrics-jsonl", str(tmp_path / "alone.jsonl")], 2).check()
    kept = read_metrics(folders[0] / "checkpoints" / "metrics.jsonl")
    assert exact_figures(kept) == exact_figures(alone.iterations())
