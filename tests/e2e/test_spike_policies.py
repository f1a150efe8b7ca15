"""What a run does about steps that look wrong: it stops, leaves samples out, or goes back and passes them over."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.checkpoint.checkpoint_folder import newest_known
from megatron.core.datasets.batch import Batch
from megatron.core.dist_checkpointing.index import read_index
from megatron.core.models.model import Model
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss
from megatron.training import dist_signal_handler
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import ForkedRun, fork_training

PLAIN = "--train-iters 14 --save-interval 4 --eval-interval 100"
WATCH = f"{PLAIN} --spike-window 8"
BAD_SAMPLE = 38
"""Of iteration 10, which begins with 36 consumed samples."""
POISON = Faults(poisoned=(BAD_SAMPLE,), poison=100.0)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> ForkedRun:
    """Return a run of one process that nothing befell."""
    return fork_training(toy_args(tmp_path_factory.mktemp("clean"), PLAIN)).check()


def left_out(folder: Path) -> list[tuple[int, int, list[int]]]:
    record = read_index(newest(folder / "checkpoints")).common["progress"]["train_data"]
    return [(step["start"], step["end"], step["samples"]) for step in record.get("left_out", [])]


def skipped(run: ForkedRun) -> list[int]:
    return [line["iteration"] for line in run.iterations() if line["skipped"]]


@pytest.mark.default
def test_a_spike_stops_a_run_that_is_to_stop(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, WATCH, "--spike-policy stop"), 1, POISON)
    assert run.statuses == (1,)
    (line,) = [line for line in run.errors[0].splitlines() if line.startswith("error: ")]
    assert line.startswith("error: iteration 10: the loss ")
    assert "data: the same step gave the same result again" in line
    assert f"sample {BAD_SAMPLE} (loss " in line
    assert line.endswith("--ckpt-step 4 is the newest validated checkpoint of --save")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("", marks=pytest.mark.long),
        "--use-distributed-optimizer --bf16 --overlap-param-gather --overlap-grad-reduce",
    ],
)
def test_the_samples_of_a_spike_are_left_out(layout: str, tmp_path: Path) -> None:
    args = toy_args(tmp_path, WATCH, "--spike-policy skip", layout)
    run = fork_training(args, 2 if layout else 1, POISON).check()
    assert skipped(run) == [10]
    assert left_out(tmp_path) == [(36, 40, [BAD_SAMPLE])]
    assert run.iterations()[-1]["iteration"] == 14


def test_a_run_goes_back_and_passes_the_samples_over(tmp_path: Path) -> None:
    args = toy_args(tmp_path, WATCH, "--spike-policy rewind")
    run = fork_training(args, 1, POISON).check()
    assert left_out(tmp_path) == [(36, 40, [BAD_SAMPLE])]
    lines = run.iterations()
    assert [line["iteration"] for line in lines] == list(range(1, 15))
    assert skipped(run) == [10]
    assert "iteration 10: consumed samples 36 to 40 are skipped" in run.stdout
    superseded = (tmp_path / "checkpoints" / "metrics.jsonl.superseded").read_text()
    assert '"iteration": 5' in superseded
    # A run that passes the same samples over from the beginning trains the same, bit for bit.
    other = fork_training(toy_args(tmp_path / "other", PLAIN, "--iterations-to-skip 9"), 1, POISON).check()
    assert exact_figures(other.iterations()) == exact_figures(lines)
    assert left_out(tmp_path / "other") == [(36, 40, [])]


@pytest.mark.long
def test_a_resumed_run_leaves_the_same_samples_out(tmp_path: Path) -> None:
    args = toy_args(tmp_path, WATCH, "--spike-policy rewind")
    fork_training([*args, "--exit-interval", "12"], 1, POISON).check()
    # The checkpoint from before those samples knows of them; nothing is poisoned now that could be found again.
    resumed = fork_training([*args, "--ckpt-step", "8"]).check()
    assert left_out(tmp_path) == [(36, 40, [BAD_SAMPLE])]
    assert skipped(resumed) == [10]
    assert resumed.iterations()[-1]["iteration"] == 14


def late_on_rank_one(argv: Sequence[str], faults: Faults) -> int:
    """Train where the second rank's clock says that the time is up from the beginning."""
    dist_signal_handler.time = SimpleNamespace(time=lambda: time.time() + 3600.0 * dist.get_rank())  # type: ignore[attr-defined]
    return run_with_faults(argv, faults)


@pytest.mark.long
def test_what_is_due_at_an_iteration_that_is_passed_over_is_done(tmp_path: Path) -> None:
    flags = "--train-iters 4 --eval-interval 2 --save-interval 2 --iterations-to-skip 1 3"
    run = fork_training(toy_args(tmp_path / "last", flags)).check()
    assert [line["iteration"] for line in run.evaluations("validation")] == [2, 4]
    assert run.stdout.count("successfully saved checkpoint at iteration") == 2
    run = fork_training(toy_args(tmp_path / "interval", flags, "--exit-interval 2")).check()
    assert "exiting program at iteration 2" in run.stdout
    assert newest(tmp_path / "interval" / "checkpoints").name == "iter_0000002"
    args = toy_args(tmp_path / "time", flags, "--iterations-to-skip 0 --exit-duration-in-mins 45")
    run = fork_training(args, 2, program=late_on_rank_one).check()
    assert "exiting program after 45 minutes at iteration 1" in run.stdout
    assert newest(tmp_path / "time" / "checkpoints").name == "iter_0000001"


@pytest.mark.parametrize("examination", [pytest.param("", marks=pytest.mark.long), "--rerun-mode disabled"])
def test_a_bad_weight_is_undone_by_going_back(examination: str, clean: ForkedRun, tmp_path: Path) -> None:
    faults = Faults(bad_weight_at=19, drifting_parameter="decoder.layers.0.mlp.linear_fc1.weight")
    run = fork_training(toy_args(tmp_path, WATCH, "--spike-policy rewind", examination), 1, faults).check()
    assert "weights: weights are NaN or Inf: decoder.layers.0.mlp.linear_fc1.weight on rank 0: 1 of" in run.stdout
    assert left_out(tmp_path) == []
    assert exact_figures(run.iterations()) == exact_figures(clean.iterations())


@pytest.mark.long
def test_going_back_counts_for_the_whole_run(tmp_path: Path) -> None:
    args = toy_args(tmp_path, WATCH, "--spike-policy rewind --max-spikes 1")
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    fork_training([*args, "--exit-interval", "12"], 1, Faults(bad_weight_at=19, drifting_parameter=name)).check()
    resumed = fork_training([*args, "--save-interval", "1"], 1, Faults(bad_weight_at=3, drifting_parameter=name))
    assert resumed.statuses == (1,)
    assert "--max-spikes 1 is reached" in resumed.errors[0]


def grown_at_once(argv: Sequence[str], faults: Faults) -> int:
    """Train where all matrices become five times as large before the 19th micro-batch, as an update may make them."""
    forward, numbers = pretrain_gpt.forward_step, itertools.count(1)

    def grown(batch: Batch, model: Model, hidden: torch.Tensor | None) -> ChunkResult:
        if next(numbers) == 19:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(5.0)
        return forward(batch, model, hidden)

    pretrain_gpt.forward_step = grown
    return run_with_faults(argv, faults)


@pytest.mark.parametrize("policy", ["stop", pytest.param("rewind", marks=pytest.mark.long)])
def test_a_model_to_which_all_samples_look_wrong_is_no_fault_of_a_device(policy: str, tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, WATCH, f"--spike-policy {policy}"), 1, program=grown_at_once)
    found = (
        "training: the same step gave the same result again, and other samples also give a wrong result, and the "
        "results of every rank"
    )
    if policy == "stop":
        assert run.statuses == (1,)
        assert found in run.errors[0]
        assert "device of" not in run.errors[0]
        return
    run.check()
    assert found in run.stdout
    assert left_out(tmp_path) == [(32, 36, []), (36, 40, [])]
    assert skipped(run) == [9, 10]
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("WARNING: iteration 10: ")]
    assert line.endswith("; consumed samples 32 to 36 and 36 to 40 are skipped")
    reason = "are skipped: its update preceded iteration 10, for which the finding is: the same step gave"
    assert f"iteration 9: consumed samples 32 to 36 {reason}" in run.stdout


@pytest.mark.long
def test_what_is_left_out_with_the_step_before_is_within_the_budget(tmp_path: Path) -> None:
    few = toy_args(tmp_path / "few", WATCH, "--spike-policy rewind --max-spikes 1")
    run = fork_training(few, 1, program=grown_at_once)
    assert run.statuses == (1,)
    assert "; 2 more steps would be skipped, but --max-spikes 1 allows 1" in run.errors[0]
    assert "are skipped" not in run.stdout
    enough = toy_args(tmp_path / "enough", WATCH, "--spike-policy rewind --max-spikes 2")
    fork_training(enough, 1, program=grown_at_once).check()
    assert left_out(tmp_path / "enough") == [(32, 36, []), (36, 40, [])]


def wrong_with_these_weights(argv: Sequence[str], faults: Faults, *, is_steep: bool = False) -> int:
    """Train where all samples' losses are eight times as large with the weights of the 19th micro-batch.

    The weights of float16, changed here, would be written anew from the main parameters. Where it is steep, the
    gradients of other samples than those of iteration 10, which is computed twice, are 2**20 times as large.
    """
    forward, numbers = pretrain_gpt.forward_step, itertools.count(1)
    wrong: list[torch.Tensor] = []

    def spoiled(batch: Batch, model: Model, hidden: torch.Tensor | None) -> ChunkResult:
        loss, number = forward(batch, model, hidden), next(numbers)
        assert isinstance(loss, MicrobatchLoss)
        if number == 19:
            wrong.extend(parameter.detach().clone() for parameter in model.parameters())
        if number < 19 or not all(map(torch.equal, wrong, model.parameters())):
            return loss
        much = loss.loss_sum * (2.0**20 if is_steep and number > 22 else 0.0)
        return dataclasses.replace(loss, loss_sum=8.0 * loss.loss_sum + much - much.detach())

    pretrain_gpt.forward_step = spoiled
    return run_with_faults(argv, faults)


def steep_with_these_weights(argv: Sequence[str], faults: Faults) -> int:
    """Train with other samples that overflow where those of iteration 10 do not."""
    return wrong_with_these_weights(argv, faults, is_steep=True)


FLOAT16 = "--fp16 --initial-loss-scale 64 --loss-scale-window 1000"


@pytest.mark.long
def test_the_step_before_is_the_last_whose_update_was_made(tmp_path: Path) -> None:
    # Iteration 9 overflows and is skipped: what the weights of iteration 10 came from is iteration 8.
    args = toy_args(tmp_path, WATCH, FLOAT16, "--spike-policy rewind")
    run = fork_training(args, 1, Faults(nan_loss_at=(17,)), program=wrong_with_these_weights).check()
    assert "training: the same step gave the same result again" in run.stdout
    assert left_out(tmp_path) == [(28, 32, []), (36, 40, [])]


@pytest.mark.long
def test_other_samples_that_overflow_at_the_loss_scale_of_a_spike_are_no_overflow(tmp_path: Path) -> None:
    args = toy_args(tmp_path, WATCH, FLOAT16, "--spike-policy stop")
    run = fork_training(args, 1, program=steep_with_these_weights)
    assert run.statuses == (1,)
    (line,) = [line for line in run.errors[0].splitlines() if line.startswith("error: ")]
    assert "is a spike" in line
    assert "training: the same step gave the same result again, and other samples also give a wrong result" in line
    assert "overflow" not in line


def infinite_at_first(argv: Sequence[str], faults: Faults) -> int:
    """Train where the loss that the third micro-batch tells is infinite, and its gradient is not."""
    forward, numbers = pretrain_gpt.forward_step, itertools.count(1)

    def spoiled(*args: Any) -> ChunkResult:
        loss = forward(*args)
        assert isinstance(loss, MicrobatchLoss)
        return dataclasses.replace(loss, loss_sum=loss.loss_sum + math.inf) if next(numbers) == 3 else loss

    pretrain_gpt.forward_step = spoiled
    return run_with_faults(argv, faults)


def test_an_infinite_loss_with_finite_gradients_is_looked_at(tmp_path: Path) -> None:
    args = toy_args(tmp_path, WATCH, "--spike-policy skip --train-iters 5", save=False)
    run = fork_training(args, 1, program=infinite_at_first).check()
    assert "WARNING: iteration 2: the loss is inf" in run.stdout
    assert all(line["lm_loss"] for line in run.iterations())
    assert skipped(run) == []


@pytest.mark.long
def test_a_run_goes_back_to_what_it_has_saved_itself(tmp_path: Path) -> None:
    clean = fork_training(toy_args(tmp_path / "clean", PLAIN, "--iterations-to-skip 9")).check()
    assert newest_known(tmp_path / "clean" / "checkpoints") == 12
    for name, beginning in {"anew": "", "older": "--ckpt-step 4"}.items():
        folder = tmp_path / name / "checkpoints"
        shutil.copytree(tmp_path / "clean", tmp_path / name)
        args = toy_args(tmp_path / name, WATCH, "--spike-policy rewind", beginning)
        if not beginning:
            place = args.index("--load")
            args = args[:place] + args[place + 2 :]
        run = fork_training(args, 1, POISON).check()
        assert f"loading checkpoint from {folder} at iteration 4" in run.stdout
        assert exact_figures(run.iterations()) == exact_figures(clean.iterations())


def test_a_budget_that_is_used_up_ends_the_run(tmp_path: Path) -> None:
    faults = Faults(poisoned=(BAD_SAMPLE, 45), poison=100.0)
    run = fork_training(toy_args(tmp_path, WATCH, "--spike-policy skip --max-spikes 1"), 1, faults)
    assert run.statuses == (1,)
    assert "iteration 12: " in run.errors[0]
    assert "--max-spikes 1 is reached" in run.errors[0]


def test_a_transient_fault_is_computed_again_and_leaves_no_trace(tmp_path: Path) -> None:
    args = toy_args(tmp_path, WATCH, "--spike-policy skip --tensor-model-parallel-size 2")
    run = fork_training(args, 2, Faults(rank=1, nan_loss_at=(11,))).check()
    clean = fork_training(toy_args(tmp_path / "clean", PLAIN, "--tensor-model-parallel-size 2"), 2).check()
    assert "transient device: the same step gave a different result" in run.stdout
    assert "the device of rank 1 on " in run.stdout
    assert exact_figures(run.iterations()) == exact_figures(clean.iterations())


@pytest.mark.long
def test_a_right_result_that_was_suspected_is_taken(clean: ForkedRun, tmp_path: Path) -> None:
    flags = f"{PLAIN} --error-injection-rate 3 --error-injection-type correct_result"
    run = fork_training(toy_args(tmp_path, flags)).check()
    assert "right: the same step gave the same result again" in run.stdout
    assert exact_figures(run.iterations()) == exact_figures(clean.iterations())


def test_every_step_computed_twice_changes_nothing_and_is_reported(clean: ForkedRun, tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, PLAIN, "--rerun-mode report_stats --log-interval 7")).check()
    lines = [line for line in run.stdout.splitlines() if "steps computed twice" in line]
    assert (
        lines
        == [
            " 7 steps computed twice | largest relative difference of the loss: 0.000E+00 | of the gradient norm: "
            "0.000E+00 |"
        ]
        * 2
    )
    assert exact_figures(run.iterations()) == exact_figures(clean.iterations())


def test_retention_keeps_a_checkpoint_known_to_train(tmp_path: Path) -> None:
    # A weight goes bad in iteration 9; float16 would have saved nothing but that from then on.
    faults = Faults(bad_weight_at=17, drifting_parameter="decoder.final_layernorm.weight")
    args = toy_args(tmp_path, PLAIN, "--save-interval 1 --keep-last 1 --checkpoint-validation-steps 3")
    run = fork_training(args, 1, faults)
    assert run.statuses == (1,)
    folder = tmp_path / "checkpoints"
    assert newest(folder).name == "iter_0000008"
    assert newest_known(folder) == 5
    # The one between may become known next.
    assert [path.name[-1] for path in sorted(folder.glob("iter_*"))] == ["5", "7", "8"]


def test_a_checkpoint_that_is_not_finite_is_passed_over(tmp_path: Path) -> None:
    args = toy_args(tmp_path, PLAIN)
    fork_training([*args, "--exit-interval", "8"]).check()
    shard = sorted((tmp_path / "checkpoints" / "iter_0000008").glob("*.safetensors"))[0]
    spoil_a_weight(shard)
    run = fork_training([*args, "--no-verify-checkpoint"]).check()
    assert "iter_0000008 is damaged (checkpoint" in run.stdout
    assert "contains values that are not finite, in " in run.stdout
    assert run.iterations()[-1]["iteration"] == 14
    named = fork_training([*args, "--no-verify-checkpoint", "--ckpt-step", "8"])
    assert named.statuses == (0,) or "not finite" in named.errors[0]


def spoil_a_weight(shard: Path) -> None:
    """Write a NaN over the first value of the file's data."""
    content = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start : start + 4] = np.array([np.nan], np.float32).tobytes()
    shard.write_bytes(bytes(content))


@pytest.mark.long
def test_three_poisoned_samples_cost_next_to_nothing(tmp_path: Path) -> None:
    flags = (
        "--train-iters 400 --lr-decay-iters 400 --save-interval 20 --eval-interval 400 --eval-iters 20 --keep-last 2"
    )
    clean = fork_training(toy_args(tmp_path / "clean", flags), timeout_s=600.0).check()
    bad = (403, 802, 1201)
    faults = Faults(poisoned=bad, poison=100.0)
    run = fork_training(
        toy_args(tmp_path / "healed", flags, "--spike-policy rewind"), 1, faults, timeout_s=600.0
    ).check()
    assert [samples for _, _, samples in left_out(tmp_path / "healed")] == [[sample] for sample in bad]
    ours, expected = (each.evaluations("validation")[-1]["lm_loss"] for each in (run, clean))
    print(f"final validation loss {ours:.6f}, clean {expected:.6f}: {100 * (ours / expected - 1):+.3f} %")
    assert ours == pytest.approx(expected, rel=0.005)
