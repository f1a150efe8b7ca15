"""Runs with weights sharded over the data-parallel ranks: the same numbers, and checkpoints that go to and fro."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.native import NativeSource
from megatron.core.sharding import Box
from tests.e2e.toy_run import exact_figures, newest, toy_args
from tests.harness.forked_training import ForkedRun, fork_training

WEIGHTS = "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce"
# The norm that clips is summed bucket by bucket, and these have other buckets.
SAME_BITS = "--clip-grad 0 --train-iters 6 --lr-warmup-iters 2 --eval-interval 3 --micro-batch-size 1"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint."""
    source = NativeSource(newest(folder / "checkpoints"))
    return {
        name: source.read(name, Box((0,) * len(info.global_shape), info.global_shape))
        for name, info in source.tensors.items()
        if not name.startswith("rng.")
    }


def losses(run: ForkedRun) -> list[object]:
    return [(line[0], line[1], line[3]) for line in exact_figures(run.metrics)]


@pytest.mark.parametrize("precision", [pytest.param("", marks=pytest.mark.long, id="fp32"), "--bf16"])
def test_checkpoints_go_on_with_and_without_sharded_weights(precision: str, tmp_path: Path) -> None:
    """The losses and the whole state are the same bits, wherever weights were sharded before and after a stop."""
    flags = (SAME_BITS, precision)
    gradients = "--data-parallel-sharding-strategy optim_grads"
    whole = fork_training(toy_args(tmp_path / "whole", *flags, gradients), 2).check()
    expected = state_of(tmp_path / "whole")
    for name, first, second in (("to", gradients, WEIGHTS), ("fro", WEIGHTS, gradients)):
        folder = tmp_path / name
        fork_training(toy_args(folder, *flags, first, "--exit-interval 3"), 2).check()
        resumed = fork_training(toy_args(folder, *flags, second), 2).check()
        assert losses(resumed) == losses(whole)
        found = state_of(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_megatrons_formats_hold_sharded_weights(form: str, tmp_path: Path) -> None:
    flags = (SAME_BITS, f"--ckpt-format {form} --tensor-model-parallel-size 2")
    whole = fork_training(toy_args(tmp_path / "whole", *flags), 2).check()
    fork_training(toy_args(tmp_path, *flags, WEIGHTS, "--exit-interval 3"), 4).check()
    resumed = fork_training(toy_args(tmp_path, *flags, "--train-iters 6"), 2).check()
    ours, theirs = losses(resumed)[-1], losses(whole)[-1]
    assert ours[2] == pytest.approx(theirs[2], rel=1e-5)  # type: ignore[index]
