"""A run that goes on with other batches or evaluations has all its data; places that it cannot write are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import ForkedRun, fork_training

MOCK = "--mock-data --lr-decay-style constant --override-opt-param-scheduler"
WARM = "--lr-warmup-iters 2 --eval-interval 1000"


def test_smaller_batches_after_larger_ones(tmp_path: Path) -> None:
    def args(flags: str) -> list[str]:
        # Made-up data has exactly as many samples as are asked for.
        words = toy_args(tmp_path, MOCK, flags, data=False)
        place = words.index("--split")
        return words[:place] + words[place + 2 :]

    fork_training(args("--global-batch-size 8 --train-iters 4 --eval-interval 2")).check()
    run = fork_training(args("--global-batch-size 4 --train-iters 9 --eval-interval 4"), 2).check()
    assert [line["consumed_samples"] for line in run.iterations()] == [8, 16, 24, 32, 36, 40, 44, 48, 52]
    assert [line["iteration"] for line in run.evaluations("validation")] == [2, 4, 8, 9]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 4 of 20 iterations of 4 samples, the first two of them warm-up."""
    folder = tmp_path_factory.mktemp("stopped")
    fork_training(toy_args(folder, WARM, "--exit-interval 4")).check()
    return folder / "checkpoints"


def longer(stopped: Path, folder: Path, *more: str) -> ForkedRun:
    words = toy_args(folder, WARM, "--train-iters 24 --exit-interval 5", *more, save=False)
    return fork_training([*words, "--load", stopped, "--metrics-jsonl", folder / "metrics.jsonl"])


def test_a_longer_run_is_told_what_to_give_in_its_own_units(stopped: Path, tmp_path: Path) -> None:
    run = longer(stopped, tmp_path)
    assert run.statuses == (2,)
    (line,) = run.errors[0].splitlines()
    assert "(--lr-decay-iters 20 → 24); give --lr-decay-iters 20 to go on as it was, " in line
    assert "--override-opt-param-scheduler" in line
    assert "--use-checkpoint-opt-param-scheduler" in line
    assert "successfully loaded" not in run.stdout
    assert [line["iteration"] for line in longer(stopped, tmp_path, "--lr-decay-iters 20").check().iterations()] == [5]


def test_what_cannot_be_given_in_whole_iterations_is_not_proposed(stopped: Path, tmp_path: Path) -> None:
    run = longer(stopped, tmp_path, "--global-batch-size 6 --lr 1e-3")
    (line,) = run.errors[0].splitlines()
    assert "--lr 0.003 → 0.001" in line
    assert "--lr-decay-iters 13.33333333 → 24); give --override-opt-param-scheduler" in line


def test_samples_are_named_where_the_run_counts_in_them(stopped: Path, tmp_path: Path) -> None:
    words = toy_args(tmp_path, "--eval-interval 1000 --train-samples 96 --lr-warmup-samples 8", save=False)
    for flag in ("--train-iters", "--lr-warmup-iters"):
        place = words.index(flag)
        del words[place : place + 2]
    run = fork_training([*words, "--load", stopped])
    assert "(--lr-decay-samples 80 → 96); give --lr-decay-samples 80 to go on" in run.errors[0]


def test_a_wsd_decay_under_way_names_the_checkpoints_that_can_grow(tmp_path: Path) -> None:
    flags = f"{WARM} --lr-decay-style WSD --lr-wsd-decay-iters 3 --save-interval 2 --train-iters"
    fork_training(toy_args(tmp_path, flags, "6 --exit-interval 4")).check()
    words = toy_args(tmp_path, flags, "9 --exit-interval 5", save=False)
    words += ["--load", str(tmp_path / "checkpoints")]
    (line,) = fork_training(words).errors[0].splitlines()
    assert "(--lr-decay-iters 6 → 9); give --lr-decay-iters 6 to go on as it was, " in line
    assert "; its WSD decay began after 3 iterations: a checkpoint from before (--ckpt-step) goes on" in line
    metrics = ["--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    earlier = fork_training([*words, *metrics, "--ckpt-step", "2"]).check()
    assert [line["learning_rate"] for line in earlier.iterations()] == [3e-3] * 3


@pytest.mark.parametrize("style", ["constant", pytest.param("WSD --lr-wsd-decay-iters 5", marks=pytest.mark.long)])
def test_a_schedule_that_stands_still_grows_with_the_run(style: str, tmp_path: Path) -> None:
    flags = f"{WARM} --lr-decay-style {style} --lr-warmup-fraction 0.1 --lr-warmup-iters 0"
    fork_training(toy_args(tmp_path, flags, "--exit-interval 4")).check()
    run = fork_training(toy_args(tmp_path, flags, "--train-iters 24 --exit-interval 5")).check()
    assert [line["learning_rate"] for line in run.iterations()[-2:]] == [3e-3, 3e-3]


@pytest.mark.parametrize("flag", ["--metrics-jsonl", pytest.param("--tensorboard-dir", marks=pytest.mark.long)])
def test_a_place_that_cannot_be_written_is_refused_on_every_rank(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"
    run = fork_training(toy_args(tmp_path, flag, place, save=False), 2)
    assert run.statuses == (2, 2)
    assert len(run.errors[0].splitlines()) == 1
    assert str(tmp_path / "file") in run.errors[0]
    assert flag in run.errors[0]
