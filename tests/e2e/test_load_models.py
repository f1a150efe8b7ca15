"""Training begins from a model of any format that --load names, at any layout, or the run ends with one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.checkpoint_folder import find_checkpoint
from megatron.checkpoint.checkpoint_source import SourceView
from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.megatron.torch_format import write_megatron_torch
from megatron.checkpoint.formats.native import NativeSource
from tests.e2e.toy_run import newest, toy_args
from tests.harness.forked_training import ForkedRun, fork_training

TOLERANCE = 1e-5
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
BEGIN = f"{NO_DROPOUT} --train-iters 3 --lr-decay-iters 20 --eval-interval 1000"
LAYOUTS = {
    "one": (1, ""),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dp2": (2, "--use-distributed-optimizer"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 6 iterations, whose heads have 8 channels."""
    folder = tmp_path_factory.mktemp("trained")
    fork_training(toy_args(folder, NO_DROPOUT, "--train-iters 6 --eval-interval 1000")).check()
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def finetuned(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> ForkedRun:
    """Return a run that begins anew with the weights of that run."""
    folder = tmp_path_factory.mktemp("finetuned")
    return begin(folder, trained, "--finetune").check()


def begin(folder: Path, load: Path, *more: str, nproc: int = 1) -> ForkedRun:
    words = toy_args(folder, BEGIN, *more, save=False)
    return fork_training([*words, "--load", load, "--metrics-jsonl", folder / "metrics.jsonl"], nproc)


def hugging_face(trained: Path, folder: Path) -> Path:
    source = NativeSource(newest(trained))
    write_hugging_face(source, folder / "model")
    source.close()
    return folder / "model"


def release(trained: Path, folder: Path, change: Callable[[dict[str, Any]], None] = lambda values: None) -> Path:
    """Return a folder with a release file as they are published: weights, and what ``change`` leaves of the rest."""
    source = NativeSource(newest(trained))
    common = dict(source.common) | {"optimizer": None, "scheduler": None}
    write_megatron_torch(SourceView(source, common, keeps_optimizer=False), folder / "model", "release")
    source.close()
    path = folder / "model" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    values = torch.load(path, weights_only=False)
    change(values)
    torch.save(values, path)
    return folder / "model"


def assert_same_run(run: ForkedRun, expected: ForkedRun) -> None:
    lines = run.check().iterations()
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    for ours, theirs in zip(lines, expected.iterations(), strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=TOLERANCE, abs=0.0)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE, abs=0.0)
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["sample_ids_hash"] == theirs["sample_ids_hash"]


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "tp2-pp2")) for name in LAYOUTS]
)
def test_a_hugging_face_folder_is_trained_at_any_layout(
    name: str, trained: Path, finetuned: ForkedRun, tmp_path: Path
) -> None:
    nproc, layout = LAYOUTS[name]
    model = hugging_face(trained, tmp_path)
    run = begin(tmp_path, model, layout, nproc=nproc)
    assert_same_run(run, finetuned)
    assert f"{model} holds a model: training begins at iteration 0, with new optimizer state" in run.stdout
    assert "configuration changed since the checkpoint: training" not in run.stdout


def test_a_hugging_face_folder_of_another_shape_or_with_a_part_is_refused(trained: Path, tmp_path: Path) -> None:
    model = hugging_face(trained, tmp_path)
    assert "model.num_layers: 2 -> 3" in refusal(begin(tmp_path, model, "--num-layers 3"))
    (weights,) = model.glob("*.safetensors")
    weights.rename(model / "part.safetensors")
    assert str(model) in refusal(begin(tmp_path, model))
    shutil.move(model / "config.json", tmp_path / "config.json")
    assert f"--load {model} holds weights that cannot be read (part.safetensors)" in refusal(begin(tmp_path, model))


def at_500000(values: dict[str, Any]) -> None:
    values["iteration"] = 500000
    values["args"].iteration = 500000
    values["args"].consumed_train_samples = 500000


def no_iteration(values: dict[str, Any]) -> None:
    del values["iteration"]


def no_args(values: dict[str, Any]) -> None:
    del values["args"], values["iteration"]


@pytest.mark.parametrize("change", [at_500000, no_iteration, pytest.param(no_args, marks=pytest.mark.long)])
def test_a_release_begins_at_iteration_0_without_a_flag(
    change: Callable[[dict[str, Any]], None], trained: Path, finetuned: ForkedRun, tmp_path: Path
) -> None:
    model = release(trained, tmp_path, change)
    assert_same_run(begin(tmp_path, model), finetuned)
    nproc, layout = LAYOUTS["tp2-pp2"]
    if change is at_500000:
        assert_same_run(begin(tmp_path / "pp2", model, layout, nproc=nproc), finetuned)
    if change is no_args:
        # The flags say how many heads there are; what they say of the shape is held against the tensors.
        error = refusal(begin(tmp_path, model, "--ffn-hidden-size 96"))
        assert "model.ffn_hidden_size: 128 -> 96" in error
        assert "is of another tokenizer" in refusal(begin(tmp_path, model, "--vocab-size 300"))


def test_commands_take_what_training_takes(trained: Path, tmp_path: Path) -> None:
    for folder in (hugging_face(trained, tmp_path / "hf"), newest(trained)):
        assert find_checkpoint(folder).folder == folder
    assert_same_run(begin(tmp_path, newest(trained), "--finetune"), begin(tmp_path / "x", trained, "--finetune"))


@pytest.mark.parametrize("flags", ["", "--finetune", "--use-checkpoint-args", "--no-load-optim"])
def test_a_folder_that_is_not_there_is_one_line(flags: str, tmp_path: Path) -> None:
    assert f"{tmp_path / 'absent'} " in refusal(begin(tmp_path, tmp_path / "absent", flags))


def test_an_index_of_weights_that_are_not_there_is_no_tokenizer(trained: Path, tmp_path: Path) -> None:
    """A download that was cut off has the small files, and the index among them."""
    model = hugging_face(trained, tmp_path)
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "tokenizer.json").write_text("{}")
    assert "model-00001-of-00002.safetensors is missing" in refusal(begin(tmp_path, model))


def refusal(run: ForkedRun) -> str:
    assert set(run.statuses) == {2}, run.outputs
    (line,) = run.errors[0].splitlines() if "another model" not in run.errors[0] else [run.errors[0]]
    return line
