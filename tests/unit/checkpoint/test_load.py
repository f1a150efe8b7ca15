"""Loading a run on one rank: exactness, choices, damaged files, other models, and messages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.native import NativeSource, write_native
from megatron.checkpoint.load import load_checkpoint, load_model_weights, read_common
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing.index import read_index
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import ParamSpec, attach_spec, full_shards
from tests.harness.saved_checkpoint import save_checkpoint
from tests.unit.checkpoint.toy_checkpoint import CONFIG, SCHEDULER, STATE, TRACKER, common, flip_byte, load, save
from tests.unit.core.dist_checkpointing.toy import ToyModel, ToyOptimizer, assert_equal_runs, empty_run, filled_run


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
    with pytest.raises(CheckpointError, match="contains no optimizer state; add --no-load-optim"):
        load(tmp_path, lines)
    _, loaded = load(tmp_path, lines, no_load_optim=True)
    assert loaded is not None
    assert loaded.rng == {}
    line = "random number streams: default, tensor-parallel restart from the seed and iteration 50"
    assert f"{line} (the checkpoint contains none of this device)" in lines


def test_step_is_chosen(tmp_path: Path, lines: list[str]) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration, lines)
    _, loaded = load(tmp_path, lines, ckpt_step=20)
    assert loaded is not None
    assert loaded.progress.iteration == 20


def test_a_refused_schedule_is_met_before_anything_is_read(tmp_path: Path, lines: list[str]) -> None:
    def refuse(state: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
        assert (state, recorded) == (SCHEDULER, CONFIG)
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
    assert "random number streams: default restart from the seed and iteration 10 (the checkpoint contains" in lines[-2]


def test_weights_alone_for_inference(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 10, lines)
    model = ToyModel(STATE)
    assert load_model_weights(tmp_path, [model], STATE, lines.append) == tmp_path / "iter_0000010"
    for ours, theirs in zip(model.parameters(), saved.models[0].parameters()):
        assert torch.equal(ours, theirs)
    wide = ToyModel(STATE, torch.float32)
    with pytest.raises(CheckpointError, match="dtype bfloat16 in the checkpoint, but float32"):
        load_model_weights(tmp_path, [wide], STATE, lines.append)
    load_model_weights(tmp_path, [wide], STATE, lines.append, allow_cast=True)
    for ours, theirs in zip(wide.parameters(), saved.models[0].parameters()):
        assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_inference_needs_no_random_streams(tmp_path: Path, lines: list[str], damage: str) -> None:
    saved = save(tmp_path, 10, lines)
    source = NativeSource(tmp_path / "iter_0000010", with_random_streams=True)
    folder = write_native(source, tmp_path / "split", 10, max_file_bytes=64)
    index = read_index(folder)
    names = {name for name in index.files if index.has_only_streams(name)}
    assert names
    for name in names:
        (folder / name).unlink() if damage == "missing" else os.truncate(folder / name, 9)
    with pytest.raises(CheckpointError, match=min(names)):
        load(tmp_path / "split", lines)
    assert read_common(tmp_path / "split")["config"] == CONFIG
    model = ToyModel(STATE)
    load_model_weights(tmp_path / "split", [model], STATE, lines.append)
    for ours, theirs in zip(model.parameters(), saved.models[0].parameters()):
        assert torch.equal(ours, theirs)
    assert lines[-1].endswith("only random number streams, which are not needed here")
    for options in ({"finetune": True}, {"no_load_rng": True}):
        lines.clear()
        run, _ = load(tmp_path / "split", lines, **options)
        assert torch.equal(run.models[0].p1, saved.models[0].p1)
        assert len([line for line in lines if line.endswith("which are not needed here")]) == 1


def test_inference_without_a_checkpoint_is_refused(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        read_common(tmp_path)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        load_model_weights(tmp_path, [ToyModel(STATE)], STATE, lines.append)


def test_without_a_tracker_file_the_run_starts_from_random(tmp_path: Path, lines: list[str]) -> None:
    own = {"save": str(tmp_path)}
    _, loaded = load(tmp_path, lines, **own)
    assert loaded is None
    assert lines == [
        f"WARNING: could not find the metadata file {tmp_path / TRACKER}",
        "    will not load any checkpoints and will start from random",
    ]
    with pytest.raises(CheckpointError, match="exit-on-missing-checkpoint"):
        load(tmp_path, lines, **own, exit_on_missing_checkpoint=True)


@pytest.mark.parametrize(
    ("files", "options", "reason"),
    [
        (None, {}, "does not exist; pass the folder that a run saved to"),
        (None, {"save": "{}", "finetune": True}, "does not exist, but --finetune needs a checkpoint"),
        (None, {"save": "{}", "no_load_optim": True}, "does not exist, but --no-load-optim needs a checkpoint"),
        (
            None,
            {"save": "{}", "use_checkpoint_args": True},
            ("does not exist, but --use-checkpoint-args needs a checkpoint"),
        ),
        (["notes.txt"], {}, "contains no checkpoint"),
        (["tokenizer.json"], {"finetune": True}, "contains no checkpoint"),
        (
            ["tokenizer.model", "consolidated.00.pth"],
            {},
            "contains weights that cannot be loaded (consolidated.00.pth)",
        ),
        (["tokenizer.json", "model.safetensors"], {"save": "{}"}, "contains weights that cannot be loaded"),
        (["tokenizer.json", "config.json"], {"no_load_optim": True}, None),
        (None, {"save": "{}"}, None),
        (["metrics.jsonl"], {"save": "{}", "no_load_optim": True}, None),
    ],
)
def test_random_weights_only_where_they_are_meant(
    files: list[str] | None, options: dict[str, Any], reason: str | None, tmp_path: Path, lines: list[str]
) -> None:
    folder = tmp_path / "folder"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    given = {name: str(folder) if value == "{}" else value for name, value in options.items()}
    if reason is None:
        assert load(folder, lines, **given)[1] is None
        return
    with pytest.raises(CheckpointError, match=re.escape(f"--load {folder} {reason}")):
        load(folder, lines, **given)


@pytest.mark.parametrize("text", [None, "", "fifty"])
def test_without_a_tracker_file_the_newest_complete_checkpoint_is_taken(
    text: str | None, tmp_path: Path, lines: list[str]
) -> None:
    save(tmp_path, 50, lines)
    save(tmp_path, 60, lines)
    (tmp_path / TRACKER).unlink()
    (tmp_path / "iter_0000060" / "index.json").unlink()
    if text is not None:
        (tmp_path / TRACKER).write_text(text)
    lines.clear()
    _, loaded = load(tmp_path, lines, save=str(tmp_path))
    assert loaded is not None
    assert loaded.progress.iteration == 50
    assert lines[0].startswith(
        f"WARNING: {tmp_path / TRACKER} {'is missing' if text is None else 'contains ' + repr(text)}"
    )
    assert lines[0].endswith(": loading the newest complete checkpoint in its folder, iter_0000050")


def test_folders_of_iterations_without_a_complete_checkpoint_are_no_new_run(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 50, lines)
    (tmp_path / TRACKER).unlink()
    (tmp_path / "iter_0000050" / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"it has incomplete iterations \(50\)"):
        load(tmp_path, lines, save=str(tmp_path))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"iteration": 60', '"iteration": 1e999'),
        ('"iteration": 60', '"iteration": ' + "[" * 50_000 + "]" * 50_000),
        ('"iteration": 60', '"iterations": 60'),
        ('"file": "shard_00000.safetensors"', '"file": "/dev/zero"'),
    ],
)
def test_an_index_that_was_made_to_harm_is_passed_over(old: str, new: str, tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 50, lines)
    save(tmp_path, 60, lines)
    path = tmp_path / "iter_0000060" / "index.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    for verify in (True, False):
        run, loaded = load(tmp_path, lines, verify_checkpoint=verify)
        assert loaded is not None
        assert loaded.progress.iteration == 50
        assert_equal_runs(run, saved)


@pytest.mark.parametrize("name", ["index.json", "shard_00000.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_passed_over(name: str, tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 50, lines)
    save(tmp_path, 60, lines)
    (tmp_path / "iter_0000060" / name).unlink()
    os.mkfifo(tmp_path / "iter_0000060" / name)
    _, loaded = load(tmp_path, lines)
    assert loaded is not None
    assert loaded.progress.iteration == 50
    assert any("is a pipe, not a file" in line for line in lines)


@pytest.mark.parametrize("damage", ["flip", "truncate", "no index", "bad index", "no shard", "no folder"])
def test_a_damaged_checkpoint_is_passed_over_and_said_in_one_line(
    tmp_path: Path, lines: list[str], damage: str
) -> None:
    saved = save(tmp_path, 10, lines)
    save(tmp_path, 20, lines)
    folder = tmp_path / "iter_0000020"
    shard = folder / "shard_00000.safetensors"
    if damage == "flip":
        flip_byte(folder)
    elif damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:200])
    elif damage == "no index":
        (folder / "index.json").unlink()
    elif damage == "bad index":
        (folder / "index.json").write_text((folder / "index.json").read_text().replace('"dtype"', '"type"', 1))
    elif damage == "no shard":
        shard.unlink()
    else:
        folder.rename(tmp_path / "elsewhere")
    lines.clear()
    run, loaded = load(tmp_path, lines)
    assert loaded is not None
    assert loaded.progress.iteration == 10
    assert_equal_runs(run, saved)
    (warning,) = (line for line in lines if line.startswith("WARNING: "))
    assert warning.startswith(f"WARNING: checkpoint {folder} is damaged (")
    assert warning.endswith(f"); falling back to {tmp_path / 'iter_0000010'}")
    assert "\n" not in warning
    with pytest.raises(CheckpointError):
        load(tmp_path, lines, ckpt_step=20)


def test_when_all_are_damaged_nothing_is_loaded(tmp_path: Path, lines: list[str]) -> None:
    for iteration in (10, 20):
        save(tmp_path, iteration, lines)
        flip_byte(tmp_path / f"iter_{iteration:07d}")
    with pytest.raises(CheckpointError, match="all 2 checkpoints are damaged"):
        load(tmp_path, lines)
    _, loaded = load(tmp_path, lines, verify_checkpoint=False)
    assert loaded is not None
    assert loaded.progress.iteration == 20


def test_the_only_checkpoint_damaged_names_file_and_tensor(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    flip_byte(tmp_path / "iter_0000010")
    with pytest.raises(DamagedCheckpointError, match=r"shard_00000\.safetensors: the bytes of rng\.pp0"):
        load(tmp_path, lines)


MISSING = "missing in the checkpoint: model.new.weight"
UNEXPECTED = "unexpected in the checkpoint: model.norm.weight"


def test_another_model_is_refused_and_not_taken_for_damage(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    save(tmp_path, 20, lines)
    other = {"model": {"num_layers": 6, "hidden_size": 7}, "optimizer": {"lr": 1e-4}}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, lines, config=other)
    assert "model.num_layers: 4 -> 6" in str(caught.value)
    assert "model.hidden_size: 5 -> 7" in str(caught.value)
    assert not any("falling back" in line for line in lines)


def test_a_tokenizer_smaller_than_the_model_is_told_what_to_add(tmp_path: Path, lines: list[str]) -> None:
    content = common(10, config={"model": {"vocab_size": 151936}})
    save_checkpoint(tmp_path, filled_run(STATE), content, STATE, CheckpointConfig(), lines.append)
    with pytest.raises(CheckpointError, match=r"vocab_size: 151936 -> 151665 \(.* add --extra-vocab-size 271\)$"):
        load(tmp_path, lines, config={"model": {"vocab_size": 151665}})
    with pytest.raises(CheckpointError, match=r"vocab_size: 151936 -> 160000$"):
        load(tmp_path, lines, config={"model": {"vocab_size": 160000}})


class LargerToyModel(ToyModel):
    """Have one weight more than the model that is saved, and one less."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__(state)
        spec = ParamSpec("new.weight", (3,), full_shards((3,)))
        parameter = torch.nn.Parameter(torch.full((3,), 5.0))
        attach_spec(parameter, spec)
        self.register_parameter("new", parameter)
        del self.p4


@pytest.mark.parametrize(
    ("choice", "refused", "listed"),
    [
        (
            "raise_all",
            [MISSING, UNEXPECTED],
            [],
        ),
        ("raise_unexpected", [MISSING], []),
        ("assume_ok_unexpected", [MISSING], []),
        ("log_all", [], ["model.new.weight", "model.norm.weight"]),
        ("return_all", [], ["model.new.weight", "model.norm.weight"]),
        ("log_unexpected", [], ["model.new.weight"]),
        ("return_unexpected", [], ["model.new.weight"]),
        ("ignore_all", [], ["model.new.weight"]),
    ],
)
def test_strictness(tmp_path: Path, lines: list[str], choice: str, refused: list[str], listed: list[str]) -> None:
    save(tmp_path, 10, lines)
    run = CheckpointState(models=[LargerToyModel(STATE)], optimizer=ToyOptimizer(STATE), rng=empty_run(STATE).rng)
    options = CheckpointConfig(dist_ckpt_strictness=choice)
    if refused:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path, run, STATE, options, CONFIG, lines.append)
        assert str(caught.value).partition(" does not match this run: ")[2].split("; ") == refused
        return
    assert load_checkpoint(tmp_path, run, STATE, options, CONFIG, lines.append) is not None
    assert [line.strip() for line in lines if line.startswith("    model.")] == listed
    assert "WARNING: the checkpoint lacks 1 tensors of this run, which keep their initial values:" in lines
    model = run.models[0]
    assert (model.new == 5).all()
    assert torch.equal(model.p1, filled_run(STATE).models[0].p1)


def test_values_of_a_damaged_checkpoint_do_not_pass_for_initial_ones(tmp_path: Path, lines: list[str]) -> None:
    def larger() -> CheckpointState:
        return CheckpointState(models=[LargerToyModel(STATE)])

    save(tmp_path, 10, lines)
    save(tmp_path, 20, lines, larger())
    flip_byte(tmp_path / "iter_0000020")
    options = {"dist_ckpt_strictness": "log_all", "no_load_optim": True}
    with pytest.raises(
        CheckpointError, match=r"iter_0000010 lacks model\.new\.weight, and loading the damaged"
    ) as caught:
        load_checkpoint(tmp_path, larger(), STATE, CheckpointConfig(**options), CONFIG, lines.append)
    assert "--ckpt-step" in str(caught.value)
    run = larger()
    chosen = CheckpointConfig(ckpt_step=10, **options)
    assert load_checkpoint(tmp_path, run, STATE, chosen, CONFIG, lines.append) is not None
    assert (run.models[0].new == 5).all()


def test_another_shape_is_refused_however_lenient_the_load(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    longer = ToyModel(STATE)
    longer.p1 = torch.nn.Parameter(torch.zeros(9))
    attach_spec(longer.p1, ParamSpec("norm.weight", (9,), full_shards((9,))))
    options = CheckpointConfig(dist_ckpt_strictness="ignore_all", no_load_optim=True)
    with pytest.raises(CheckpointError, match=r"shape \[.*\] in the checkpoint, but \[9\] in this run"):
        load_checkpoint(tmp_path, CheckpointState(models=[longer]), STATE, options, CONFIG, lines.append)


def test_weights_of_another_precision_are_converted_and_that_is_said(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 10, lines)
    wide = CheckpointState(models=[ToyModel(STATE, torch.float32)])
    load_checkpoint(tmp_path, wide, STATE, CheckpointConfig(no_load_optim=True), CONFIG, lines.append)
    for ours, theirs in zip(wide.models[0].parameters(), saved.models[0].parameters()):
        assert torch.equal(ours, theirs.float())
    (line,) = [line for line in lines if line.startswith("precision: ")]
    assert "weights are bfloat16, this run's float32: converted from the checkpoint's weights" in line


def test_deprecated_names_in_a_checkpoint_are_no_change(tmp_path: Path, lines: list[str]) -> None:
    old = CONFIG | {"model": CONFIG["model"] | {"norm_placement": "after", "cpu_matmul": "mkl"}}
    new = CONFIG | {"model": CONFIG["model"] | {"norm_placement": "post", "cpu_gemm_backend": "mkl"}}
    save_checkpoint(tmp_path, filled_run(STATE), common(10, config=old), STATE, CheckpointConfig(), lines.append)
    _, loaded = load(tmp_path, lines, config=new)
    assert loaded is not None
    assert loaded.config == new
    assert not any(line.startswith("configuration changed") for line in lines)
    with pytest.raises(CheckpointError, match=r"model\.norm_placement: post -> pre$"):
        load(tmp_path, lines, config=CONFIG | {"model": new["model"] | {"norm_placement": "pre"}})


def test_more_layers_are_refused_unless_that_is_asked_for(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    deeper = CONFIG | {"model": {"num_layers": 6, "hidden_size": 5}}
    with pytest.raises(CheckpointError, match=r"from a different model .*: model\.num_layers: 4 -> 6$"):
        load(tmp_path, lines, config=deeper)
    load(tmp_path, lines, config=deeper, dist_ckpt_strictness="log_all")
    assert "configuration changed since the checkpoint: model.num_layers: 4 -> 6" in lines
    wider = CONFIG | {"model": {"num_layers": 4, "hidden_size": 7}}
    with pytest.raises(CheckpointError, match=r"from a different model .*: model\.hidden_size: 5 -> 7$"):
        load(tmp_path, lines, config=wider, dist_ckpt_strictness="ignore_all")


def test_a_main_parameter_is_not_left_behind_its_weight(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 10, lines)
    run = empty_run(STATE)
    assert isinstance(run.optimizer, ToyOptimizer)
    spec = ParamSpec("optimizer.main_param.norm.weight", (5,), full_shards((5,)))
    run.optimizer.sharded_state()["main"] = (spec, torch.zeros(5))
    options = CheckpointConfig(dist_ckpt_strictness="log_all")
    with pytest.raises(CheckpointError, match=r"without their main parameters \(optimizer\.main_param\.norm\.weight\)"):
        load_checkpoint(tmp_path, run, STATE, options, CONFIG, lines.append)
