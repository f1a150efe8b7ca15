"""Two runs that are given the same folder: one trains, the other one is refused, and nothing of either is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.toy_run import exact_figures, leftovers, toy_args
from tests.harness.forked_training import ForkedRun, fork_training, fork_trainings

# Long enough that the one does not end before the other has looked.
FLAGS = "--train-iters 120 --lr-decay-iters 60 --save-interval 20 --keep-last 2 --eval-interval 60"


def refusals(run: ForkedRun) -> list[str]:
    return [line for line in run.errors[0].splitlines() if line.startswith("error: ")]


def start_two(folder: Path, nproc: int, flags: str) -> None:
    """Start the same command line twice at one moment, and compare what is left with that of a run alone."""
    args = toy_args(folder, FLAGS, flags)
    runs = fork_trainings([args, args], nproc)
    assert sorted(run.statuses for run in runs) == [(0,) * nproc, (2,) * nproc]
    winner, loser = sorted(runs, key=lambda run: run.statuses)
    (reason,) = refusals(loser)
    assert reason.startswith(f"error: --save {folder / 'checkpoints'} is in use by a training run on ")
    assert "[before the start of training step]" not in loser.stdout
    assert [line["iteration"] for line in winner.iterations()] == list(range(1, 121))
    assert saved_iterations(folder / "checkpoints") == [100, 120]
    assert leftovers(folder / "checkpoints") == []
    assert "Traceback" not in loser.errors[0]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("num_rounds", "nproc", "flags"),
    [
        pytest.param(1, 1, "", id="once"),
        pytest.param(20, 1, "", id="20-times", marks=pytest.mark.long),
        pytest.param(20, 2, "--async-save --use-distributed-optimizer", id="dp2-20-times", marks=pytest.mark.long),
    ],
)
def test_of_two_jobs_on_one_folder_exactly_one_runs(num_rounds: int, nproc: int, flags: str, tmp_path: Path) -> None:
    for number in range(num_rounds):
        start_two(tmp_path / str(number), nproc, flags)


@pytest.mark.long
def test_two_jobs_with_one_metrics_file_are_not_mixed(tmp_path: Path) -> None:
    shared = f"{FLAGS} --metrics-jsonl {tmp_path / 'figures.jsonl'}"
    several = [toy_args(tmp_path / name, shared) for name in ("one", "other")]
    runs = fork_trainings(several, 1)
    assert sorted(run.statuses for run in runs) == [(0,), (2,)]
    winner, loser = sorted(runs, key=lambda run: run.statuses)
    (reason,) = refusals(loser)
    assert reason.startswith(f"error: --metrics-jsonl {tmp_path / 'figures.jsonl'} is in use by a training run on ")
    alone = fork_training(toy_args(tmp_path / "alone", FLAGS)).check()
    assert exact_figures(winner.metrics) == exact_figures(alone.metrics)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["figures.jsonl"]


def test_an_evaluation_without_a_folder_of_its_own_runs_beside_a_run(tmp_path: Path) -> None:
    training = toy_args(tmp_path, FLAGS, "--train-iters 80")
    fork_training([*training, "--exit-interval", "20"]).check()
    looking = toy_args(tmp_path, "--train-iters 80 --lr-decay-iters 60 --skip-train", save=False)
    both = fork_trainings([training, [*looking, "--load", str(tmp_path / "checkpoints")]], 1)
    assert [len(run.check().iterations()) for run in both] == [80, 0]
