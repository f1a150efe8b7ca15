"""Several validation sets, and the losses of each data set of a blend: reported under their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron.cli.plot import main
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.e2e.toy_run import DATA, toy_args
from tests.harness.forked_training import ForkedRun, fork_training
from tests.unit.training.loggers.test_experiment_loggers import events_in

VALUE = r"\d\.\d{6}E[+-]\d\d"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def write_text(prefix: Path, lengths: Iterable[int], seed: int) -> Path:
    random = np.random.RandomState(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for length in lengths:
            builder.add_document(random.randint(0, 90, length))
        builder.finalize()
    return prefix


def extra_sets(folder: Path) -> str:
    """Write two lists of validation data and return the flags that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    one = write_text(folder / "one", range(20, 60), seed=1)
    two = write_text(folder / "two", range(30, 45), seed=2)
    (folder / "valid-datalist-web").write_text(f"0.75 {one}\n0.25 {two}\n")
    (folder / "valid-datalist-books").write_text(f"{two}")
    return (
        f"--extra-valid-datalist {folder}/valid-datalist-web --extra-valid-data-samples 13 --extra-valid-data-names web"
        f" --extra-valid-datalist {folder}/valid-datalist-books --extra-valid-data-samples 5 "
        "--extra-valid-data-names books"
    )


def evaluations(run: ForkedRun) -> list[tuple[int, str]]:
    return [(line["iteration"], line["split"]) for line in run.metrics if "split" in line]


def test_each_validation_set_is_reported_by_its_name(tmp_path: Path) -> None:
    flags = f"--train-iters 6 --eval-interval 3 --tensorboard-dir {tmp_path / 'board'}"
    run = fork_training(toy_args(tmp_path, flags, extra_sets(tmp_path / "extra"))).check()
    every = [("validation", "validation set"), ("web", "validation set web"), ("books", "validation set books")]
    assert evaluations(run) == [*((i, name) for i in (3, 6) for name, _ in every), (6, "test")]
    for iteration in (3, 6):
        for name, title in every:
            (loss,) = [line["lm_loss"] for line in run.evaluations(name) if line["iteration"] == iteration]
            (shown,) = re.findall(
                rf"^ validation loss at iteration {iteration} on {title} \| lm loss value: ({VALUE}) \| "
                rf"lm loss PPL: {VALUE} \|$",
                run.stdout,
                re.MULTILINE,
            )
            assert shown == f"{loss:.6E}"
    assert re.search(r"^    web:        13\n    books:      5$", run.stdout, re.MULTILINE)


def test_losses_do_not_depend_on_how_the_sets_are_cut_into_batches(tmp_path: Path) -> None:
    # 13 and 5 samples fill no whole number of micro-batches; the weights stay as they were initialized.
    flags = f"{NO_DROPOUT} --train-iters 1 --eval-interval 1 --lr-warmup-iters 0 --lr 1e-9 --min-lr 0"
    sets = extra_sets(tmp_path / "extra")
    losses = []
    for num_processes, layout in ((1, "--micro-batch-size 1"), (2, ""), (2, "--tensor-model-parallel-size 2")):
        folder = tmp_path / f"{num_processes}{layout}"
        run = fork_training(toy_args(folder, flags, sets, layout, "--full-validation"), num_processes).check()
        assert evaluations(run) == [(1, "validation"), (1, "web"), (1, "books"), (1, "test")]
        losses.append([line["lm_loss"] for line in run.metrics if "split" in line])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-6, abs=0.0)


def test_a_fixed_number_of_samples_is_the_same_in_every_evaluation(tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} --train-iters 4 --eval-interval 2 --lr 1e-12 --min-lr 0 --lr-warmup-iters 0"
    run = fork_training(toy_args(tmp_path, flags, extra_sets(tmp_path / "extra"))).check()
    for name in ("web", "books"):
        first, second = run.evaluations(name)
        assert second["lm_loss"] == pytest.approx(first["lm_loss"], rel=1e-7)
    first, second = run.evaluations("validation")
    assert second["lm_loss"] != pytest.approx(first["lm_loss"], rel=1e-7)


def test_the_whole_validation_set_is_read_once_whatever_the_weights(tmp_path: Path) -> None:
    flags = (
        f"{NO_DROPOUT} --train-iters 2 --eval-interval 1 --lr 1e-12 --min-lr 0 --lr-warmup-iters 0 --full-validation"
    )
    paths = ["--data-path", "0.9", str(DATA), "0.1", str(write_text(tmp_path / "other", range(20, 60), seed=3))]
    run = fork_training([*toy_args(tmp_path, flags, data=False), *paths]).check()
    assert re.search(r"^    validation: all$", run.stdout, re.MULTILINE)
    first, second = run.evaluations("validation")
    assert second["lm_loss"] == pytest.approx(first["lm_loss"], rel=1e-7)


def test_a_small_validation_set_is_read_once_and_a_smaller_one_repeated(tmp_path: Path) -> None:
    (tmp_path / "list").write_text(str(write_text(tmp_path / "tiny", [3], seed=4)))
    flags = "--train-iters 2 --eval-interval 1 --lr 1e-12 --min-lr 0 --lr-warmup-iters 0 --micro-batch-size 2"
    words = toy_args(tmp_path, NO_DROPOUT, flags, f"--extra-valid-datalist {tmp_path}/list", save=False)
    place = words.index("--eval-iters")
    words = [*words[:place], *words[place + 2 :], "--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    run = fork_training(words).check()
    # The targets are those of 100 iterations, as before; two evaluations, and the last one.
    assert re.search(r"^    validation: 1200\n    test: +400$", run.stdout, re.MULTILINE)
    size = re.search(r"^ > valid data: each evaluation reads all (\d+) samples once;", run.stdout, re.MULTILINE)
    assert size is not None
    assert int(size[1]) < 400
    first, second = run.evaluations("validation")
    assert second["lm_loss"] == pytest.approx(first["lm_loss"], rel=1e-7), "the same samples"
    tested = re.search(r"^ > test data: each evaluation reads all (\d+) samples once;", run.stdout, re.MULTILINE)
    assert tested is not None
    assert re.findall(r"^Evaluating on (\d+) samples$", run.stdout, re.MULTILINE) == [tested[1]]
    assert "/tiny: less than one sample, repeated: need 1 samples, reading 9 epochs [validation set list]" in run.stdout
    assert len(run.evaluations("list")) == 2


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
