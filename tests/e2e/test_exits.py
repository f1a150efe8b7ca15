"""How a run ends: at its length, by a scheduler's warning, or at a sample that cannot be read."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.dist_checkpointing import shard_file
from tests.e2e.toy_run import DATA, assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import ForkedRun, fork_training, fork_trainings

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def assert_equal_runs(ours: ForkedRun, expected: ForkedRun, tolerance: float = 1e-5) -> None:
    assert len(ours.metrics) == len(expected.metrics) > 0
    for left, right in zip(ours.metrics, expected.metrics):
        assert left["lm_loss"] == pytest.approx(right["lm_loss"], rel=tolerance, abs=0.0)
        if "split" not in left:
            assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=tolerance, abs=0.0)


def test_time_limit_saves_and_ends(tmp_path: Path) -> None:
    # Only the second rank's clock says so: all must agree.
    run = fork_training(toy_args(tmp_path, "--exit-duration-in-mins 45"), 2, Faults(rank=1, hour_passes_at=3)).check()
    assert "exiting program after 45 minutes at iteration 3" in run.stdout
    assert newest(tmp_path / "checkpoints").name == "iter_0000003"
    assert run.evaluations("validation") == []


def test_skip_train_only_evaluates(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--exit-interval 5")
    fork_training(args).check()
    run = fork_training([*args, "--skip-train", "--metrics-jsonl", str(tmp_path / "evaluation.jsonl")]).check()
    assert run.iterations() == []
    assert [(line["iteration"], line["split"]) for line in run.metrics] == [(5, "validation"), (5, "test")]
    assert newest(tmp_path / "checkpoints").name == "iter_0000005"


def test_evaluations_say_when_and_on_what(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, save=False)).check()
    lines = run.stdout.splitlines()
    headings = [line for line in lines if line.startswith(" validation loss at ")]
    assert [heading.split(" | ")[0] for heading in headings] == [
        " validation loss at iteration 10 on validation set",
        " validation loss at iteration 20 on validation set",
        " validation loss at the end of training for val data",
        " validation loss at iteration 20 on test set",
        " validation loss at the end of training for test data",
    ]
    for heading in headings:
        place = lines.index(heading)
        assert set(lines[place - 1]) == set(lines[place + 1]) == {"-"}
        loss, perplexity = (float(number) for number in re.findall(r"\d\.\d{6}E[+-]\d\d", heading))
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize(
    ("split", "empty"), [("1,0,0", ("valid", "test")), pytest.param("90,10,0", ("test",), marks=pytest.mark.long)]
)
def test_an_empty_split_is_reported_and_not_evaluated(split: str, empty: tuple[str, ...], tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, f"--split {split}")).check()
    assert len(run.iterations()) == 20
    evaluated = {line["split"] for line in run.metrics if "split" in line}
    assert evaluated == {"validation", "test"} - {name.replace("valid", "validation") for name in empty}
    before_training = run.stdout.split("[before the start of training step]")[0]
    reports = [line for line in before_training.splitlines() if re.match(r" > no (train|valid|test) data: ", line)]
    assert [line.split()[2] for line in reports] == list(empty)
    assert not re.search(r"set empty|samples are needed.*\n(.*\n)* > no test", before_training)


def test_a_run_measured_in_samples(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--train-samples 60 --lr-warmup-samples 12 --lr-decay-samples 60")
    for flag in ("--train-iters", "--lr-warmup-iters"):
        place = args.index(flag)
        del args[place : place + 2]
    run = fork_training(args, 2).check()
    assert [line["consumed_samples"] for line in run.iterations()] == list(range(4, 61, 4))
    rates = [line["learning_rate"] for line in run.iterations()]
    assert rates[:4] == pytest.approx([0.0, 1e-3, 2e-3, 3e-3])
    assert rates[4] < 3e-3


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_batch_size_ramps_up_and_resumes_in_the_middle(num_processes: int, tmp_path: Path) -> None:
    flags = f"--micro-batch-size 1 --rampup-batch-size 2 2 24 --global-batch-size 6 {NO_DROPOUT}"
    args = toy_args(tmp_path, flags)
    fork_training([*args, "--exit-interval", "4"], num_processes).check()
    run = fork_training(args, num_processes).check()
    sizes = [line["global_batch_size"] for line in run.iterations()]
    assert sizes == [2] * 6 + [4] * 3 + [6] * 11
    consumed = [line["consumed_samples"] for line in run.iterations()]
    assert consumed == [sum(sizes[: i + 1]) for i in range(20)]
    assert re.search(r"global batch size:     4 \|", run.stdout)


@pytest.mark.parametrize(
    ("num_processes", "layout"),
    [
        pytest.param(1, "--micro-batch-size 1", marks=pytest.mark.long),
        pytest.param(2, "--micro-batch-size 1", marks=pytest.mark.long),
        (2, "--micro-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ],
    ids=["accumulated", "dp2", "tp2-sp"],
)
def test_per_token_loss_does_not_depend_on_how_a_batch_is_cut(num_processes: int, layout: str, tmp_path: Path) -> None:
    uneven = Faults(drop_share=0.9)
    common = f"{NO_DROPOUT} --calculate-per-token-loss --train-iters 10"
    whole = fork_training(toy_args(tmp_path / "whole", common, "--micro-batch-size 4"), 1, uneven).check()
    ours = fork_training(toy_args(tmp_path / "ours", common, layout), num_processes, uneven).check()
    assert_equal_runs(ours, whole)


def test_without_per_token_loss_each_micro_batch_counts_alike(tmp_path: Path) -> None:
    uneven = Faults(drop_share=0.9)
    runs = [
        fork_training(
            toy_args(tmp_path / size, f"{NO_DROPOUT} --train-iters 5 --micro-batch-size {size}"), 1, uneven
        ).check()
        for size in ("1", "4")
    ]
    norms = [run.iterations()[0]["grad_norm"] for run in runs]
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--log-timers-to-tensorboard --log-validation-ppl-to-tensorboard", "--tensorboard-dir")
    run = fork_training([*args, str(tmp_path / "tensorboard")]).check()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"lm loss", "grad-norm", "learning-rate", "loss-scale", "lm loss validation"} <= set(
        events.Tags()["scalars"]
    )
    points = events.Scalars("lm loss")
    assert [point.step for point in points] == list(range(1, 21))
    assert [point.value for point in points] == pytest.approx([line["lm_loss"] for line in run.iterations()], rel=1e-6)


@pytest.mark.long
def test_an_override_on_resume_is_shown_and_applied(tmp_path: Path) -> None:
    args = toy_args(tmp_path)
    fork_training([*args, "--exit-interval", "5"]).check()
    changed = [*args, "--lr", "1e-3", "--min-lr", "1e-3", "--weight-decay", "0.05", "--override-opt-param-scheduler"]
    run = fork_training(changed).check()
    assert re.search(r"lr.*0\.003 -> 0\.001", run.stdout)
    assert re.search(r"weight.decay.*0\.01 -> 0\.05", run.stdout)
    assert [line["learning_rate"] for line in run.iterations()][5:] == pytest.approx([1e-3] * 15)


def test_a_resume_without_the_optimizer_says_what_begins_anew(tmp_path: Path) -> None:
    args = toy_args(tmp_path)
    first = fork_training([*args, "--exit-interval", "5"]).check()
    run = fork_training([*args, "--no-load-optim"]).check()
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("--no-load-optim: "))
    assert line.endswith(
        "resumes at iteration 5, with new optimizer state and the learning-rate schedule from its start"
    )
    rates = [line["learning_rate"] for line in run.iterations()]
    assert len(rates) == 20
    assert rates[5:10] == rates[:5] == [line["learning_rate"] for line in first.iterations()]
    assert "--no-load-optim" not in first.stdout


@pytest.mark.parametrize("interval", [1, pytest.param(4, marks=pytest.mark.long)])
def test_replicas_that_drift_apart_end_the_run(interval: int, tmp_path: Path) -> None:
    name = "decoder.layers.1.input_layernorm.weight"
    args = toy_args(tmp_path, f"--check-weight-hash-across-dp-replicas-interval {interval} --save-interval 2")
    run = fork_training(args, 2, Faults(rank=1, drift_at=3, drifting_parameter=name))
    assert run.statuses == (1, 1)
    found_at = 3 if interval == 1 else 4
    (line,) = [line for line in run.errors[0].splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: at iteration {found_at}: ")
    assert f"differ between the data-parallel ranks [0, 1]: {name}" in line or "more" in line
    assert run.iterations()[-1]["iteration"] == found_at
    assert newest(tmp_path / "checkpoints").name == "iter_0000002"


def test_replicas_that_stay_equal_pass(tmp_path: Path) -> None:
    flags = "--check-weight-hash-across-dp-replicas-interval 1 --use-distributed-optimizer --overlap-param-gather"
    run = fork_training(toy_args(tmp_path, flags, "--overlap-grad-reduce --bf16 --exit-interval 4"), 2).check()
    assert len(run.iterations()) == 4


def test_a_changed_schedule_without_a_word_for_it_is_refused_or_kept(tmp_path: Path) -> None:
    args = toy_args(tmp_path)
    fork_training([*args, "--exit-interval", "5"]).check()
    run = fork_training([*args, "--lr", "1e-3"])
    assert run.statuses == (2,)
    assert "3e-03" in run.errors[0] or "0.003" in run.errors[0]
    assert "--override-opt-param-scheduler" in run.errors[0]
    kept = fork_training([*args, "--lr", "1e-3", "--use-checkpoint-opt-param-scheduler"]).check()
    assert max(line["learning_rate"] for line in kept.iterations()) > 2e-3


@pytest.mark.long
def test_a_longer_run_with_the_same_schedule_resumes_without_a_word(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--lr-decay-iters 40")
    fork_training(args).check()
    run = fork_training([*args, "--train-iters", "23"]).check()
    assert [line["iteration"] for line in run.iterations()] == list(range(1, 24))
    assert "training.train_iters: 20 -> 23" in run.stdout


@pytest.mark.long
def test_the_batch_may_change_on_resume(tmp_path: Path) -> None:
    args = toy_args(tmp_path, NO_DROPOUT)
    fork_training([*args, "--exit-interval", "5"]).check()
    run = fork_training([*args, "--global-batch-size", "8", "--override-opt-param-scheduler"]).check()
    assert [line["consumed_samples"] for line in run.iterations()] == [*range(4, 21, 4), *range(28, 141, 8)]
    assert "global_batch_size" in run.stdout
    assert re.search(r"global_batch_size.*4 -> 8", run.stdout)


def test_too_little_data_is_said_before_training(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--train-iters 400 --exit-interval 1")).check()
    assert re.search(r"need 1600 samples, have \d+ in one epoch, reading \d+ epochs", run.stdout)
    assert run.stdout.index("need 1600 samples") < run.stdout.index("[before the start of training step]")


@pytest.mark.long
def test_mock_data_trains(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--mock-data --split 90,5,5", data=False), 2).check()
    assert len(run.iterations()) == 20


def test_blends_and_data_per_split(tmp_path: Path) -> None:
    parts = ["--train-data-path", "30", str(DATA), "70", str(DATA), "--valid-data-path", str(DATA)]
    parts += ["--test-data-path", str(DATA)]
    args = toy_args(tmp_path, data=False)
    place = args.index("--split")
    del args[place : place + 2]
    run = fork_training([*args, *parts], 2).check()
    assert [line["split"] for line in run.metrics if "split" in line] == ["validation", "validation", "test"]


@pytest.mark.long
def test_two_jobs_share_an_empty_index_cache(tmp_path: Path) -> None:
    cache = ["--data-cache-path", str(tmp_path / "shared-cache")]
    several = [[*toy_args(tmp_path / name, "--train-iters 8"), *cache] for name in ("one", "other")]
    one, other = (run.check() for run in fork_trainings(several, 2))
    assert len(one.iterations()) == 8
    assert exact_figures(one.metrics) == exact_figures(other.metrics)
    files = [path.name for path in (tmp_path / "shared-cache").rglob("*") if path.is_file()]
    assert files
    assert all(name.endswith((".npy", ".txt", ".json")) for name in files), files


SAVE_S = 1.2


def run_on_a_slow_disk(argv: list[str], faults: Faults) -> int:
    """Train where a checkpoint takes more than a second."""
    real = shard_file.write_shard

    def write(path, entries):
        time.sleep(SAVE_S)
        return real(path, entries)

    shard_file.write_shard = write
    try:
        return run_with_faults(argv, faults)
    finally:
        shard_file.write_shard = real


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if "--preemption-grace-seconds" in line and line.startswith("WARNING")]


@pytest.mark.default
@pytest.mark.parametrize("how", [pytest.param("", marks=pytest.mark.long), "--async-save"])
def test_a_warning_that_is_too_short_is_said_after_the_first_checkpoint(how: str, tmp_path: Path) -> None:
    flags = "--save-interval 2 --train-iters 6 --lr-decay-iters 20 --eval-interval 100 --micro-batch-size 4"
    args = toy_args(tmp_path, flags, how)
    run = fork_training([*args, "--preemption-grace-seconds", "1"], program=run_on_a_slow_disk).check()
    line = warnings(run.stdout)[0]
    assert re.search(r" \d+\.\d s for a checkpoint", line)
    if not how:
        before = run.stdout[: run.stdout.index(line)]
        assert "saved checkpoint at iteration       2 " in before
        assert "iteration        3/" not in before
    enough = fork_training(
        [*args, "--preemption-grace-seconds", "90", "--train-iters", "8"], program=run_on_a_slow_disk
    )
    assert warnings(enough.check().stdout) == []


@pytest.mark.long
def test_a_signal_at_an_evaluation_saves_first_and_later_evaluations_are_the_same(tmp_path: Path) -> None:
    flags = "--eval-interval 5 --save-interval 100 --hidden-dropout 0.1"
    whole = fork_training(toy_args(tmp_path / "whole", flags), 2).check()
    args = toy_args(tmp_path / "ours", flags, "--preemption-grace-seconds 60")
    ended = fork_training(args, 2, Faults(rank=1, sigterm_at=10)).check()
    assert "no evaluation at iteration 10: the run is ending after a signal" in ended.stdout
    assert ended.stdout.index("no evaluation at iteration 10") < ended.stdout.index(
        "saving checkpoint at iteration      10"
    )
    assert newest(tmp_path / "ours" / "checkpoints").name == "iter_0000010"
    resumed = fork_training(args, 2).check()
    expected = [figures for figures in exact_figures(whole.metrics) if figures[:2] != (10, "validation")]
    assert exact_figures(resumed.metrics) == expected
    assert leftovers(tmp_path / "ours" / "checkpoints") == []
    last = "checkpoints/iter_0000020"
    assert_same_checkpoints(tmp_path / "ours" / last, tmp_path / "whole" / last)


@pytest.mark.parametrize("num_workers", ["0", "3"])
def test_one_process(num_workers: str, tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--num-workers", num_workers), faults=Faults(unreadable_sample=9))
    assert run.statuses == (2,)
    assert run.errors == (f"error: sample 9 from {DATA}: [Errno 5] Input/output error\n",)
    assert [line["iteration"] for line in run.iterations()] == [1, 2]
