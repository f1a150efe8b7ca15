"""A run that goes on with other batches or evaluations has all its data; places that it cannot write are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import fork_training

MOCK = "--mock-data --lr-decay-style constant --override-opt-param-scheduler"


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


@pytest.mark.parametrize("flag", ["--metrics-jsonl", "--tensorboard-dir"])
def test_a_place_that_cannot_be_written_is_refused_on_every_rank(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"
    run = fork_training(toy_args(tmp_path, flag, place, save=False), 2)
    assert run.statuses == (2, 2)
    assert len(run.errors[0].splitlines()) == 1
    assert str(tmp_path / "file") in run.errors[0]
    assert flag in run.errors[0]
