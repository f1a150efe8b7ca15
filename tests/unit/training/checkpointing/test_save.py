"""Saving a run on one rank: what is written, what is kept, and what a failure leaves."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpoint.load import read_common
from megatron.checkpoint.save import prepare_save_directory
from megatron.config.run_config import CheckpointConfig
from megatron.core.errors import CheckpointError, TokenizerError
from tests.harness.saved_checkpoint import save_checkpoint
from tests.unit.core.dist_checkpointing.toy import (
    assert_equal_runs,
    filled_run,
)
from tests.unit.training.checkpointing.toy_checkpoint import CONFIG, STATE, TRACKER, common, load, save


@pytest.fixture
def lines() -> list[str]:
    return []


def test_log_lines_and_files(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path / "run", 50, lines)
    assert lines == [
        f"saving checkpoint at iteration      50 to {tmp_path / 'run'}",
        f"  successfully saved checkpoint at iteration      50 to {tmp_path / 'run'}",
    ]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["iter_0000050", TRACKER]
    folder = tmp_path / "run" / "iter_0000050"
    assert sorted(path.name for path in folder.iterdir()) == ["index.json", "shard_00000.safetensors"]
    names = set(json.loads((folder / "index.json").read_text())["tensors"])
    assert "model.norm.weight" in names
    assert "optimizer.exp_avg.norm.weight" in names
    assert "rng.pp0.dp0.cp0.tp0.default" in names


def test_retention_options(tmp_path: Path, lines: list[str]) -> None:
    for iteration in range(10, 80, 10):
        save(tmp_path, iteration, lines, keep_last=2, keep_every=30)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["iter_0000030", "iter_0000060", "iter_0000070"]


def test_leftovers_of_an_interrupted_save_are_removed_at_the_start(tmp_path: Path, lines: list[str]) -> None:
    saved = save(tmp_path, 10, lines)
    half = tmp_path / ".iter_0000020.saving"
    half.mkdir()
    (half / "shard_00000.safetensors").write_bytes(b"half")
    lines.clear()
    prepare_save_directory(tmp_path, STATE, lines.append).release()
    assert lines == [f"removed {half}, left by an interrupted save"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", TRACKER]
    run, _ = load(tmp_path, lines)
    assert_equal_runs(run, saved)


def test_a_save_directory_that_cannot_be_made_is_refused(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="change --save"):
        prepare_save_directory(tmp_path / "file" / "run", STATE, lines.append)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Let no file of this process grow beyond 600 bytes: a real refusal by the operating system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, lines: list[str], small_disk: None) -> None:
    saved = save(tmp_path, 10, lines)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 20, lines)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    needed = (tmp_path / "iter_0000010" / "shard_00000.safetensors").stat().st_size
    assert str(tmp_path / ".iter_0000020.saving" / "shard_00000.safetensors") in str(caught.value)
    assert f"{needed} bytes are needed" in str(caught.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    run, _ = load(tmp_path, lines)
    assert_equal_runs(run, saved)


def test_the_tokenizer_travels_with_the_checkpoint(tmp_path: Path, lines: list[str]) -> None:
    def write(folder: Path) -> None:
        (folder / "vocab.json").write_text("{}")

    save_checkpoint(
        tmp_path,
        filled_run(STATE),
        common(10, write_tokenizer=write),
        STATE,
        CheckpointConfig(),
        lines.append,
    )
    found = read_common(tmp_path)
    assert found["tokenizer"] == tmp_path / "iter_0000010" / "tokenizer"
    assert (found["tokenizer"] / "vocab.json").read_text() == "{}"
    assert found["config"] == CONFIG
    assert found["progress"]["iteration"] == 10
    assert found["folder"] == tmp_path / "iter_0000010"


def test_a_tokenizer_that_cannot_be_written_leaves_nothing(tmp_path: Path, lines: list[str]) -> None:
    def write(folder: Path) -> None:
        raise OSError(2, "No such file or directory", "vocab.json")

    with pytest.raises(CheckpointError, match="No such file"):
        save_checkpoint(
            tmp_path,
            filled_run(STATE),
            common(10, write_tokenizer=write),
            STATE,
            CheckpointConfig(),
            lines.append,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_is_gone_costs_no_checkpoint(tmp_path: Path, lines: list[str]) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("written")
        raise TokenizerError("cannot read vocab.json")

    content = common(10, write_tokenizer=write)
    saved = filled_run(STATE)
    save_checkpoint(tmp_path, saved, content, STATE, CheckpointConfig(), lines.append)
    assert "WARNING: the checkpoint is saved without its tokenizer: cannot read vocab.json" in lines
    assert not (tmp_path / "iter_0000010" / "tokenizer").exists()
    assert read_common(tmp_path)["tokenizer"] is None
    run, _ = load(tmp_path, lines)
    assert_equal_runs(run, saved)


def test_state_that_is_not_plain_data_fails_before_anything_is_written(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(TypeError):
        save_checkpoint(
            tmp_path,
            filled_run(STATE),
            common(10, scheduler={"optimizer": object()}),
            STATE,
            CheckpointConfig(),
            lines.append,
        )
    assert list(tmp_path.iterdir()) == []


def test_the_record_of_a_hugging_face_folder_is_passed_on(tmp_path: Path, lines: list[str]) -> None:
    record = {"config": "{}", "files": {}}
    content = common(10, model_record=record)
    save_checkpoint(tmp_path, filled_run(STATE), content, STATE, CheckpointConfig(), lines.append)
    for options in ({}, {"finetune": True}):
        _, loaded = load(tmp_path, lines, **options)
        assert loaded is not None
        assert loaded.model_record == record
    assert read_common(tmp_path)["hugging_face"] == record
