"""A run goes on in another precision than its checkpoint's, by way of the main parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.native import NativeSource
from tests.e2e.toy_run import newest, toy_args
from tests.harness.forked_training import fork_training

FLAGS = "--lr-decay-iters 40 --train-iters 6 --eval-interval 1000"
PRECISIONS = {"float32": "", "bfloat16": "--bf16", "float16": "--fp16 --initial-loss-scale 1024"}
MAIN = "optimizer.main_param."
CHANGES = [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a run of 4 iterations in each precision."""
    folders = {}
    for name, flags in PRECISIONS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        fork_training(toy_args(folders[name], FLAGS, flags, "--exit-interval 4")).check()
    return folders


def main_params(source: NativeSource) -> dict[str, torch.Tensor]:
    """Return the float32 value of every parameter, wherever it is."""
    names = [name.removeprefix("model.") for name in source.tensors if name.startswith("model.")]
    return {n: source.read(MAIN + n if MAIN + n in source.tensors else f"model.{n}") for n in names}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(old, new, marks=[pytest.mark.long] * ((old, new) not in CHANGES))
        for old in PRECISIONS
        for new in PRECISIONS
    ],
)
def test_every_precision_goes_on_in_every_other(old: str, new: str, saved: dict[str, Path], tmp_path: Path) -> None:
    nproc = 2 if new == "bfloat16" else 1
    sharded = "--use-distributed-optimizer" if nproc == 2 else ""
    words = toy_args(tmp_path, FLAGS, PRECISIONS[new], sharded, "--exit-interval 5 --save-interval 5")
    words += ["--load", str(saved[old] / "checkpoints")]
    run = fork_training(words, nproc).check()
    assert [line["iteration"] for line in run.iterations()] == [5]
    assert run.iterations()[0]["skipped"] == 0
    said = [line for line in run.stdout.splitlines() if line.startswith("precision: ")]
    assert len(said) == (old != new)
    if old != new:
        assert f"weights are {old}, this run's {new}" in said[0]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_main_parameters_and_moments_are_the_same_bits(
    old: str, new: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    # An iteration at a learning rate of 0 moves nothing; moments do move.
    still = "--lr 1e-30 --min-lr 0 --weight-decay 0 --override-opt-param-scheduler --exit-interval 5"
    words = toy_args(tmp_path, FLAGS, PRECISIONS[new], still)
    fork_training([*words, "--load", str(saved[old] / "checkpoints")]).check()
    before, after = (NativeSource(newest(folder / "checkpoints")) for folder in (saved[old], tmp_path))
    theirs = main_params(before)
    for name, values in main_params(after).items():
        assert torch.equal(values, theirs[name]), name
        weight = after.read(f"model.{name}")
        assert torch.equal(weight, values.to(weight.dtype)), name
    before.close()
    after.close()


def test_an_optimizer_that_cannot_fit_is_one_line(saved: dict[str, Path], tmp_path: Path) -> None:
    words = toy_args(tmp_path, FLAGS, "--bf16 --optimizer sgd", "--load", saved["bfloat16"] / "checkpoints")
    run = fork_training(words)
    assert run.statuses == (2,)
    (line,) = run.errors[0].splitlines()
    assert "does not fit this run: " in line
    assert "unexpected in the checkpoint: optimizer.exp_avg." in line
    assert line.endswith(" more")
