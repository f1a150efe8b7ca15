"""NVFP4 at some layouts against one process, with recomputation, and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.training.float8_runs import SHAPE, Float8Runs, losses
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, newest, toy_args
from tests.harness.forked_training import fork_training

NVFP4 = "--fp4-format e2m1"
SAME = [
    (2, "--pipeline-model-parallel-size 2"),
    (2, "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
    (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    (1, "--recompute-granularity selective --recompute-modules core_attn layernorm mlp"),
]
"""Layouts and recomputation in which every GEMM has the operands of one process, and gradients the same keys."""
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel --hidden-size 64"
TOLERANCE = 3e-3


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Float8Runs:
    return Float8Runs(tmp_path_factory.mktemp("nvfp4"), NVFP4)


@pytest.mark.default(1)
@pytest.mark.parametrize(("num_processes", "flags"), SAME)
def test_layouts_and_recomputation_give_the_same_bits(train: Float8Runs, num_processes: int, flags: str) -> None:
    reference, _ = train("")
    run, _ = train(flags, num_processes)
    assert losses(run) == losses(reference)


@pytest.mark.default(1)
def test_sequence_parallelism_agrees_within_roundings(train: Float8Runs) -> None:
    reference, _ = train("--hidden-size 64")
    run, _ = train(TP_SP, 2)
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE)
    recomputed, _ = train(f"{TP_SP} --recompute-granularity selective --recompute-modules layernorm", 2)
    assert losses(recomputed) == losses(run)


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "flags", ["--no-fp8-wgrad", "--first-last-layers-bf16 --num-layers-at-end-in-bf16 0", "--seed 7"]
)
def test_each_choice_changes_what_is_computed(train: Float8Runs, flags: str) -> None:
    reference, _ = train("")
    run, _ = train(flags)
    assert losses(run) != losses(reference)


@pytest.mark.full
def test_a_resumed_run_is_the_run_that_went_on(tmp_path: Path, train: Float8Runs) -> None:
    whole, checkpoints = train("")
    words = toy_args(tmp_path, SHAPE, NVFP4)
    fork_training([*words, "--exit-interval", "3"]).check()
    second = fork_training(words).check()
    assert exact_figures(second.iterations()) == exact_figures(whole.iterations())
    assert_same_checkpoints(newest(tmp_path / "checkpoints"), newest(checkpoints))
