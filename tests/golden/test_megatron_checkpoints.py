"""Checkpoints that NVIDIA's own code saved load at every layout, go on with its losses, and are saved as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.torch_file_reader import LazyTensor, Record, StoredArray, TorchFile
from megatron.checkpoint.formats.megatron.torch_format import MegatronTorchSource, write_megatron_torch
from tests.golden.test_training_golden import FLAGS, FOLDER, TOLERANCE
from tests.harness.forked_training import fork_training

SMALL = Path(__file__).parent / "checkpoints"
CHECKPOINTS = Path(__file__).parents[2].parent / "shared" / "golden" / "checkpoints"
needs_checkpoints = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(),
    reason="the reference checkpoints (4.6 MB) are not beside the repository (../shared/golden)",
)
LAYOUTS = {
    "tp1": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
}


def arguments(load: Path, tmp_path: Path, layout: str) -> list[str | Path]:
    files = ["--data-path", FOLDER / "t_u16", "--data-cache-path", tmp_path / "cache", "--load", load]
    return [*FLAGS.split(), *files, "--metrics-jsonl", tmp_path / "metrics.jsonl", *layout.split()]


@pytest.mark.default(1)
@needs_checkpoints
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in ("tp2", "pp2"))) for name in LAYOUTS]
)
def test_training_goes_on_from_megatron_at_any_layout(name: str, tmp_path: Path) -> None:
    processes, layout = LAYOUTS[name]
    args = [*arguments(CHECKPOINTS / "gpt2_tp1", tmp_path, layout), "--ckpt-step", "5"]
    iterations = fork_training(args, processes).check().iterations()
    expected = [json.loads(line) for line in (FOLDER / "tp1.jsonl").read_text().splitlines()][5:]
    assert [line["iteration"] for line in iterations] == [6, 7, 8, 9, 10]
    for ours, theirs in zip(iterations, expected, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["loss"]["lm loss"], rel=TOLERANCE, abs=0.0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE, abs=0.0)
        assert ours["learning_rate"] == pytest.approx(theirs["lr_used"], rel=TOLERANCE, abs=0.0)


@needs_checkpoints
def test_what_goes_on_is_saved_as_megatron_saved_it(tmp_path: Path) -> None:
    args = [*arguments(CHECKPOINTS / "gpt2_tp1", tmp_path, ""), "--ckpt-step", "5"]
    fork_training([*args, "--ckpt-format", "torch", "--save", tmp_path / "saved"]).check()
    theirs = CHECKPOINTS / "gpt2_tp1" / "iter_0000010"
    # Six digits of weights that five steps of Adam have moved by a thousandth each.
    compare_folders(theirs, tmp_path / "saved" / "iter_0000010", tolerance=1e-4, all_arguments=False)


@pytest.mark.default
@needs_checkpoints
@pytest.mark.parametrize("name", ["gpt2_tp1/iter_0000005", "gpt2_tp1/iter_0000010", "gpt2_tp2pp2/iter_0000010"])
def test_loading_and_saving_gives_the_same_files(name: str, tmp_path: Path) -> None:
    source = MegatronTorchSource(CHECKPOINTS / name)
    folder = write_megatron_torch(source, tmp_path, int(name[-7:]))
    assert folder.name == name.rpartition("/")[2]
    compare_folders(CHECKPOINTS / name, folder)


@needs_checkpoints
def test_a_pipeline_of_megatron_gives_the_same_losses_at_any_layout(tmp_path: Path) -> None:
    losses = []
    for name in ("tp1", "tp2-pp2"):
        (tmp_path / name).mkdir()
        processes, layout = LAYOUTS[name]
        longer = f"{layout} --train-iters 12 --lr-decay-iters 10"
        args = arguments(CHECKPOINTS / "gpt2_tp2pp2", tmp_path / name, longer)
        losses.append([line["lm_loss"] for line in fork_training(args, processes).check().iterations()])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE, abs=0.0)


@pytest.mark.default
@pytest.mark.parametrize("name", ["tp2_pp2_bf16_distributed", "pp2_vpp2_bf16", "pp2_vpp2_fp32_distributed"])
def test_files_of_megatron_core_are_written_as_they_were_read(name: str, tmp_path: Path) -> None:
    # All 32 rows of the vocabulary are taken for real ones: padding would come back as zeros.
    source = MegatronTorchSource(SMALL / name / "iter_0000002", vocab_size=32)
    source.check_storages()
    folder = write_megatron_torch(source, tmp_path, 2)
    compare_folders(SMALL / name / "iter_0000002", folder)


def test_main_parameters_of_megatron_core_round_to_its_weights() -> None:
    source = MegatronTorchSource(SMALL / "tp2_pp2_bf16_distributed" / "iter_0000002")
    assert source.tensors["model.embedding.word_embeddings.weight"].global_shape == (31, 16)
    for name in source.tensors:
        if name.startswith("model."):
            main = source.read(name.replace("model.", "optimizer.main_param.", 1))
            assert torch.equal(main.bfloat16(), source.read(name)), name


def compare_folders(theirs: Path, ours: Path, tolerance: float = 0.0, all_arguments: bool = True) -> None:
    """Compare every file's values: the same keys in the same order, the same shapes and dtypes, the same numbers."""
    files = sorted(path.relative_to(theirs) for path in theirs.rglob("*.pt"))
    assert files
    assert files == sorted(path.relative_to(ours) for path in ours.rglob("*.pt"))
    for path in files:
        left, right = TorchFile(theirs / path), TorchFile(ours / path)
        Comparison(left, right, tolerance, all_arguments).values(left.value, right.value, str(path))


class Comparison:
    """Compare the values of two files."""

    def __init__(self, left: TorchFile, right: TorchFile, tolerance: float, all_arguments: bool) -> None:
        self.left, self.right, self.tolerance, self.all_arguments = left, right, tolerance, all_arguments

    def values(self, left: Any, right: Any, where: str) -> None:
        assert type(left) is type(right), where
        if isinstance(left, LazyTensor):
            assert (left.shape, left.dtype) == (right.shape, right.dtype), where
            torch.testing.assert_close(
                self.right.view(right), self.left.view(left), rtol=self.tolerance, atol=self.tolerance
            )
        elif isinstance(left, Mapping):
            assert list(left) == list(right), where
            for key in left:
                self.values(left[key], right[key], f"{where}: {key}")
        elif isinstance(left, (list, tuple)):
            assert len(left) == len(right), where
            for number, (one, other) in enumerate(zip(left, right)):
                self.values(one, other, f"{where}: {number}")
        elif isinstance(left, StoredArray):
            assert (left.dtype, left.shape, left.data) == (right.dtype, right.shape, right.data), where
        elif isinstance(left, Record):
            self.arguments(left.attributes, right.attributes)
        else:
            assert left == right, where

    def arguments(self, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        plain = {name: value for name, value in theirs.items() if not isinstance(value, Record)}
        if self.all_arguments:
            assert plain.keys() <= ours.keys()
        different = {name for name in plain.keys() & ours.keys() if plain[name] != ours[name]}
        assert different <= {"data_path"}
        for name in ("num_layers", "hidden_size", "padded_vocab_size", "consumed_train_samples", "params_dtype"):
            assert ours[name] == theirs[name]
