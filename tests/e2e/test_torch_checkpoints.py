"""Runs that save with --ckpt-format torch or torch_dist go on from their own files at any layout."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.comparison import compare_sources
from megatron.checkpoint.stored_checkpoint import open_checkpoint
from tests.e2e.toy_run import exact_figures, leftovers, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import ForkedRun, fork_training
from tests.harness.torch_loader import assert_torch_reads, read_with_torch

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


HYBRID = {
    "mamba": (
        "--hybrid-override-pattern M-*M --mamba-state-dim 6 --mamba-head-dim 8 --mamba-num-groups 2 "
        "--mamba-num-heads 4 --normalization RMSNorm --disable-bias-linear"
    ),
    "gated-delta-net": (
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 6 "
        "--linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4 --normalization RMSNorm "
        "--swiglu --disable-bias-linear"
    ),
}


@pytest.mark.parametrize(
    ("kind", "ckpt_format"),
    [
        ("mamba", "torch"),
        pytest.param("mamba", "torch_dist", marks=pytest.mark.long),
        pytest.param("gated-delta-net", "torch", marks=pytest.mark.long),
        ("gated-delta-net", "torch_dist"),
    ],
)
def test_hybrid_models_go_on_at_another_layout(kind: str, ckpt_format: str, tmp_path: Path) -> None:
    flags = f"{FLAGS} {NO_DROPOUT} --ckpt-format {ckpt_format} {HYBRID[kind]}"
    whole = fork_training(toy_args(tmp_path / "whole", flags)).check()
    layout = (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--use-distributed-optimizer --exit-interval 4"
    )
    fork_training(toy_args(tmp_path / "parts", flags, layout), 4).check()
    compare(fork_training(toy_args(tmp_path / "parts", flags)).check(), whole)


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
    assert f"{path}: not a complete torch file" in refusal()
    path.write_bytes(kept)
    assert "num_layers: 4 -> 2" in refusal("--num-layers 2")
    assert "use the checkpoint's tokenizer" in refusal("--vocab-size 300")

    values = torch.load(path, weights_only=False)
    del values["model"]["decoder.layers.2.mlp.linear_fc1.bias"]
    torch.save(values, path)
    assert "decoder.layers.2.mlp.linear_fc1.bias" in refusal()
    values["model"]["extra"] = Malicious(tmp_path / "mark")
    torch.save(values, path)
    assert f"{path}: the file requests posix.mkdir" in refusal()
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
    assert "does not match Megatron's layout" in torn.errors[0]


TORCH_DIST_FLAGS = "--num-layers 4 --train-iters 8 --save-interval 4 --eval-interval 1000"
SAVE = "--ckpt-format torch_dist"


@pytest.fixture(scope="module")
def whole_torch_dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForkedRun, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return fork_training(toy_args(folder, TORCH_DIST_FLAGS, NO_DROPOUT)).check(), folder / "checkpoints"


def test_resume_at_the_same_layout_is_exact_with_dropout_in_torch_dist(tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 --async-save --swiglu"
    layout += " --untie-embeddings-and-output-weights --vocab-size 129"
    layout += " --train-iters 4 --save-interval 2"
    whole = fork_training(toy_args(tmp_path / "whole", TORCH_DIST_FLAGS, SAVE, layout), 4).check()
    folder = tmp_path / "parts"
    fork_training(toy_args(folder, TORCH_DIST_FLAGS, SAVE, layout, "--exit-interval 2"), 4).check()
    found = sorted(path.name for path in newest(folder / "checkpoints").iterdir() if path.is_file())
    assert found == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "common.pt", "metadata.json"]
    resumed = fork_training(toy_args(folder, TORCH_DIST_FLAGS, SAVE, layout), 4).check()
    assert exact_figures(resumed.iterations()) == exact_figures(whole.iterations())
    assert leftovers(folder / "checkpoints") == []
    ours, theirs = (open_checkpoint(newest(run / "checkpoints")) for run in (folder, tmp_path / "whole"))
    assert all(found.is_equal for found in compare_sources(ours, theirs))
    assert (ours.common["progress"], ours.common["optimizer"]) == (
        theirs.common["progress"],
        theirs.common["optimizer"],
    )
    assert ours.tensors["model.embedding.word_embeddings.weight"].global_shape == (130, 32)
    values = read_with_torch(newest(folder / "checkpoints"))
    # 130 tokens, padded to a multiple of 8 x TP.
    for key in ("embedding.word_embeddings.weight", "optimizer.state.param.output_layer.weight"):
        assert values[key].shape == (144, 32)
        assert not values[key][130:].any()


@pytest.mark.parametrize("name", ["tp2-pp2-vpp2", pytest.param("dp2-distributed-optimizer", marks=pytest.mark.long)])
def test_any_layout_goes_on_from_any_other_in_torch_dist(
    name: str, whole_torch_dist: tuple[ForkedRun, Path], tmp_path: Path
) -> None:
    processes, layout = LAYOUTS[name]
    fork_training(
        toy_args(tmp_path, TORCH_DIST_FLAGS, SAVE, NO_DROPOUT, layout, "--exit-interval 4"), processes
    ).check()
    assert_torch_reads(newest(tmp_path / "checkpoints"))
    back = fork_training(toy_args(tmp_path, TORCH_DIST_FLAGS, NO_DROPOUT)).check()
    compare(back, whole_torch_dist[0])


def test_a_folder_saved_natively_goes_on_in_megatrons_format(
    whole_torch_dist: tuple[ForkedRun, Path], tmp_path: Path
) -> None:
    fork_training(toy_args(tmp_path, TORCH_DIST_FLAGS, NO_DROPOUT, "--exit-interval 4")).check()
    compare(
        fork_training(toy_args(tmp_path, TORCH_DIST_FLAGS, SAVE, NO_DROPOUT, "--keep-last 1")).check(),
        whole_torch_dist[0],
    )
    folders = [tmp_path / "checkpoints" / f"iter_{iteration:07d}" for iteration in (4, 8)]
    assert [(folder / "index.json").is_file() for folder in folders] == [True, False]
    ours, theirs = open_checkpoint(folders[1]), open_checkpoint(newest(whole_torch_dist[1]))
    assert all(found.is_equal for found in compare_sources(ours, theirs))


@pytest.mark.long
def test_ranks_that_share_a_key_value_group_in_torch_dist(tmp_path: Path) -> None:
    groups = "--group-query-attention --num-query-groups 2"
    whole = fork_training(toy_args(tmp_path / "whole", TORCH_DIST_FLAGS, NO_DROPOUT, groups)).check()
    layout = f"--tensor-model-parallel-size 4 {groups} --exit-interval 4"
    fork_training(toy_args(tmp_path / "parts", TORCH_DIST_FLAGS, SAVE, NO_DROPOUT, layout), 4).check()
    compare(fork_training(toy_args(tmp_path / "parts", TORCH_DIST_FLAGS, NO_DROPOUT, groups)).check(), whole)


@pytest.mark.parametrize("how", [pytest.param("", marks=pytest.mark.long), "--async-save"])
def test_a_disk_that_takes_no_more_is_said_and_leaves_what_was_there(how: str, tmp_path: Path) -> None:
    args = toy_args(tmp_path, SAVE, how, "--save-interval 2 --train-iters 8 --eval-interval 100 --micro-batch-size 4")
    run = fork_training(args, faults=Faults(no_room=(7, 100)))
    assert run.statuses == (1,)
    path = rf"{re.escape(str(tmp_path))}/checkpoints/\.iter_0000008\.\w+\.saving/__0_0\.distcp"
    message = rf"error: the last checkpoint \(iteration 8\) was not saved: cannot write {path}: File too large; "
    assert re.match(message, run.errors[0])
    assert newest(tmp_path / "checkpoints").name in ("iter_0000006", "iter_0000004" if how else "")
    assert leftovers(tmp_path / "checkpoints") == []


def test_damaged_files_fall_back_or_end_the_run_in_one_line(tmp_path: Path) -> None:
    flags = toy_args(tmp_path, TORCH_DIST_FLAGS, SAVE, "--train-iters 4 --save-interval 2")
    fork_training(flags).check()
    folder = tmp_path / "checkpoints" / "iter_0000004"
    shard, metadata = folder / "__0_0.distcp", folder / ".metadata"

    def refusal(*more: str) -> str:
        run = fork_training([*flags, "--ckpt-step", "4", *more])
        assert run.statuses == (2,), run.outputs
        (line,) = run.errors[0].strip().splitlines()
        return line

    kept = shard.read_bytes()
    flipped = bytearray(kept)
    flipped[len(kept) // 2] ^= 1
    shard.write_bytes(flipped)
    assert f"{shard}: the bytes of storage" in refusal()
    shard.write_bytes(kept[:-1000])
    assert f"{shard}: ends within" in refusal()
    shard.unlink()
    assert f"{shard}: No such file or directory" in refusal()
    shard.write_bytes(kept)
    assert "use the checkpoint's tokenizer" in refusal("--vocab-size", "300")
    metadata.write_bytes(metadata.read_bytes()[:-100])
    assert f"{metadata}: not valid checkpoint metadata" in refusal()
    metadata.unlink()
    assert f"{metadata}: No such file or directory" in refusal()
    run = fork_training(flags).check()
    assert f"WARNING: checkpoint {folder} is damaged" in run.stdout
    assert [line["iteration"] for line in run.iterations()][-2:] == [3, 4]
    assert metadata.exists()
