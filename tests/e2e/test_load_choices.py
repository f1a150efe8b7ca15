"""What the flags of loading do to a run, and what each kind of wrong checkpoint is refused with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

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
    piece = read_index(checkpoint).tensors[tensor].pieces[0]
    path = checkpoint / piece.file
    data = bytearray(path.read_bytes())
    data[piece.start + 9] ^= 1
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
    changed = {name for name in before if before[name].pieces[0].checksum != after[name].pieces[0].checksum}
    # Two groups: weights that decay and those that do not. The moments of both go on.
    assert not [name for name in changed if name.startswith("model.")]
    for weight in ("decoder.final_layernorm.bias", "decoder.layers.0.mlp.linear_fc1.weight"):
        assert {f"optimizer.exp_avg.{weight}", f"optimizer.exp_avg_sq.{weight}"} <= changed


def test_a_folder_without_a_checkpoint_ends_the_run_on_demand(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, FLAGS, "--exit-on-missing-checkpoint"))
    assert "--exit-on-missing-checkpoint is given" in errors_of(run)


def test_more_layers_start_from_their_initial_values_on_demand(checkpoints: Path) -> None:
    deeper = "--num-layers 3"
    error = errors_of(go_on(checkpoints, deeper))
    assert "is of another model (checkpoint -> this run): model.num_layers: 2 -> 3" in error
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
        last = max((piece for tensor in tensors.values() for piece in tensor.pieces), key=lambda piece: piece.start)
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
        "the checkpoint lacks 3 tensors of this run; left at their initial value:\n    model.decoder.final"
        in run.stdout
    )
