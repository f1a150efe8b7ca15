"""The owner of a folder: one at a time, whoever comes at whatever moment, and whoever is gone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.training.fault_tolerance import run_lock
from megatron.training.fault_tolerance.processes import ProcessIdentity, identify, start_time
from megatron.training.fault_tolerance.run_lock import (
    FolderInUseError,
    OwnerRecord,
    OwnerTimes,
    RunLock,
    own_folder,
)
from tests.harness.distributed import run_distributed

ELSEWHERE = ProcessIdentity("node7", "another machine", 4321, 99)
QUICK = OwnerTimes(renewed_every_s=0.05, expired_after_s=5.0, ending_s=5.0)


@pytest.fixture
def living():
    """Give a process that runs until the end of the test."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield identify(process.pid)
    process.communicate()


@pytest.fixture
def dead() -> ProcessIdentity:
    """Give a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    found = identify(process.pid)
    process.communicate()
    return found


def leave_record(
    directory: Path, process: ProcessIdentity, launcher: ProcessIdentity | None = None, age_s: float = 0.0
) -> Path:
    """Leave the record of an owner, renewed so long ago."""
    path = directory / ".owner.00000007"
    record = OwnerRecord(process, launcher, "0123abcd", "a training run")
    path.write_text(json.dumps(dataclasses.asdict(record)))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def own(directory: Path, lines: list[str] | None = None, token: str = "feed") -> RunLock:
    return own_folder(directory, token, "a training run", (lines or []).append, times=QUICK)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_free_folder_is_owned_and_released(tmp_path: Path) -> None:
    owner = own(tmp_path)
    assert names(tmp_path) == [".owner.00000001"]
    owner.check()
    owner.release()
    assert names(tmp_path) == []
    with pytest.raises(FolderInUseError, match="released by this run"):
        owner.check()
    assert names(tmp_path) == []


def test_a_live_owner_is_named_in_one_line(tmp_path: Path, living: ProcessIdentity) -> None:
    path = leave_record(tmp_path, living, age_s=12.0)
    with pytest.raises(FolderInUseError) as caught:
        own(tmp_path)
    assert str(caught.value) == (
        f"--save {tmp_path} is in use by a training run on {living.host}, process {living.pid} (its record was renewed "
        "12 s ago); wait for it to end, stop it, or use a different --save"
    )
    assert names(tmp_path) == [path.name]


def test_a_dead_owner_of_this_machine_is_followed_at_once(tmp_path: Path, dead: ProcessIdentity) -> None:
    leave_record(tmp_path, dead)
    own(tmp_path).check()
    assert names(tmp_path) == [".owner.00000008"]


def test_a_process_with_the_number_of_a_dead_owner_is_not_it(tmp_path: Path, living: ProcessIdentity) -> None:
    leave_record(tmp_path, dataclasses.replace(living, started=living.started - 1))
    own(tmp_path).check()


def test_an_owner_on_another_machine_is_followed_when_it_no_longer_renews(tmp_path: Path) -> None:
    leave_record(tmp_path, ELSEWHERE, age_s=QUICK.expired_after_s + 1.0)
    own(tmp_path).check()
    lines: list[str] = []
    for path in tmp_path.iterdir():
        path.unlink()
    leave_record(tmp_path, ELSEWHERE, age_s=QUICK.expired_after_s - 0.7)
    own_folder(tmp_path, "feed", "a training run", lines.append, times=QUICK).check()
    (line,) = lines
    assert line.startswith(f"waiting for a training run on node7, process 4321, which owns --save {tmp_path}: ")
    assert line.endswith("has not renewed its lock for 5 s")


def test_an_owner_on_another_machine_that_renews_is_alive(tmp_path: Path) -> None:
    path = leave_record(tmp_path, ELSEWHERE)
    renewal = threading.Timer(0.5, lambda: os.utime(path))
    renewal.start()
    with pytest.raises(FolderInUseError, match="node7, process 4321"):
        own(tmp_path)
    renewal.join()
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"process": 3}'])
def test_a_record_that_cannot_be_read_counts_until_it_is_old(text: str, tmp_path: Path) -> None:
    path = tmp_path / ".owner.00000003"
    path.write_text(text)
    os.utime(path, (time.time() - QUICK.expired_after_s - 1.0,) * 2)
    own(tmp_path).release()
    path.write_text(text)
    renewal = threading.Timer(0.5, lambda: os.utime(path))
    renewal.start()
    with pytest.raises(FolderInUseError, match="a run whose lock cannot be read"):
        own(tmp_path)
    renewal.join()


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".owner.00000001"
    os.mkfifo(path)
    assert OwnerRecord.read(path) is None
    os.utime(path, (time.time() - QUICK.expired_after_s - 1.0,) * 2)
    own(tmp_path).release()
    assert names(tmp_path) == []


def test_an_owner_whose_launcher_is_gone_is_waited_for(
    tmp_path: Path, living: ProcessIdentity, dead: ProcessIdentity
) -> None:
    path = leave_record(tmp_path, living, launcher=dead)
    end = threading.Timer(0.5, path.unlink)
    end.start()
    own(tmp_path).release()
    end.join()
    leave_record(tmp_path, living, launcher=dead)
    with pytest.raises(FolderInUseError, match=f"process {living.pid}"):
        own_folder(tmp_path, "feed", "a training run", print, times=dataclasses.replace(QUICK, ending_s=0.3))


def test_an_owner_that_was_followed_may_not_go_on(tmp_path: Path) -> None:
    first = own(tmp_path)
    second = own(tmp_path, token="beef")  # of the same process: a run in it has ended without a word
    second.check()
    with pytest.raises(FolderInUseError, match=r"was taken over by a training run on .* did not renew"):
        first.check()
    first.release()
    second.check()
    second.release()
    assert names(tmp_path) == []


def test_a_folder_that_was_emptied_is_owned_again(tmp_path: Path) -> None:
    owner = own(tmp_path / ".")
    (tmp_path / ".owner.00000001").unlink()
    owner.check()
    assert names(tmp_path) == [".owner.00000001"]
    owner.release()


def test_the_record_is_renewed_until_it_is_released(tmp_path: Path) -> None:
    owner = own(tmp_path)
    path = tmp_path / ".owner.00000001"
    os.utime(path, (0.0, 0.0))
    deadline = time.monotonic() + 20.0
    while path.stat().st_mtime < 1.0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    owner.release()


def test_a_later_owner_with_the_same_number_is_not_renewed_by_an_earlier_one(tmp_path: Path) -> None:
    own(tmp_path)
    path = leave_record(tmp_path, ELSEWHERE, age_s=100.0).rename(tmp_path / ".owner.00000001")
    renewed = path.stat().st_mtime
    time.sleep(0.3)
    assert path.stat().st_mtime == renewed


def test_files_in_a_folder_have_owners_of_their_own(tmp_path: Path, living: ProcessIdentity) -> None:
    leave_record(tmp_path, living)
    owner = own_folder(
        tmp_path, "feed", "a run", print, prefix=".metrics.jsonl.owner", given="--metrics-jsonl metrics.jsonl"
    )
    owner.check()
    owner.release()


def race(directory: str, start: float, num_rounds: int) -> list[bool]:
    """Try to own one folder after the other at agreed moments; return where that went well. Nobody releases."""
    owned = []
    for number in range(num_rounds):
        folder = Path(directory) / str(number)
        folder.mkdir(exist_ok=True)
        time.sleep(max(start + 0.3 * number - time.time(), 0.0))
        try:
            own_folder(folder, "feed", "a training run", print).check()
            owned.append(True)
        except FolderInUseError:
            owned.append(False)
    return owned


@pytest.mark.full
@pytest.mark.parametrize("is_taken_over", [False, True], ids=["new", "after a dead owner"])
def test_of_several_that_come_at_the_same_moment_exactly_one_is_the_owner(
    is_taken_over: bool, tmp_path: Path, dead: ProcessIdentity
) -> None:
    rounds = 10
    if is_taken_over:
        for number in range(rounds):
            (tmp_path / str(number)).mkdir()
            leave_record(tmp_path / str(number), dead)
    found = run_distributed(3, race, str(tmp_path), time.time() + 0.5, rounds)
    assert [sum(results) for results in zip(*found)] == [1] * rounds


def test_a_process_that_is_gone_has_no_start_time(dead: ProcessIdentity, living: ProcessIdentity) -> None:
    assert start_time(dead.pid) is None
    assert (dead.is_alive, living.is_alive, ELSEWHERE.is_alive) == (False, True, None)


def test_a_race_between_the_look_and_the_record_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody with an older view of the folder creates a lower number meanwhile: both look again."""
    leave_record(tmp_path, ELSEWHERE, age_s=100.0)
    real, created = run_lock._create, []

    def create(path: Path, record: OwnerRecord) -> None:
        if not created:
            (tmp_path / ".owner.00000003").write_text("")
            threading.Timer(0.5, (tmp_path / ".owner.00000003").unlink).start()
        created.append(path.name)
        real(path, record)

    monkeypatch.setattr(run_lock, "_create", create)
    own(tmp_path).check()
    assert created == [".owner.00000008", ".owner.00000008"]


def test_of_two_that_a_store_lets_create_one_record_the_later_one_is_the_owner(
    tmp_path: Path, living: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OwnerRecord(living, None, "0123abcd", "a training run")
    real = run_lock._create

    def create(path: Path, record: OwnerRecord) -> None:
        real(path, record)
        path.write_text(json.dumps(dataclasses.asdict(other)))

    monkeypatch.setattr(run_lock, "_create", create)
    with pytest.raises(FolderInUseError, match=f"process {living.pid} "):
        own(tmp_path)
    assert OwnerRecord.read(tmp_path / ".owner.00000001") == other
