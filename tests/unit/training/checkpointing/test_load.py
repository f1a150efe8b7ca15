"""Loading a run on one rank: exactness, choices, messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.load import load_checkpoint, load_model_weights, read_common
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.errors import CheckpointError
from tests.unit.core.dist_checkpointing.toy import ToyModel, ToyOptimizer, assert_equal_runs, empty_run
from tests.unit.training.checkpointing.toy_checkpoint import CONFIG, SCHEDULER, STATE, TRACKER, common, load, save


def test_everything_comes_back_bitwise(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 50, lines)
    run, loaded = load(tmp_path, lines)
    assert_equal_runs(run, saved)
    assert loaded is not None
    assert loaded.progress == common(50).progress
    assert loaded.scheduler == SCHEDULER
    assert loaded.config == CONFIG
    assert loaded.optimizer_loaded
    assert loaded.rng is not None
    assert loaded.rng.keys() == saved.rng.keys()
    for name, tensor in saved.rng.items():
        assert torch.equal(loaded.rng[name], tensor)


def test_the_folder_of_an_iteration_is_loaded_itself(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 50, lines)
    run, loaded = load(tmp_path / "iter_0000050", lines)
    assert loaded is not None
    assert loaded.progress.iteration == 50
    assert_equal_runs(run, saved)


def test_a_release_gives_its_weights_and_begins_anew(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 50, lines)
    (tmp_path / "iter_0000050").rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    run, loaded = load(tmp_path, lines)
    assert loaded is not None
    assert loaded.is_fresh_start
    assert loaded.progress == TrainProgress()
    assert (loaded.optimizer_loaded, loaded.scheduler, loaded.rng) == (False, None, None)
    assert torch.equal(run.models[0].p1, saved.models[0].p1)


def test_finetune_takes_the_weights_alone(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 50, lines)
    run, loaded = load(tmp_path, lines, finetune=True)
    assert loaded is not None
    assert loaded.progress == TrainProgress()
    assert (loaded.optimizer_loaded, loaded.scheduler, loaded.rng) == (False, None, None)
    assert isinstance(run.optimizer, ToyOptimizer)
    assert all((tensor == -7).all() for _, tensor in run.optimizer.sharded_state().values())
    assert not all((parameter == -7).all() for parameter in run.models[0].parameters())


def test_parts_are_left_out_when_asked(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 50, lines)
    _, loaded = load(tmp_path, lines, no_load_optim=True, no_load_rng=True)
    assert loaded is not None
    assert loaded.progress.iteration == 50
    assert (loaded.optimizer_loaded, loaded.rng) == (False, None)


def test_parts_that_were_not_saved(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 50, lines, no_save_optim=True, no_save_rng=True)
    with pytest.raises(CheckpointError, match="holds no optimizer state; add --no-load-optim"):
        load(tmp_path, lines)
    _, loaded = load(tmp_path, lines, no_load_optim=True)
    assert loaded is not None
    assert loaded.rng == {}
    line = "random number streams: default, tensor-parallel start anew, from the seed and iteration 50"
    assert f"{line} (the checkpoint holds none of this device)" in lines


def test_step_is_chosen(tmp_path: Path, lines: list[str]) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration, lines)
    _, loaded = load(tmp_path, lines, ckpt_step=20)
    assert loaded is not None
    assert loaded.progress.iteration == 20


def test_a_refused_schedule_is_met_before_anything_is_read(tmp_path: Path, lines: list[str]) -> None:
    def refuse(state: Mapping[str, Any]) -> None:
        assert state == SCHEDULER
        raise CheckpointError("another schedule")

    save(tmp_path, 10, lines)
    run, untouched = empty_run(STATE), empty_run(STATE)
    with pytest.raises(CheckpointError, match="another schedule"):
        load_checkpoint(tmp_path, run, STATE, CheckpointConfig(), CONFIG, lines.append, refuse)
    assert_equal_runs(run, untouched)


def test_a_changed_configuration_is_shown(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    load(tmp_path, lines, config=CONFIG | {"optimizer": {"lr": 3e-4}})
    assert "configuration changed since the checkpoint: optimizer.lr: 0.0001 -> 0.0003" in lines


def test_streams_of_another_device_or_layout_start_again(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    run = empty_run(STATE)
    other = CheckpointState(
        models=run.models, optimizer=run.optimizer, rng={"default": torch.zeros(3, dtype=torch.uint8)}
    )
    loaded = load_checkpoint(tmp_path, other, STATE, CheckpointConfig(), CONFIG, lines.append)
    assert loaded is not None
    assert loaded.rng == {}
    assert (
        "random number streams: default start anew, from the seed and iteration 10 (the checkpoint holds" in lines[-2]
    )


def test_weights_alone_for_inference(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 10, lines)
    model = ToyModel(STATE)
    assert load_model_weights(tmp_path, [model], STATE, lines.append) == tmp_path / "iter_0000010"
    for ours, theirs in zip(model.parameters(), saved.models[0].parameters()):
        assert torch.equal(ours, theirs)
    wide = ToyModel(STATE, torch.float32)
    with pytest.raises(CheckpointError, match="dtype bfloat16 in the checkpoint, float32"):
        load_model_weights(tmp_path, [wide], STATE, lines.append)
    load_model_weights(tmp_path, [wide], STATE, lines.append, allow_cast=True)
    for ours, theirs in zip(wide.parameters(), saved.models[0].parameters()):
        assert torch.equal(ours, theirs.float())


def test_inference_without_a_checkpoint_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        read_common(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_model_weights(tmp_path, [ToyModel(STATE)], STATE, lines.append)
