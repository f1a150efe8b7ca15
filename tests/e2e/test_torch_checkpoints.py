"""Runs that save with --ckpt-format torch go on from their own files at any layout, as if nothing had happened."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.toy_run import exact_figures, leftovers, toy_args
from tests.harness.forked_training import ForkedRun, fork_training

TOLERANCE = 1e-5
FLAGS = "--num-layers 4 --train-iters 8 --ckpt-format torch --save-interval 4 --eval-interval 1000"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LAYOUTS = {
    "tp2-pp2-vpp2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ForkedRun:
    folder = tmp_path_factory.mktemp("whole")
    return fork_training(toy_args(folder, FLAGS, NO_DROPOUT)).check()


def rank_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))


@pytest.mark.long
def test_resume_at_the_same_layout_is_exact_with_dropout(tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 --async-save"
    whole = fork_training(toy_args(tmp_path / "whole", FLAGS, layout), 4).check()
    folder = tmp_path / "parts"
    fork_training(toy_args(folder, FLAGS, layout, "--exit-interval 4"), 4).check()
    names = ("distrib_optim", "model_optim_rng")
    files = [f"iter_0000004/mp_rank_{rank}/{name}.pt" for rank in ("00", "01") for name in names]
    assert rank_files(folder / "checkpoints") == files
    resumed = fork_training(toy_args(folder, FLAGS, layout), 4).check()
    assert exact_figures(resumed.iterations()) == exact_figures(whole.iterations())
    for path in rank_files(folder / "checkpoints"):
        ours, theirs = ((run / "checkpoints" / path).read_bytes() for run in (folder, tmp_path / "whole"))
        assert ours == theirs, path
    assert leftovers(folder / "checkpoints") == []


@pytest.mark.parametrize("name", ["tp2-pp2-vpp2", pytest.param("dp2-distributed-optimizer", marks=pytest.mark.long)])
def test_any_layout_goes_on_from_any_other(name: str, whole: ForkedRun, tmp_path: Path) -> None:
    processes, layout = LAYOUTS[name]
    first = toy_args(tmp_path, FLAGS, NO_DROPOUT, layout, "--exit-interval 4")
    fork_training(first, processes).check()
    back = fork_training(toy_args(tmp_path, FLAGS, NO_DROPOUT)).check()
    compare(back, whole)


@pytest.mark.long
def test_ranks_that_share_a_key_value_group(tmp_path: Path) -> None:
    groups = "--group-query-attention --num-query-groups 2"
    whole = fork_training(toy_args(tmp_path / "whole", FLAGS, NO_DROPOUT, groups)).check()
    layout = f"--tensor-model-parallel-size 4 {groups}"
    fork_training(toy_args(tmp_path / "parts", FLAGS, NO_DROPOUT, layout, "--exit-interval 4"), 4).check()
    compare(fork_training(toy_args(tmp_path / "parts", FLAGS, NO_DROPOUT, groups)).check(), whole)


def compare(run: ForkedRun, whole: ForkedRun) -> None:
    lines: list[dict[str, Any]] = run.iterations()
    assert [line["iteration"] for line in lines] == list(range(1, 9))
    for ours, theirs in zip(lines, whole.iterations(), strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=TOLERANCE, abs=0.0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE, abs=0.0)
        assert ours["sample_ids_hash"] == theirs["sample_ids_hash"]


class Malicious:
    """Pickle as a command that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_bad_files_are_refused_by_name_and_never_run(tmp_path: Path) -> None:
    fork_training(toy_args(tmp_path, FLAGS, "--train-iters 4")).check()
    folder = tmp_path / "checkpoints"
    path = folder / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt"
    kept = path.read_bytes()

    def refusal(*more: str) -> str:
        run = fork_training(toy_args(tmp_path, FLAGS, *more))
        assert run.statuses == (2,), run.outputs
        assert "Traceback" not in run.errors[0]
        return run.errors[0]

    flipped = bytearray(kept)
    flipped[4000] ^= 1
    path.write_bytes(flipped)
    assert f"{path}: the bytes of storage" in refusal()
    path.write_bytes(kept[: len(kept) // 2])
    assert f"{path}: not a whole file" in refusal()
    path.write_bytes(kept)
    assert "num_layers: 4 -> 2" in refusal("--num-layers 2")
    assert "is of another tokenizer" in refusal("--vocab-size 300")

    values = torch.load(path, weights_only=False)
    del values["model"]["decoder.layers.2.mlp.linear_fc1.bias"]
    torch.save(values, path)
    assert "decoder.layers.2.mlp.linear_fc1.bias" in refusal()
    values["model"]["extra"] = Malicious(tmp_path / "mark")
    torch.save(values, path)
    assert f"{path}: the file asks for posix.mkdir" in refusal()
    assert not (tmp_path / "mark").exists()
    shutil.rmtree(path.parent)
    assert refusal()


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    fork_training(toy_args(tmp_path, FLAGS, "--save-interval 2 --keep-last 2")).check()
    found = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert found == ["iter_0000006", "iter_0000008"]


@pytest.mark.long
@pytest.mark.parametrize("gathers", ["", "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"])
def test_files_of_different_iterations_are_refused(gathers: str, tmp_path: Path) -> None:
    """Weights of one iteration do not pass for those of a near one, rounded in fp8."""
    flags = f"--ckpt-format torch --bf16 --use-distributed-optimizer --train-iters 4 --save-interval 2 {gathers}"
    args = toy_args(
        tmp_path,
        flags,
        "--ffn-hidden-size 128 --eval-interval 100 --eval-iters 0 --lr-warmup-iters 0 --lr-decay-iters 20",
    )
    fork_training(args, 2).check()
    folder = tmp_path / "checkpoints"
    (first,), (second,) = (sorted(folder.glob(f"iter_000000{number}/*/distrib_optim.pt")) for number in (2, 4))
    whole = fork_training([*args, "--ckpt-step", "2", "--exit-interval", "3"], 2).check()
    assert [line["iteration"] for line in whole.iterations()][-1] == 3
    shutil.copy(second, first)
    torn = fork_training([*args, "--ckpt-step", "2", "--exit-interval", "3"], 2)
    assert set(torn.statuses) != {0}
    assert "do not lie as Megatron lays out" in torn.errors[0]
