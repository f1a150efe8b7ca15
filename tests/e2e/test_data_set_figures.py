"""What a run on a blend leaves of each data set's loss: in the metrics file, in TensorBoard and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.plot import main
from tests.e2e.test_validation_sets import write_text
from tests.e2e.toy_run import DATA, toy_args
from tests.harness.forked_training import ForkedRun, fork_training
from tests.unit.training.reporting.test_loggers import events_in


def check_parts(run: ForkedRun, names: set[str]) -> None:
    steps = [line for line in run.metrics if "split" not in line]
    assert {name for line in steps for name in line["data_sets"]} == names
    for line in steps:
        parts = line["data_sets"].values()
        tokens = sum(part["num_tokens"] for part in parts)
        assert tokens == line["global_batch_size"] * 24
        assert sum(part["lm_loss"] * part["num_tokens"] for part in parts) / tokens == pytest.approx(line["lm_loss"])


def test_a_blend_leaves_the_loss_of_each_data_set_and_goes_on_with_another(tmp_path: Path) -> None:
    books, web = write_text(tmp_path / "books", [600] * 9, seed=3), write_text(tmp_path / "web+1", [600] * 9, seed=4)
    board = tmp_path / "board"
    first = toy_args(
        tmp_path,
        f"--data-path 0.5 {books} 0.3 {web} 0.2 {DATA} --train-iters 4 --eval-iters 0 --split 1,0,0",
        f"--lr-decay-iters 8 --tensorboard-dir {board}",
        data=False,
    )
    run = fork_training(first).check()
    check_parts(run, {"books", "web+1", "t_u16"})
    # The line of the log stays Megatron's.
    assert "data set" not in "".join(line for line in run.stdout.splitlines() if "lm loss:" in line)
    events = events_in(board)
    written = {line["iteration"]: line["data_sets"] for line in run.metrics}
    points = {event.step: event.value for event in events.Scalars("lm loss of data set/web+1")}
    assert points == {
        step: pytest.approx(sets["web+1"]["lm_loss"], rel=1e-6) for step, sets in written.items() if "web+1" in sets
    }
    second = [*first, "--data-path", "0.5", str(web), "0.5", str(DATA), "--train-iters", "8"]
    again = fork_training(second).check()
    assert "the training data changes after 16 samples" in again.stdout
    later = [line for line in again.metrics if line["iteration"] > 4]
    assert {name for line in later for name in line["data_sets"]} == {"web+1", "t_u16"}
    page = tmp_path / "page.html"
    assert main([str(tmp_path / "checkpoints"), "--output", str(page)]) == 0
    assert 'aria-label="Training loss of each data set"' in page.read_text()


def test_one_data_set_has_no_figures_of_its_own(tmp_path: Path) -> None:
    flags = f"--train-iters 1 --lr-warmup-iters 0 --eval-iters 0 --metrics-jsonl {tmp_path / 'metrics.jsonl'}"
    (line,) = fork_training(toy_args(tmp_path, flags, save=False)).check().metrics
    assert "data_sets" not in line
