"""Loading where there is no checkpoint, no tracker file, or a damaged one: choices, fallbacks, refusals."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.core.errors import CheckpointError, DamagedCheckpointError
from tests.unit.core.dist_checkpointing.toy import assert_equal_runs
from tests.unit.training.checkpointing.toy_checkpoint import TRACKER, flip_byte, load, save


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
        (None, {}, "does not exist; name the folder that a run saved to"),
        (None, {"save": "{}", "finetune": True}, "does not exist, and --finetune is given"),
        (None, {"save": "{}", "no_load_optim": True}, "does not exist, and --no-load-optim is given"),
        (None, {"save": "{}", "use_checkpoint_args": True}, "does not exist, and --use-checkpoint-args is given"),
        (["notes.txt"], {}, "holds no checkpoint"),
        (["tokenizer.json"], {"finetune": True}, "holds no checkpoint"),
        (["tokenizer.model", "consolidated.00.pth"], {}, "holds weights that cannot be read (consolidated.00.pth)"),
        (["tokenizer.json", "model.safetensors"], {"save": "{}"}, "holds weights that cannot be read"),
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
        f"WARNING: {tmp_path / TRACKER} {'is missing' if text is None else 'holds ' + repr(text)}"
    )
    assert lines[0].endswith(": taking the newest complete checkpoint beside it, iter_0000050")


def test_folders_of_iterations_without_a_complete_checkpoint_are_no_new_run(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 50, lines)
    (tmp_path / TRACKER).unlink()
    (tmp_path / "iter_0000050" / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"the folders of iterations \(50\) without a complete checkpoint"):
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
