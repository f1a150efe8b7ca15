"""A run that is stopped goes on as if it had not been stopped, also with other batches or evaluations."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.megatron_lines import parse
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import ForkedRun, fork_training, fork_training_to_death

SHARDED = "--data-parallel-sharding-strategy optim_grads --overlap-param-gather --ddp-bucket-size 5000"
CASES = [
    pytest.param(1, "", id="fp32"),
    pytest.param(1, "--bf16", id="bf16"),
    pytest.param(1, "--fp16 --initial-loss-scale 65536 --loss-scale-window 7", id="fp16"),
    pytest.param(2, "--tensor-model-parallel-size 2", id="fp32-tp2"),
    pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16", id="bf16-tp2-sp"),
    pytest.param(2, "", id="fp32-dp2"),
    pytest.param(2, "--bf16", id="bf16-dp2"),
    pytest.param(2, "--bf16 --use-distributed-optimizer", id="bf16-dp2-distributed-optimizer"),
    pytest.param(2, f"{SHARDED} --overlap-grad-reduce", id="fp32-dp2-sharded-gradients"),
]
LONG = pytest.mark.long
DOUBLED = (
    "fp32",
    "bf16",
    "fp32-tp2",
    "fp32-dp2",
    "bf16-dp2",
    "bf16-dp2-distributed-optimizer",
    "fp32-dp2-sharded-gradients",
)
"""Cases that others do with something more, and that resume at other layouts and after violent ends by default too."""
TrainWhole = Callable[[int, str], tuple[Path, ForkedRun]]


@pytest.fixture(scope="module")
def train_whole(tmp_path_factory: pytest.TempPathFactory) -> TrainWhole:
    """Return a function that trains without a stop, once for each layout, and returns the folder and the run."""

    @functools.cache
    def train(num_processes: int, flags: str) -> tuple[Path, ForkedRun]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, fork_training(toy_args(folder, flags, "--save-interval 10"), num_processes).check()

    return train


def train_in_two_parts(folder: Path, num_processes: int, flags: str, how: str) -> ForkedRun:
    """Train to iteration 10, be stopped in a way, and train to iteration 20."""
    checkpoints = folder / "checkpoints"
    if how == "exit-interval":
        first = fork_training(toy_args(folder, flags, "--exit-interval 10"), num_processes).check()
        assert "exiting program at iteration 10" in first.stdout
    elif how == "signal":
        # Two micro-batches an iteration on one data-parallel rank; only one rank hears of it.
        microbatch = 20 if "tensor" in flags or num_processes == 1 else 10
        faults = Faults(rank=num_processes - 1, sigterm_at=microbatch)
        first = fork_training(toy_args(folder, flags), num_processes, faults).check()
        assert "exiting program at iteration 10 after a signal" in first.stdout
    else:
        faults = Faults(kill_at_checkpoint=10, tracker=str(checkpoints / "latest_checkpointed_iteration.txt"))
        fork_training_to_death(toy_args(folder, flags, "--save-interval 5"), num_processes, faults)
    assert newest(checkpoints).name == "iter_0000010"
    second = fork_training(toy_args(folder, flags), num_processes).check()
    assert "at iteration 10" in second.stdout
    assert leftovers(checkpoints) == []
    return second


def assert_equal_to_uninterrupted(second: ForkedRun, whole: ForkedRun, folder: Path, whole_folder: Path) -> None:
    figures = exact_figures(whole.metrics)
    assert exact_figures(second.metrics) == figures
    assert [line["iteration"] for line in second.iterations()] == list(range(1, 21))
    assert_same_checkpoints(newest(folder / "checkpoints"), newest(whole_folder / "checkpoints"))


@pytest.mark.default(1)
@pytest.mark.parametrize(
    ("num_processes", "flags"),
    [pytest.param(*case.values, id=case.id, marks=LONG if case.id in DOUBLED else ()) for case in CASES],
)
def test_resume_is_bitwise_exact(num_processes: int, flags: str, train_whole: TrainWhole, tmp_path: Path) -> None:
    folder, whole = train_whole(num_processes, flags)
    assert len({line["lm_loss"] for line in whole.iterations()}) == 20
    assert whole.iterations()[-1]["lm_loss"] < whole.iterations()[0]["lm_loss"]
    second = train_in_two_parts(tmp_path, num_processes, flags, "exit-interval")
    assert_equal_to_uninterrupted(second, whole, tmp_path, folder)


@pytest.mark.parametrize(
    ("num_processes", "flags", "how"),
    [
        pytest.param(*CASES[1].values, "kill", id="bf16-kill", marks=LONG),
        pytest.param(*CASES[3].values, "signal", id="fp32-tp2-signal", marks=LONG),
        pytest.param(*CASES[5].values, "kill", id="fp32-dp2-kill"),
        pytest.param(*CASES[1].values, "signal", id="bf16-signal", marks=LONG),
        pytest.param(*CASES[3].values, "kill", id="fp32-tp2-kill", marks=LONG),
        pytest.param(*CASES[5].values, "signal", id="fp32-dp2-signal", marks=LONG),
    ],
)
def test_resume_after_a_violent_end_is_bitwise_exact(
    num_processes: int, flags: str, how: str, train_whole: TrainWhole, tmp_path: Path
) -> None:
    folder, whole = train_whole(num_processes, flags)
    second = train_in_two_parts(tmp_path, num_processes, flags, how)
    assert_equal_to_uninterrupted(second, whole, tmp_path, folder)


def test_what_an_interrupted_run_wrote_beyond_its_checkpoint_is_set_aside(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--save-interval 4 --eval-interval 3")
    checkpoints = tmp_path / "checkpoints"
    fork_training([*args, "--exit-interval", "4"]).check()
    for name in ("iteration 5", "iteration 6"):
        assert name not in (checkpoints / "metrics.jsonl").read_text()
    written = (checkpoints / "metrics.jsonl").read_text()
    beyond = [
        json.dumps({"iteration": 5, "lm_loss": 1.0}),
        json.dumps({"iteration": 6, "split": "validation"}),
        '{"ite',
    ]
    (checkpoints / "metrics.jsonl").write_text(written + "\n".join(beyond))
    run = fork_training(args).check()
    assert [line["iteration"] for line in run.iterations()] == list(range(1, 21))
    assert [line["iteration"] for line in run.evaluations("validation")] == [3, 6, 9, 12, 15, 18, 20]
    assert (checkpoints / "metrics.jsonl.superseded").read_text().splitlines() == beyond


LAYOUTS = [
    pytest.param(1, "", 2, "--tensor-model-parallel-size 2", id="tp1-to-tp2", marks=LONG),
    pytest.param(2, "--tensor-model-parallel-size 2", 1, "", id="tp2-to-tp1", marks=LONG),
    pytest.param(1, "", 2, "", id="dp1-to-dp2", marks=LONG),
    pytest.param(2, "", 2, "--tensor-model-parallel-size 2 --sequence-parallel", id="dp2-to-tp2-sp", marks=LONG),
    pytest.param(
        4,
        "--use-distributed-optimizer --micro-batch-size 1",
        2,
        SHARDED,
        id="dp4-sharded-to-dp2-sharded",
        marks=LONG,
    ),
    pytest.param(2, SHARDED, 2, "--tensor-model-parallel-size 2", id="dp2-sharded-to-tp2", marks=LONG),
    pytest.param(1, "", 2, "--use-distributed-optimizer", id="dp1-to-dp2-sharded", marks=LONG),
    pytest.param(
        2,
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        4,
        "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --use-distributed-optimizer",
        id="pp2-virtual-stages-to-zero-bubble-dp2-sharded",
    ),
    pytest.param(
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        1,
        "",
        id="tp2-sp-pp2-to-one-process",
        marks=LONG,
    ),
    pytest.param(
        1,
        "",
        4,
        "--context-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
        id="one-process-to-cp2-pp2-sharded",
    ),
    pytest.param(
        4,
        "--tensor-model-parallel-size 2",
        1,
        "--micro-batch-size 4",
        id="tp2-dp2-to-one-process-larger-micro-batch",
        marks=LONG,
    ),
]


NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def assert_same_run(second: ForkedRun, whole: ForkedRun) -> None:
    """Assert that a run in two layouts read the samples of one that ran through, and got its losses."""
    assert [line["iteration"] for line in second.iterations()] == list(range(1, 21))
    for ours, expected in zip(second.metrics, whole.metrics, strict=True):
        assert ours["iteration"] == expected["iteration"]
        assert ours["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-5, abs=0.0)
        if "split" not in ours:
            assert ours["sample_ids_hash"] == expected["sample_ids_hash"]
            assert ours["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5, abs=0.0)
            assert ours["learning_rate"] == expected["learning_rate"]


@pytest.mark.default(1)
@pytest.mark.parametrize(("before", "flags", "after", "new_flags"), LAYOUTS)
def test_resume_at_another_layout(
    before: int, flags: str, after: int, new_flags: str, train_whole: TrainWhole, tmp_path: Path
) -> None:
    folder, whole = train_whole(before, f"{flags} {NO_DROPOUT}")
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints", ignore=shutil.ignore_patterns("iter_0000020"))
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    second = fork_training(toy_args(tmp_path, new_flags, NO_DROPOUT), after).check()
    assert "at iteration 10" in second.stdout
    assert_same_run(second, whole)


ON_EIGHT_RANKS = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"


@pytest.mark.long
@pytest.mark.parametrize(
    ("after", "new_flags"),
    [
        pytest.param(1, "", id="one-process"),
        pytest.param(
            8,
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer",
            id="pp4-virtual-stages-dp2",
        ),
        pytest.param(
            8,
            "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --overlap-grad-reduce"
            " --data-parallel-sharding-strategy optim_grads",
            id="cp2-tp2-sp-dp2-sharded-gradients",
        ),
        pytest.param(
            8,
            "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
            id="tp4-pp2-zero-bubble",
        ),
        pytest.param(
            6,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"
            " --pipeline-model-parallel-layout Ettt|tttt|tL",
            id="tp2-pp3-uneven",
        ),
    ],
)
def test_resume_of_eight_ranks_at_another_layout(after: int, new_flags: str, tmp_path: Path) -> None:
    eight_layers = f"--num-layers 8 --global-batch-size 8 {NO_DROPOUT}"
    whole = fork_training(toy_args(tmp_path / "whole", eight_layers)).check()
    folder = tmp_path / "parts"
    fork_training(toy_args(folder, eight_layers, ON_EIGHT_RANKS, "--exit-interval 10"), 8).check()
    second = fork_training(toy_args(folder, eight_layers, new_flags), after).check()
    assert_same_run(second, whole)


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


def test_a_longer_run_decays_over_its_whole_length(stopped: Path, tmp_path: Path) -> None:
    run = longer(stopped, tmp_path).check()
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("--train-iters 20 → 24 extends the ")]
    rate = 3e-4 + 2.7e-3 * (1 + math.cos(math.pi * (16 - 8) / (96 - 8))) / 2
    old = 3e-4 + 2.7e-3 * (1 + math.cos(math.pi * (16 - 8) / (80 - 8))) / 2
    assert f"as with --override-opt-param-scheduler: the learning rate continues at {rate:.6E}, not {old:.6E};" in line
    assert line.endswith("--lr-decay-iters 20 keeps the old length")
    assert [line["learning_rate"] for line in run.iterations()] == [pytest.approx(rate, rel=1e-12)]
    assert "schedule changed" not in run.stdout
    assert " > overriding total number of iterations value to 96" in run.stdout
    kept = longer(stopped, tmp_path, "--lr-decay-iters 20").check()
    assert "extends the" not in kept.stdout
    assert [line["learning_rate"] for line in kept.iterations()] == [pytest.approx(old, rel=1e-12)]


def test_a_longer_run_with_another_decay_length_is_told_what_to_give(stopped: Path, tmp_path: Path) -> None:
    run = longer(stopped, tmp_path, "--lr-decay-iters 22")
    assert run.statuses == (2,)
    (line,) = run.errors[0].splitlines()
    assert "(--lr-decay-iters 20 → 22); pass --lr-decay-iters 20 to keep the recorded value, " in line
    assert "--override-opt-param-scheduler" in line
    assert "--use-checkpoint-opt-param-scheduler" in line
    assert "successfully loaded" not in run.stdout


def test_what_cannot_be_given_in_whole_iterations_is_not_proposed(stopped: Path, tmp_path: Path) -> None:
    run = longer(stopped, tmp_path, "--global-batch-size 6 --lr 1e-3")
    (line,) = run.errors[0].splitlines()
    assert "--lr 0.003 → 0.001" in line
    assert "--lr-decay-iters 13.33333333 → 24); pass --override-opt-param-scheduler" in line


def test_samples_are_named_where_the_run_counts_in_them(stopped: Path, tmp_path: Path) -> None:
    words = toy_args(tmp_path, "--eval-interval 1000 --train-samples 80 --lr-warmup-samples 8", save=False)
    for flag in ("--train-iters", "--lr-warmup-iters"):
        place = words.index(flag)
        del words[place : place + 2]
    run = fork_training([*words, "--lr-decay-samples", "96", "--load", stopped])
    assert "(--lr-decay-samples 80 → 96); pass --lr-decay-samples 80 to keep the recorded value" in run.errors[0]


def test_a_finished_run_that_is_started_again_saves_and_evaluates(tmp_path: Path) -> None:
    words = toy_args(tmp_path, "--train-iters 2 --lr-warmup-iters 0 --eval-interval 2")
    first = fork_training(words).check()
    again = fork_training(words).check()
    names = ["training", "start", "all done", "after", "rule", "validation", "evaluated samples"]
    found = [name for name in parse(again.stdout) if name in {*names, "saving", "saved", "finished", "end of training"}]
    assert [name for name in found if name != "rule"] == [
        *("training", "start", "all done", "after", "saving", "saved", "finished"),
        *("evaluated samples", "validation", "end of training", "evaluated samples", "validation", "end of training"),
    ]
    # The run that trained has evaluated at its last iteration, and says that loss again.
    at_end = r"^ validation loss at the end of training for (val|test) data \| (.+)$"
    losses = re.findall(at_end, first.stdout, re.MULTILINE)
    assert [name for name, _ in losses] == ["val", "test"]
    assert f" validation loss at iteration 2 on validation set | {losses[0][1]}" in first.stdout.splitlines()
    assert re.search(r"^training finished, evaluating, about \d+ s$", first.stdout, re.MULTILINE)
    assert re.search(r"^training finished, evaluating$", again.stdout, re.MULTILINE)
    assert re.findall(at_end, again.stdout, re.MULTILINE)[1] == losses[1]


def test_a_wsd_decay_under_way_names_the_checkpoints_that_can_grow(tmp_path: Path) -> None:
    flags = f"{WARM} --lr-decay-style WSD --lr-wsd-decay-iters 3 --save-interval 2 --train-iters"
    fork_training(toy_args(tmp_path, flags, "6 --exit-interval 4")).check()
    words = toy_args(tmp_path, flags, "9 --exit-interval 5", save=False)
    words += ["--load", str(tmp_path / "checkpoints")]
    (line,) = fork_training(words).errors[0].splitlines()
    assert "(--lr-decay-iters 6 → 9); pass --lr-decay-iters 6 to keep the recorded value, " in line
    assert "; its WSD decay began after 3 iterations: an earlier checkpoint (--ckpt-step) resumes" in line
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
