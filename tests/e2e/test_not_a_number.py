"""A gradient that is not a number stops a run or skips an iteration, and never reaches a weight."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

import pretrain_gpt
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.main_grad import MainGrad
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss
from tests.e2e.toy_run import newest, toy_args
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import ForkedRun, fork_training

FP16 = "--fp16 --initial-loss-scale 64 --loss-scale-window 1000"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2"


def sample_ids_of(run: ForkedRun) -> list[int]:
    found = re.search(r"sample ids ([\d, ]+)", run.errors[0])
    assert found, run.errors[0]
    return [int(number) for number in found.group(1).split(",")]


@pytest.mark.parametrize(
    ("num_processes", "layout", "rank"),
    [
        pytest.param(1, "", 0, marks=pytest.mark.long),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16", 1),
        pytest.param(2, "--bf16", 1, marks=pytest.mark.long),
    ],
    ids=["fp32", "bf16-tp2-sp", "bf16-dp2"],
)
def test_a_bad_gradient_stops_the_run_and_is_named(num_processes: int, layout: str, rank: int, tmp_path: Path) -> None:
    # Iteration 6 begins with micro-batch 11 of two an iteration, or 6 of one.
    microbatch = 6 if num_processes == 2 and "tensor" not in layout else 11
    name = "decoder.layers.1.input_layernorm.weight"
    faults = Faults(rank=rank, nan_gradient_at=microbatch, nan_parameter=name)
    args = toy_args(tmp_path, layout, "--save-interval 1 --keep-last 2")
    run = fork_training(args, num_processes, faults)
    assert set(run.statuses) == {1}
    lines = [line for line in run.errors[0].splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "Traceback" not in "".join(run.errors)
    assert name in lines[0]
    assert f"rank {rank}" in lines[0]
    assert "iteration 6" in lines[0]
    assert len(sample_ids_of(run)) == 4
    assert run.iterations()[-1]["iteration"] == 5
    assert newest(tmp_path / "checkpoints").name == "iter_0000005"
    resumed = fork_training(args, num_processes).check()
    assert [line["iteration"] for line in resumed.iterations()] == list(range(1, 21))
    assert all(np.isfinite(line["lm_loss"]) for line in resumed.iterations())


OF_FC2 = (32, 128)
"""Shape of the weights of the second layers of MLPs; no other weight has it."""


def spoil_large_gradients(argv: Sequence[str], faults: Faults, microbatches: Container[int]) -> int:
    """Train with a rank that computes NaN for weight gradients in some of its micro-batches.

    No gradient is small enough for its norm to be recorded in every step.
    """
    forward, numbers = pretrain_gpt.forward_step, itertools.count(1)
    write, is_broken = MainGrad._add_matmul_now, False

    def counted(*args: Any) -> ChunkResult:
        nonlocal is_broken
        is_broken = next(numbers) in microbatches and dist.get_rank() == faults.rank
        return forward(*args)

    def spoiled(main_grad: MainGrad, left: torch.Tensor, *others: Any) -> None:
        is_bad = is_broken and main_grad.tensor.shape == OF_FC2
        write(main_grad, left * math.nan if is_bad else left, *others)

    pretrain_gpt.forward_step, MainGrad._add_matmul_now = counted, spoiled  # type: ignore[assignment]
    param_and_grad_buffer._LARGEST_SMALL = 0
    return run_with_faults(argv, faults)


@pytest.mark.parametrize(
    ("microbatches", "found"),
    [
        # The norms of its first computation are unknown.
        ((6,), "transient device: .*: the device of a rank that cannot be distinguished from the others"),
        (range(6, 10**6), "persistent device: .*: the device of rank 1 on "),
    ],
)
def test_a_rank_with_a_bad_large_gradient_is_named_if_it_is_bad_again(
    microbatches: Container[int], found: str, tmp_path: Path
) -> None:
    program = functools.partial(spoil_large_gradients, microbatches=microbatches)
    run = fork_training(toy_args(tmp_path), 2, Faults(rank=1), program=program)
    assert set(run.statuses) == {1}
    (line,) = [line for line in run.errors[0].splitlines() if line.startswith("error: iteration 6: ")]
    names = "decoder.layers.1.mlp.linear_fc2.weight, decoder.layers.0.mlp.linear_fc2.weight"
    assert f"; not finite after the reduction, rank unknown: {names}; no parameter was changed" in line
    assert re.search(found, line), line


def test_a_bad_loss_stops_the_run(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--bf16"), 1, Faults(nan_loss_at=(7,)))
    assert run.statuses == (1,)
    assert "rank 0: decoder." in run.errors[0]
    assert "iteration 4" in run.errors[0]


@pytest.mark.parametrize(
    ("num_processes", "layout"),
    [
        pytest.param(1, "", marks=pytest.mark.long),
        (2, "--tensor-model-parallel-size 2"),
        pytest.param(2, "", marks=pytest.mark.long),
    ],
    ids=["one-process", "tp2", "dp2"],
)
def test_fp16_skips_counts_and_halves_the_scale(num_processes: int, layout: str, tmp_path: Path) -> None:
    # Iterations 4 and 5: with a hysteresis of 2 the second one halves the scale, and iteration 9 halves it again.
    first = [7, 9, 17] if layout or num_processes == 1 else [4, 5, 9]
    faults = Faults(rank=num_processes - 1, nan_loss_at=tuple(first))
    args = toy_args(tmp_path, layout, FP16, "--log-interval 5")
    run = fork_training(args, num_processes, faults).check()
    skipped = [line["iteration"] for line in run.iterations() if line["skipped"]]
    assert skipped == [4, 5, 9]
    scales = [line["loss_scale"] for line in run.iterations()]
    assert scales == [64.0] * 5 + [32.0] * 4 + [16.0] * 11
    assert [line["consumed_samples"] for line in run.iterations()] == list(range(4, 84, 4))
    counts = re.findall(r"number of skipped iterations: +(\d+) \|", run.stdout)
    # The line of the first iteration, and one for each five.
    assert counts == ["0", "2", "1", "0", "0"]
    # As in Megatron, the line has the scale that the next iteration takes.
    assert re.findall(r"loss scale: (\S+) \|", run.stdout) == ["64.0", "32.0", "16.0", "16.0", "16.0"]
    assert all(np.isfinite(line["lm_loss"]) for line in run.iterations() if not line["skipped"])
    for shard in newest(tmp_path / "checkpoints").glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            assert np.isfinite(tensor.astype(np.float64)).all() if tensor.dtype.kind == "f" else True, name


def test_a_skipped_iteration_does_not_advance_the_schedule(tmp_path: Path) -> None:
    # As in a user's log: iteration 20 of 200, 15 skipped, leaves 1.5e-4 * 5 / 3200 for the next iteration.
    every = tuple(range(1, 16))
    args = toy_args(
        tmp_path,
        FP16,
        "--train-iters 200 --exit-interval 20 --global-batch-size 2 --log-interval 20 --lr 1.5e-4 --min-lr 1e-5",
        "--lr-decay-iters 320000 --lr-warmup-iters 3200 --initial-loss-scale 1048576",
    )
    run = fork_training(args, 1, Faults(nan_loss_at=every)).check()
    iterations = run.iterations()
    assert [line["skipped"] for line in iterations] == [True] * 15 + [False] * 5
    line = next(line for line in run.stdout.splitlines() if "iteration       20/" in line)
    assert " learning rate: 2.343750E-07 |" in line
    assert " number of skipped iterations:  15 |" in line
    assert " consumed samples:           40 |" in line
    assert iterations[15]["learning_rate"] == 0.0
    assert iterations[19]["learning_rate"] == pytest.approx(1.5e-4 * 4 / 3200)


@pytest.mark.parametrize(
    ("num_processes", "flags", "found"),
    [
        (1, "--fp16 --initial-loss-scale 1e8 --min-loss-scale 1e8 --hysteresis 1", "overflow: "),
        pytest.param(
            2,
            "--tensor-model-parallel-size 2 --fp16 --initial-loss-scale 4e8 --min-loss-scale 1e8",
            "overflow: ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            1,
            "--fp16 --loss-scale 1e9 --max-consecutive-skipped-iterations 3",
            "overflow: ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            2,
            "--fp16 --initial-loss-scale 1e8 --min-loss-scale 1e8 --spike-policy rewind --save-interval 9",
            "overflow: ",
            marks=pytest.mark.long,
        ),
        *(
            pytest.param(
                num_processes,
                "--lr 1e22 --lr-warmup-iters 0",
                "weights have become too large: embedding.word_embeddings.weight on rank",
                marks=pytest.mark.long,
            )
            for num_processes in (1, 2)
        ),
    ],
)
def test_what_is_too_large_is_no_fault_of_a_device(num_processes: int, flags: str, found: str, tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, flags), num_processes)
    assert set(run.statuses) == {1}
    (line,) = [line for line in run.errors[0].splitlines() if line.startswith("error: ")]
    assert found in line
    assert "device of" not in line
    if "--fp16" in flags:
        assert re.search(r"the same result again at the loss scale 1e\+0[89], and a finite one at [\d.]+:", line), line


def nan_from_the_first(argv: Sequence[str], faults: Faults) -> int:
    """Train with a loss that is never a number, on any rank."""
    forward = pretrain_gpt.forward_step

    def spoiled(*args: Any) -> ChunkResult:
        loss = forward(*args)
        assert isinstance(loss, MicrobatchLoss)
        return dataclasses.replace(loss, loss_sum=loss.loss_sum * math.nan)

    pretrain_gpt.forward_step = spoiled
    return run_with_faults(argv, faults)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_processes", "flags", "found"),
    [
        (1, "", "no step of this process was fine before: the model, its loss or the device of rank 0"),
        (2, "", "2 data-parallel replicas give the same result, so no device is at fault"),
        # Both ranks use both ranks' experts: one device can spoil both copies.
        (2, EXPERTS, "no step of this process was fine before: the model, its loss or the device of one of rank 0"),
        (4, EXPERTS, "2 data-parallel replicas give the same result, so no device is at fault"),
    ],
)
def test_a_loss_that_never_is_a_number_is_the_training(
    num_processes: int, flags: str, found: str, tmp_path: Path
) -> None:
    run = fork_training(toy_args(tmp_path, flags, "--global-batch-size 8"), num_processes, program=nan_from_the_first)
    assert set(run.statuses) == {1}
    assert (
        "training: the same step gave the same result again, and other samples also give a wrong result, and "
    ) in run.errors[0]
    assert found in run.errors[0]
