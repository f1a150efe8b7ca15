"""A run writes when its passes ran, and the drawing shows each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.visualize_pipeline import main
from megatron.core.pipeline_parallel.schedules import Pass
from megatron.core.pipeline_parallel.timeline import read_timeline
from tests.e2e.toy_run import toy_args
from tests.harness.forked_training import fork_training


@pytest.mark.parametrize(
    ("iterations", "more", "recorded"),
    [
        (1, "", 1),
        pytest.param(3, "", 2, marks=pytest.mark.long),
        pytest.param(4, "--iterations-to-skip 0", 3, marks=pytest.mark.long),
        (3, "--iterations-to-skip 0 1", 3),
    ],
)
def test_the_passes_of_a_pipeline_are_recorded_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], iterations: int, more: str, recorded: int
) -> None:
    path = tmp_path / "new" / "schedule.json"
    flags = f"--train-iters {iterations} --eval-iters 0 --lr-warmup-iters 0 --cpu-matmul mkl {more}"
    layout = "--pipeline-model-parallel-size 2 --global-batch-size 6"
    plain = fork_training(toy_args(tmp_path / "plain", flags, layout, save=False), 2)
    words = toy_args(tmp_path / "run", flags, layout, "--record-schedule", path, save=False)
    run = fork_training(words, 2).check()
    assert f"wrote {path}: the passes of iteration {recorded};" in run.stdout
    assert run.losses() == plain.losses()
    timeline = read_timeline(path)
    assert (timeline.pipeline_size, timeline.num_microbatches) == (2, 3)
    for rank in timeline.ranks:
        kinds = [action.kind for action in rank.actions]
        assert (kinds.count(Pass.FORWARD), kinds.count(Pass.BACKWARD)) == (3, 3)
    # The second stage cannot begin before the first has ended its first pass.
    assert timeline.ranks[1].starts[0] >= timeline.ranks[0].ends[0]
    assert main(["--recorded", str(path)]) == 0
    assert capsys.readouterr().out.count("rank ") >= 2
