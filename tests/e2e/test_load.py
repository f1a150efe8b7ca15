"""Training begins from a model of any format, or goes on by the flags of loading, in another precision too."""

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
from megatron.core.dist_checkpointing.index import read_index
from tests.e2e.toy_run import newest, toy_args
from tests.harness.forked_training import ForkedRun, fork_training

FLAGS = "--lr-decay-iters 40 --save-interval 2 --eval-interval 1000"
SHAPE = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
SHARD = "shard_00000.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ForkedRun]:
    """Return the folder of a run with checkpoints at iterations 2 and 4, and the run."""
    folder = tmp_path_factory.mktemp("saved")
    run = fork_training(toy_args(folder, FLAGS, "--train-iters 4")).check()
    return folder / "checkpoints", run


@pytest.fixture
def checkpoints(saved: tuple[Path, ForkedRun], tmp_path: Path) -> Path:
    """Return a copy of that run's folder, which a test may change."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def go_on(checkpoints: Path, *more: str) -> ForkedRun:
    return fork_training(toy_args(checkpoints.parent, FLAGS, "--train-iters 6", *more))


def errors_of(run: ForkedRun) -> str:
    assert run.statuses == (2,), run.outputs
    assert "Traceback" not in run.errors[0]
    return run.errors[0]


def flip_a_byte(checkpoint: Path, tensor: str) -> Path:
    shard = read_index(checkpoint).tensors[tensor].shards[0]
    path = checkpoint / shard.file
    data = bytearray(path.read_bytes())
    data[shard.start + 9] ^= 1
    path.write_bytes(data)
    return path


def test_the_shape_comes_from_the_checkpoint(saved: tuple[Path, ForkedRun], checkpoints: Path) -> None:
    words = toy_args(checkpoints.parent, FLAGS, "--train-iters 6 --use-checkpoint-args")
    for flag in SHAPE:
        place = words.index(flag)
        del words[place : place + 2]
    run = fork_training(words).check()
    assert f"--use-checkpoint-args: from {checkpoints / 'iter_0000004'}: num_layers 2, hidden_size 32" in run.stdout
    assert [line["iteration"] for line in run.iterations()] == [1, 2, 3, 4, 5, 6]


def test_finetune_begins_anew_with_the_weights_of_the_step_that_is_asked_for(
    saved: tuple[Path, ForkedRun], checkpoints: Path
) -> None:
    metrics = checkpoints.parent / "finetune.jsonl"
    run = go_on(checkpoints, "--finetune --ckpt-step 2 --hidden-dropout 0 --exit-interval 1 --metrics-jsonl", metrics)
    first = run.check().iterations()[0]
    whole = saved[1].iterations()
    assert (first["iteration"], first["learning_rate"]) == (1, whole[0]["learning_rate"])
    assert first["sample_ids_hash"] == whole[0]["sample_ids_hash"]
    assert first["lm_loss"] < whole[0]["lm_loss"]


def test_streams_and_optimizer_begin_anew_on_demand(checkpoints: Path) -> None:
    run = go_on(checkpoints, "--no-load-rng --no-load-optim").check()
    assert "random number streams" not in run.stdout
    assert "with new optimizer state" in run.stdout
    assert run.iterations()[-1]["iteration"] == 6


def test_a_changed_schedule_is_shown_and_reaches_every_parameter(checkpoints: Path) -> None:
    before = read_index(newest(checkpoints)).tensors
    run = go_on(checkpoints, "--lr 1e-30 --min-lr 0 --override-opt-param-scheduler").check()
    assert "schedule changed since the checkpoint: max_lr: 0.003 → 1e-30" in run.stdout
    after = read_index(newest(checkpoints)).tensors
    changed = {name for name in before if before[name].shards[0].checksum != after[name].shards[0].checksum}
    # Two groups: weights that decay and those that do not. The moments of both go on.
    assert not [name for name in changed if name.startswith("model.")]
    for weight in ("decoder.final_layernorm.bias", "decoder.layers.0.mlp.linear_fc1.weight"):
        assert {f"optimizer.exp_avg.{weight}", f"optimizer.exp_avg_sq.{weight}"} <= changed


def test_a_folder_without_a_checkpoint_ends_the_run_on_demand(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, FLAGS, "--exit-on-missing-checkpoint"))
    assert "--exit-on-missing-checkpoint needs a checkpoint" in errors_of(run)


def test_more_layers_start_from_their_initial_values_on_demand(checkpoints: Path) -> None:
    deeper = "--num-layers 3"
    error = errors_of(go_on(checkpoints, deeper))
    assert "is from a different model (checkpoint -> this run): model.num_layers: 2 -> 3" in error
    run = go_on(checkpoints, deeper, "--dist-ckpt-strictness log_all").check()
    assert "configuration changed since the checkpoint: model.num_layers: 2 -> 3" in run.stdout
    listed = {line.strip() for line in run.stdout.splitlines() if ".decoder.layers." in line}
    weights = {name.removeprefix("model.") for name in listed if name.startswith("model.")}
    assert len(weights) == 12
    assert all(name.startswith("decoder.layers.2.") for name in weights)
    assert listed == {
        prefix + w for w in weights for prefix in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    }


def test_another_model_is_refused_by_what_differs(checkpoints: Path) -> None:
    error = errors_of(go_on(checkpoints, "--hidden-size 48 --swiglu"))
    assert "model.hidden_size: 32 -> 48" in error
    assert "model.swiglu: False -> True" in error


@pytest.mark.default
def test_a_flipped_byte_is_named_and_an_older_checkpoint_taken(checkpoints: Path) -> None:
    tensor = "optimizer.exp_avg_sq.decoder.layers.1.mlp.linear_fc2.weight"
    path = flip_a_byte(newest(checkpoints), tensor)
    message = f"{path}: the bytes of {tensor} do not match their checksum"
    assert message in errors_of(go_on(checkpoints, "--ckpt-step 4"))
    go_on(checkpoints, "--ckpt-step 4 --no-verify-checkpoint --no-save-optim --exit-interval 5").check()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    run = go_on(checkpoints).check()
    older = checkpoints / "iter_0000002"
    assert f"WARNING: checkpoint {path.parent} is damaged ({message}); falling back to {older}" in run.stdout
    assert "at iteration 2" in run.stdout


@pytest.mark.parametrize("damage", ["truncated", "missing", "deleted"])
def test_damage_is_named_by_file_and_tensor(checkpoints: Path, damage: str) -> None:
    folder = newest(checkpoints)
    path = folder / SHARD
    tensors = read_index(folder).tensors
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
        last = max((shard for tensor in tensors.values() for shard in tensor.shards), key=lambda shard: shard.start)
        expected = [str(path), f"lost: {last.key}"]
    elif damage == "missing":
        path.unlink()
        expected = [f"{path}: No such file or directory; lost: model.decoder.final_layernorm.bias, "]
    else:
        path = folder / "index.json"
        content = json.loads(path.read_text())
        del content["tensors"]["model.decoder.final_layernorm.bias"]
        path.write_text(json.dumps(content))
        expected = [str(path), "missing in the checkpoint: model.decoder.final_layernorm.bias"]
    error = errors_of(go_on(checkpoints, "--ckpt-step 4"))
    for part in expected:
        assert part in error


def test_a_deleted_tensor_passes_by_explicit_flags_alone(checkpoints: Path) -> None:
    path = newest(checkpoints) / "index.json"
    content = json.loads(path.read_text())
    for name in list(content["tensors"]):
        if name.endswith("decoder.final_layernorm.bias"):
            del content["tensors"][name]
    path.write_text(json.dumps(content))
    for flags in ("", "--no-verify-checkpoint", "--dist-ckpt-strictness log_all"):
        errors_of(go_on(checkpoints, "--ckpt-step 4", flags))
    run = go_on(checkpoints, "--ckpt-step 4 --no-verify-checkpoint --dist-ckpt-strictness log_unexpected").check()
    assert (
        "the checkpoint lacks 3 tensors of this run, which keep their initial values:\n    model.decoder.final"
        in run.stdout
    )


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
    assert f"{model} contains a model: training starts at iteration 0, with new optimizer state" in run.stdout
    assert "configuration changed since the checkpoint: training" not in run.stdout


def test_a_hugging_face_folder_of_another_shape_or_with_a_part_is_refused(trained: Path, tmp_path: Path) -> None:
    model = hugging_face(trained, tmp_path)
    assert "model.num_layers: 2 -> 3" in refusal(begin(tmp_path, model, "--num-layers 3"))
    (weights,) = model.glob("*.safetensors")
    weights.rename(model / "part.safetensors")
    assert str(model) in refusal(begin(tmp_path, model))
    shutil.move(model / "config.json", tmp_path / "config.json")
    assert f"--load {model} contains weights that cannot be loaded (part.safetensors)" in refusal(
        begin(tmp_path, model)
    )


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
        assert "is from a different tokenizer" in refusal(begin(tmp_path, model, "--vocab-size 300"))


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
    (line,) = run.errors[0].splitlines() if "different model" not in run.errors[0] else [run.errors[0]]
    return line


PRECISION_FLAGS = "--lr-decay-iters 40 --train-iters 6 --eval-interval 1000"
PRECISIONS = {"float32": "", "bfloat16": "--bf16", "float16": "--fp16 --initial-loss-scale 1024"}
MAIN = "optimizer.main_param."
CHANGES = [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")]


@pytest.fixture(scope="module")
def saved_precisions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a run of 4 iterations in each precision."""
    folders = {}
    for name, flags in PRECISIONS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        fork_training(toy_args(folders[name], PRECISION_FLAGS, flags, "--exit-interval 4")).check()
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
def test_every_precision_goes_on_in_every_other(
    old: str, new: str, saved_precisions: dict[str, Path], tmp_path: Path
) -> None:
    nproc = 2 if new == "bfloat16" else 1
    sharded = "--use-distributed-optimizer" if nproc == 2 else ""
    words = toy_args(tmp_path, PRECISION_FLAGS, PRECISIONS[new], sharded, "--exit-interval 5 --save-interval 5")
    words += ["--load", str(saved_precisions[old] / "checkpoints")]
    run = fork_training(words, nproc).check()
    assert [line["iteration"] for line in run.iterations()] == [5]
    assert run.iterations()[0]["skipped"] == 0
    said = [line for line in run.stdout.splitlines() if line.startswith("precision: ")]
    assert len(said) == (old != new)
    if old != new:
        assert f"weights are {old}, this run's {new}" in said[0]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_main_parameters_and_moments_are_the_same_bits(
    old: str, new: str, saved_precisions: dict[str, Path], tmp_path: Path
) -> None:
    # An iteration at a learning rate of 0 moves nothing; moments do move.
    still = "--lr 1e-30 --min-lr 0 --weight-decay 0 --override-opt-param-scheduler --exit-interval 5"
    words = toy_args(tmp_path, PRECISION_FLAGS, PRECISIONS[new], still)
    fork_training([*words, "--load", str(saved_precisions[old] / "checkpoints")]).check()
    before, after = (NativeSource(newest(folder / "checkpoints")) for folder in (saved_precisions[old], tmp_path))
    theirs = main_params(before)
    for name, values in main_params(after).items():
        assert torch.equal(values, theirs[name]), name
        weight = after.read(f"model.{name}")
        assert torch.equal(weight, values.to(weight.dtype)), name
    before.close()
    after.close()


def test_an_optimizer_that_cannot_fit_is_one_line(saved_precisions: dict[str, Path], tmp_path: Path) -> None:
    words = toy_args(
        tmp_path, PRECISION_FLAGS, "--bf16 --optimizer sgd", "--load", saved_precisions["bfloat16"] / "checkpoints"
    )
    run = fork_training(words)
    assert run.statuses == (2,)
    (line,) = run.errors[0].splitlines()
    assert "does not match this run: " in line
    assert "unexpected in the checkpoint: optimizer.exp_avg." in line
    assert line.endswith(" more")
