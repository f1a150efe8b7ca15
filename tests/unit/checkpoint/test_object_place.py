"""Checkpoints in an object store: there with their index, whole whenever the writer dies, and gone with it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.checkpoint import checkpoint_folder
from megatron.checkpoint import save as saving
from megatron.checkpoint.checkpoint_folder import (
    ObjectPlace,
    candidate_folders,
    complete_iterations,
    is_known,
    mark_known,
    point_tracker,
    recover_objects,
    saved_iterations,
)
from megatron.checkpoint.save import prepare_save_directory
from megatron.core import object_store
from megatron.core.dist_checkpointing.disk import CheckpointWriteError
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.errors import CheckpointError, InputError
from megatron.core.object_store import ObjectPath, as_path
from megatron.training.fault_tolerance.processes import identify
from megatron.training.fault_tolerance.run_lock import FolderInUseError, OwnerRecord
from tests.harness.object_faults import MEMORY, ChangingOperations, Killed, Unreachable, empty_memory_store
from tests.unit.checkpoint.toy_checkpoint import STATE, TRACKER, load, save
from tests.unit.core.dist_checkpointing.toy import assert_equal_runs, filled_run

RUN = "memory://bucket/run"


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(object_store, "_DELAYS_S", (0.0,))
    with empty_memory_store():
        yield


def folder() -> ObjectPath:
    path = as_path(RUN)
    assert isinstance(path, ObjectPath)
    return path


def names(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir()]


def numbered(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the next saves be those of a run with this number."""
    place_of = checkpoint_folder.place_of
    monkeypatch.setattr(saving, "place_of", lambda directory, token, _: place_of(directory, token, number))


def other_run() -> CheckpointState:
    run = filled_run(STATE)
    for model in run.models:
        for parameter in model.parameters():
            parameter.data[parameter.data != -7.0] += 1.0  # the padding is not saved
    return run


def test_a_checkpoint_comes_back_bitwise_and_holds_its_index_last() -> None:
    lines: list[str] = []
    run = save(folder(), 10, lines)
    loaded_run, loaded = load(folder(), lines)
    assert loaded is not None
    assert loaded.progress.iteration == 10
    assert str(loaded.folder) == f"{RUN}/iter_0000010"
    assert_equal_runs(run, loaded_run)
    assert names(folder()) == ["iter_0000010", TRACKER]
    assert f"saving checkpoint at iteration      10 to {RUN}" in lines


def test_a_checkpoint_without_its_index_does_not_exist() -> None:
    save(folder(), 10, [])
    save(folder(), 20, [])
    (folder() / "iter_0000020" / "index.json").unlink()
    assert saved_iterations(folder()) == complete_iterations(folder()) == [10]
    point_tracker(folder(), 10)
    assert [path.name for path in candidate_folders(folder())] == ["iter_0000010"]


def test_retention_removes_the_index_first(monkeypatch) -> None:
    for iteration in (10, 20, 30):
        save(folder(), iteration, [])
    deleted: list[str] = []
    for name in ("rm_file", "rm"):
        real = getattr(MEMORY, name)
        monkeypatch.setattr(
            MEMORY, name, lambda self, path, real=real, **named: deleted.append(path) or real(self, path, **named)
        )
    save(folder(), 40, [], keep_last=2, keep_every=20)
    assert saved_iterations(folder()) == [20, 30, 40]
    removed = [path for path in deleted if "/iter_0000010" in path]
    assert removed[0].endswith("/iter_0000010/index.json")
    assert names(folder()) == ["iter_0000020", "iter_0000030", "iter_0000040", TRACKER]


def test_a_second_save_of_an_iteration_replaces_the_first_in_one_step(monkeypatch) -> None:
    save(folder(), 10, [])
    mark_known(folder(), 10, 3)
    before = names(folder() / "iter_0000010")
    numbered(monkeypatch, 2)
    run = save(folder(), 10, [], other_run())
    after = names(folder() / "iter_0000010")
    assert len(after) == len(before) - 1
    assert not is_known(folder(), 10)
    assert_equal_runs(run, load(folder(), [])[0])


def count_operations(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    with monkeypatch.context() as context:
        operations = ChangingOperations(context)
        work()
    return operations.count


@pytest.mark.parametrize("case", ["new", "replaced", "retention"])
def test_whenever_the_writer_dies_the_old_or_the_new_checkpoint_is_whole(monkeypatch, case: str) -> None:
    iteration = {"new": 20, "replaced": 10, "retention": 20}[case]
    options = {"keep_last": 1} if case == "retention" else {}
    old, new = filled_run(STATE), other_run()

    def begin() -> None:
        object_store.open_store(RUN).delete_folder(RUN)
        numbered(monkeypatch, 1)
        save(folder(), 10, [], old)
        numbered(monkeypatch, 2)

    begin()
    total = count_operations(monkeypatch, lambda: save(folder(), iteration, [], new, **options))
    assert total > 5
    outcomes = []
    for last in range(total):
        begin()
        with monkeypatch.context() as context:
            ChangingOperations(context, last)
            with pytest.raises(Killed):
                save_killed(iteration, new, options)
        lines: list[str] = []
        recover_objects(folder(), lines.append)
        found, loaded = load(folder(), lines)
        assert loaded is not None
        assert not any(line.startswith("WARNING") for line in lines), lines
        is_new = any(parameter.equal(other) for parameter, other in _weights(found, new))
        assert_equal_runs(found, new if is_new else old)
        outcomes.append(is_new)
        assert not [name for name in names(folder()) if name.startswith(".")]
        for kept in saved_iterations(folder()):
            assert len(names(folder() / f"iter_{kept:07d}")) == 2
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def save_killed(iteration: int, run: CheckpointState, options: dict[str, int]) -> None:
    """Save in this thread, so that the end of the process ends the save too."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr("megatron.core.dist_checkpointing.async_save.threading.Thread", _AtOnce)
        save(folder(), iteration, [], run, **options)


class _AtOnce:
    """Do a thread's work where it is started."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self._target = target

    def start(self) -> None:
        self._target()

    def join(self) -> None:
        return

    def is_alive(self) -> bool:
        return False


def _weights(left: CheckpointState, right: CheckpointState) -> Iterator[tuple]:
    for ours, theirs in zip(left.models, right.models):
        yield from zip(ours.parameters(), theirs.parameters())


def test_a_shard_that_is_not_whole_in_the_store_is_not_published(monkeypatch) -> None:
    save(folder(), 10, [])
    real = ObjectPlace.finish

    def lose_bytes(self, iteration, index):
        shard = next(path for path in self.folder(iteration).iterdir())
        shard.write_bytes(shard.read_bytes()[:-1])
        real(self, iteration, index)

    monkeypatch.setattr(ObjectPlace, "finish", lose_bytes)
    with pytest.raises(CheckpointWriteError, match=r"cannot write memory://.*: the store has"):
        save(folder(), 20, [])
    assert names(folder()) == ["iter_0000010", TRACKER]


def test_of_two_runs_that_save_an_iteration_the_first_has_it(monkeypatch) -> None:
    real = ObjectPlace.finish
    others = []

    def come_second(self, iteration, index):
        if not others:
            others.append(self)
            (self.folder(iteration) / "index.json").create(b"{}")
            monkeypatch.setattr(object_store.ObjectStore, "entries", _without_index(object_store.ObjectStore.entries))
        real(self, iteration, index)

    monkeypatch.setattr(ObjectPlace, "finish", come_second)
    with pytest.raises(CheckpointWriteError, match=r"index\.json: it exists already"):
        save(folder(), 10, [])
    assert (folder() / "iter_0000010" / "index.json").read_bytes() == b"{}"


def _without_index(real):
    return lambda self, url: [entry for entry in real(self, url) if entry.name != "index.json"]


def test_an_upload_that_fails_is_repeated_and_then_given_up(monkeypatch) -> None:
    real = object_store.ObjectStore.upload
    failures = [1]

    class Failing:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            if failures and failures.pop():
                raise Unreachable("reset by peer")
            return self._file.write(data)

        def close(self):
            self._file.close()

    monkeypatch.setattr(object_store.ObjectStore, "upload", lambda self, *words: Failing(real(self, *words)))
    run = save(folder(), 10, [])
    assert_equal_runs(run, load(folder(), [])[0])
    failures[:] = [1] * 50
    with pytest.raises(CheckpointWriteError, match=r"cannot write memory://.*: reset by peer"):
        save(folder(), 20, [])
    assert names(folder()) == ["iter_0000010", TRACKER]


def test_a_store_that_does_not_answer_is_not_taken_for_a_damaged_checkpoint(monkeypatch) -> None:
    save(folder(), 10, [])
    save(folder(), 20, [])
    real = MEMORY.cat_file

    def answer(self, path, *bounds, **named):
        if "/iter_0000020/shard" in path:
            raise Unreachable("reset by peer")
        return real(self, path, *bounds, **named)

    monkeypatch.setattr(MEMORY, "cat_file", answer)
    lines: list[str] = []
    with pytest.raises(InputError, match="reset by peer"):
        load(folder(), lines)
    assert not any("falling back" in line for line in lines)


def test_a_damaged_checkpoint_is_passed_over_for_the_older_one() -> None:
    run = save(folder(), 10, [])
    save(folder(), 20, [], other_run())
    shard = next((folder() / "iter_0000020").glob("shard_*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 4
    shard.write_bytes(bytes(data))
    lines: list[str] = []
    found, loaded = load(folder(), lines)
    assert loaded is not None
    assert loaded.progress.iteration == 10
    assert any("is damaged" in line and "falling back to memory://" in line for line in lines)
    assert_equal_runs(run, found)


def test_a_folder_has_one_owner_and_what_a_dead_one_left_is_cleared() -> None:
    place = ObjectPlace(folder(), "0abc-1")
    place.create(20)
    (place.folder(20) / "shard_00000.0abc-1.safetensors").write_bytes(b"half")
    save(folder(), 10, [])
    lines: list[str] = []
    folders = prepare_save_directory(RUN, STATE, lines.append)
    assert lines == [f"removed the files that an interrupted save left in {RUN}/iter_0000020"]
    assert folders.is_shared
    folders.check_owner()
    record = next(folder().glob(".owner.*"))
    record.write_bytes(record.read_bytes().replace(b'"token": "', b'"token": "f'))
    with pytest.raises(FolderInUseError, match=rf"--save {RUN} was taken over by a training run"):
        folders.check_owner()
    folders.release()


def test_a_folder_of_a_live_run_is_refused() -> None:
    owner = OwnerRecord(identify(os.getppid()), None, "f00d", "a training run")
    (folder() / ".owner.00000003").write_bytes(json.dumps(dataclasses.asdict(owner)).encode())
    with pytest.raises(
        FolderInUseError, match=rf"^--save {RUN} is in use by a training run on .*, process {os.getppid()} "
    ):
        prepare_save_directory(RUN, STATE, print)
    assert names(folder()) == [".owner.00000003"]


def test_only_the_native_format_is_read_from_a_store() -> None:
    (folder() / "config.json").write_bytes(b"{}")
    (folder() / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(
        CheckpointError, match=(f"{RUN} is in Hugging Face's format, but only the native format can be read")
    ):
        load(folder(), [])
