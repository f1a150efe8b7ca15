"""Saving a run on one rank: what is written and kept, at once or meanwhile, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import checkpoint_folder
from megatron.checkpoint.checkpoint_folder import newest_known, saved_iterations
from megatron.checkpoint.load import load_checkpoint, read_common
from megatron.checkpoint.save import CommonState, prepare_save_directory
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.run_config import CheckpointConfig
from megatron.core.device import Device
from megatron.core.dist_checkpointing import shard_file
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.errors import CheckpointError, TokenizerError, TrainingError
from megatron.core.parallel_config import ONE_RANK
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.random import RngStreams
from megatron.training.checkpointing import CheckpointSaver, open_saver
from megatron.training.fault_tolerance.run_lock import FolderInUseError
from megatron.training.initialize import Runtime
from tests.harness.saved_checkpoint import save_checkpoint
from tests.unit.checkpoint.toy_checkpoint import CONFIG, STATE, TRACKER, common, load, save
from tests.unit.core.dist_checkpointing.toy import (
    assert_equal_runs,
    empty_run,
    filled_run,
)


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
    assert f"it needs {needed} bytes" in str(caught.value)
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


SAVER_STATE = describe_parallel_state(0, 1)
SAVER_CONFIG = {"model": {"num_layers": 4}}
SAVER_TRACKER = "latest_checkpointed_iteration.txt"


class Gate:
    """Keep every shard from being written until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        real = shard_file.write_shard

        def write(path, entries):
            assert self._open.wait(20.0)
            return real(path, entries)

        monkeypatch.setattr(shard_file, "write_shard", write)

    def open(self) -> None:
        self._open.set()

    def shut(self) -> None:
        self._open.clear()


def make_saver(directory: Path, lines: list[str], **options) -> CheckpointSaver:
    device = Device("cpu")
    rng = RngStreams(device, 1, ONE_RANK.place())
    config = CheckpointConfig(save=str(directory), **options)
    saver = open_saver(config, Runtime(device, SAVER_STATE, rng), lines.append)
    assert saver is not None
    return saver


def save_with_saver(
    saver: CheckpointSaver, iteration: int, run: CheckpointState | None = None, on_trial: frozenset[int] = frozenset()
) -> CheckpointState:
    run = filled_run(SAVER_STATE) if run is None else run
    saver.save(run, CommonState(progress=TrainProgress(iteration=iteration), config=SAVER_CONFIG), on_trial)
    return run


def poll_until(saver: CheckpointSaver, condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(2000):
        saver.poll()
        if condition():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not come to that")


def assert_loads(directory: Path, iteration: int) -> None:
    run = empty_run(SAVER_STATE)
    loaded = load_checkpoint(directory, run, SAVER_STATE, CheckpointConfig(), SAVER_CONFIG, lambda line: None)
    assert loaded is not None
    assert loaded.progress.iteration == iteration
    assert_equal_runs(run, filled_run(SAVER_STATE))


def names(directory: Path) -> list[str]:
    """Return what is in a directory beside the record of its owner."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".owner."))


def test_what_is_saved_is_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, lines = Gate(monkeypatch), []
    saver = make_saver(tmp_path, lines, async_save=True)
    run = save_with_saver(saver, 10)
    with torch.no_grad():
        for parameter in run.models[0].parameters():
            parameter.zero_()
    assert run.optimizer is not None
    run.optimizer.load_scalar_state({"step": 99})
    for _ in range(3):
        saver.poll()
    assert saver.is_saving
    (saving_name,) = names(tmp_path)
    assert re.fullmatch(r"\.iter_0000010\.[0-9a-f]{8}\.saving", saving_name)
    assert lines == [f"saving checkpoint at iteration      10 to {tmp_path}"]
    gate.open()
    poll_until(saver, lambda: not saver.is_saving)
    assert lines[1:] == [f"  successfully saved checkpoint at iteration      10 to {tmp_path}"]
    assert names(tmp_path) == ["iter_0000010", SAVER_TRACKER]
    assert_loads(tmp_path, 10)
    saver.check_last()


def test_a_rank_whose_files_are_not_written_takes_part_in_the_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agreement is a collective: a rank that leaves it out blocks the ranks that are ready."""
    gate, asked = Gate(monkeypatch), list[bool]()

    def agree(value: bool, group: Group) -> bool:
        asked.append(value)
        return value

    monkeypatch.setattr("megatron.training.checkpointing.any_rank", agree)
    saver = make_saver(tmp_path, [], async_save=True)
    save_with_saver(saver, 10)
    for _ in range(2):
        saver.poll()
    assert asked == [True, True]
    gate.open()
    poll_until(saver, lambda: not saver.is_saving)
    assert asked[-1] is False


def test_at_most_one_save_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, lines = Gate(monkeypatch), []
    saver = make_saver(tmp_path, lines, async_save=True)
    save_with_saver(saver, 10)
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    save_with_saver(saver, 20)
    assert saved_iterations(tmp_path) == [10]
    assert saver.is_saving
    saver.finish()
    assert not saver.is_saving
    assert saved_iterations(tmp_path) == [10, 20]
    assert_loads(tmp_path, 20)
    opener.join()


@pytest.mark.parametrize("async_save", [False, True])
def test_keep_last_three_keeps_exactly_three(tmp_path: Path, async_save: bool) -> None:
    saver = make_saver(tmp_path, [], async_save=async_save, keep_last=3)
    for iteration in range(1, 9):
        save_with_saver(saver, iteration)
        assert len(saved_iterations(tmp_path)) <= 3
    saver.finish()
    assert saved_iterations(tmp_path) == [6, 7, 8]
    assert names(tmp_path) == ["iter_0000006", "iter_0000007", "iter_0000008", SAVER_TRACKER]


def test_a_synchronous_save_is_done_when_it_returns(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, [])
    save_with_saver(saver, 10)
    assert not saver.is_saving
    assert_loads(tmp_path, 10)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_is_said_and_the_next_save_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    lines: list[str] = []
    saver = make_saver(tmp_path, lines, async_save=async_save)
    save_with_saver(saver, 10)
    saver.finish()

    def refuse(path, entries):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shard_file, "write_shard", refuse)
        save_with_saver(saver, 20)
        saver.finish()
    needed = (tmp_path / "iter_0000010" / "shard_00000.safetensors").stat().st_size
    token = saver._target.folders.token
    path = tmp_path / f".iter_0000020.{token}.saving" / "shard_00000.safetensors"
    assert lines[-1].startswith(
        f"WARNING: the checkpoint of iteration 20 was not saved: cannot write {path}: No space left on device; it "
        f"needs {needed} bytes, "
    )
    assert lines[-1].endswith(" are free; earlier checkpoints are unchanged")
    assert names(tmp_path) == ["iter_0000010", SAVER_TRACKER]
    with pytest.raises(TrainingError, match=r"the last checkpoint \(iteration 20\) was not saved: cannot write"):
        saver.check_last()
    assert_loads(tmp_path, 10)
    save_with_saver(saver, 30)
    saver.finish()
    saver.check_last()
    assert_loads(tmp_path, 30)


def test_a_refusal_to_publish_is_said_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    saver = make_saver(tmp_path, lines)
    save_with_saver(saver, 10)

    def refuse(directory: Path, iteration: int, token: str) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(checkpoint_folder, "publish", refuse)
    save_with_saver(saver, 20)
    assert f"cannot write {tmp_path / 'iter_0000020'}: {os.strerror(errno.EDQUOT)}" in lines[-1]
    assert names(tmp_path) == ["iter_0000010", SAVER_TRACKER]


def test_a_fault_of_the_program_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path, entries):
        raise ValueError("not a matter of the disk")

    monkeypatch.setattr(shard_file, "write_shard", fail)
    saver = make_saver(tmp_path, [], async_save=True)
    save_with_saver(saver, 10)
    with pytest.raises(ValueError, match="not a matter of the disk"):
        saver.finish()


def test_memory_is_taken_once_for_all_saves(tmp_path: Path) -> None:
    saver = make_saver(tmp_path, [], async_save=True, keep_last=1)
    save_with_saver(saver, 1)
    area = saver._target.area
    assert area is not None
    memory = [block.data_ptr() for block in area._blocks]
    assert memory
    for iteration in range(2, 6):
        save_with_saver(saver, iteration)
    saver.finish()
    assert [block.data_ptr() for block in area._blocks] == memory


def test_without_a_folder_nothing_is_saved(tmp_path: Path) -> None:
    device = Device("cpu")
    rng = RngStreams(device, 1, ONE_RANK.place())
    assert open_saver(CheckpointConfig(), Runtime(device, SAVER_STATE, rng), lambda line: None) is None


def test_checkpoints_of_another_run_are_never_removed(tmp_path: Path) -> None:
    first = make_saver(tmp_path, [])
    for iteration in (10, 20, 30):
        save_with_saver(first, iteration)
    first.close()
    anew = make_saver(tmp_path, [], keep_last=1)
    for iteration in (5, 20, 35):
        save_with_saver(anew, iteration)
    anew.close()
    assert saved_iterations(tmp_path) == [10, 30, 35]
    goes_on = make_saver(tmp_path, [], keep_last=1)
    goes_on.resume_from(tmp_path / "iter_0000035")
    save_with_saver(goes_on, 40)
    assert saved_iterations(tmp_path) == [40]


def test_a_checkpoint_known_to_train_lets_older_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    saver = make_saver(tmp_path, lines, keep_last=1)
    save_with_saver(saver, 10)
    save_with_saver(saver, 20, on_trial=frozenset({10}))
    save_with_saver(saver, 30, on_trial=frozenset({10, 20}))
    assert saved_iterations(tmp_path) == [10, 30]

    def refuse(*given: object) -> list[int]:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "remove_expired", refuse)
        assert saver.note_known(30, 2)
    assert lines[-1] == f"WARNING: could not remove an old checkpoint in {tmp_path}: Permission denied"
    assert newest_known(tmp_path) == 30
    assert saver.note_known(10, 2)
    assert saved_iterations(tmp_path) == [30]


def test_a_run_whose_folder_was_taken_over_saves_no_more(tmp_path: Path) -> None:
    first, lines = make_saver(tmp_path, []), []
    save_with_saver(first, 10)
    second = make_saver(tmp_path, lines)  # of this process: nobody is left who could say that the first one lives
    with pytest.raises(FolderInUseError, match="was taken over by a training run"):
        save_with_saver(first, 20)
    assert saved_iterations(tmp_path) == [10]
    save_with_saver(second, 15)
    with pytest.raises(FolderInUseError, match="was taken over by a training run"):
        first.go_back(10)
    assert (tmp_path / SAVER_TRACKER).read_text() == "15"
    second.close()
    first.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "iter_0000015", SAVER_TRACKER]
