"""A checkpoint appears whole and checked, or nothing is left of it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.conversion import STAGING_FOLDER, publish_checked
from megatron.core.errors import CheckpointError
from megatron.training.fault_tolerance.processes import identify
from megatron.training.fault_tolerance.run_lock import FolderInUseError, OwnerRecord


def write(directory: Path) -> Path:
    folder = directory / "iter_0000003"
    folder.mkdir()
    (folder / "file").write_text("new")
    (directory / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def accept(folder: Path) -> None:
    assert (folder / "file").read_text() == "new"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_appears_beside_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert publish_checked(tmp_path, 3, write, accept, print) == tmp_path / "iter_0000003"
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_nothing_is_left_of_what_is_refused(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        accept(folder)
        raise CheckpointError("wrong")

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(CheckpointError, match="wrong"):
        publish_checked(tmp_path / "there", 3, write, refuse, print)
    assert names(tmp_path / "there") == ["latest_checkpointed_iteration.txt"]
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "2"
    with pytest.raises(CheckpointError, match="wrong"):
        publish_checked(tmp_path / "new" / "deeper", 3, write, refuse, print)
    assert names(tmp_path) == ["there"]


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write into --save-dir .*/file/deeper: Not a directory; give"):
        publish_checked(tmp_path / "file" / "deeper", 3, write, accept, print)


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(CheckpointError, match="iter_0000003 exists already; remove it"):
        publish_checked(tmp_path, 3, write, accept, print)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file; name a folder"):
        publish_checked(tmp_path / "file", 3, write, accept, print)


def test_leftovers_of_an_interrupted_conversion_go_and_a_running_one_is_left_alone(tmp_path: Path) -> None:
    staging = tmp_path / STAGING_FOLDER
    (staging / "iter_0000003").mkdir(parents=True)
    descriptor = os.open(staging, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another conversion is writing"):
        publish_checked(tmp_path, 3, write, accept, print)
    assert names(staging) == ["iter_0000003"]
    os.close(descriptor)
    lines: list[str] = []
    publish_checked(tmp_path, 3, write, accept, lines.append)
    assert "interrupted" in lines[0]
    assert names(tmp_path) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_a_folder_that_a_run_saves_into_is_refused(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    record = OwnerRecord(identify(owner.pid), None, "feed", "a training run")
    (tmp_path / ".owner.00000001").write_text(json.dumps(dataclasses.asdict(record)))
    with pytest.raises(FolderInUseError, match=rf"--save-dir {tmp_path} is in use by a training run on .* --save-dir$"):
        publish_checked(tmp_path, 3, write, accept, print)
    assert names(tmp_path) == [".owner.00000001"]
    owner.communicate()
    publish_checked(tmp_path, 3, write, accept, print)
    assert names(tmp_path) == ["iter_0000003", "latest_checkpointed_iteration.txt"]
