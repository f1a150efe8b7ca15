"""What a restart knows of the checkpoints of its run, in a folder and in an object store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config.run_config import CheckpointConfig
from megatron.core.object_store import as_path
from megatron.training import resume
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.preflight import report_earlier_run
from tests.harness.object_faults import empty_memory_store
from tests.unit.checkpoint.toy_checkpoint import STATE, save

PLACES = ("folder", "memory://bucket/run")


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with empty_memory_store():
        yield


def place(name: str, tmp_path: Path) -> Path:
    return as_path(name) if "://" in name else tmp_path / name


@pytest.mark.parametrize("name", PLACES)
def test_checkpoints_of_before_the_run_are_known(name: str, tmp_path: Path) -> None:
    directory = place(name, tmp_path)
    save(directory, 5, [])
    time.sleep(0.02)
    started = time.time()
    time.sleep(0.02)
    save(directory, 7, [])
    assert resume.checkpoints_before(str(directory), started) == {5}
    assert resume.checkpoints_before(str(directory), time.time() + 1) == {5, 7}


@pytest.mark.parametrize("name", PLACES)
def test_copies_that_are_older_than_a_checkpoint_are_seen_to_be(name: str, tmp_path: Path) -> None:
    directory = place(name, tmp_path)
    save(directory, 5, [])
    checkpoint = CheckpointConfig(save=str(directory), load=str(directory))
    config: Any = SimpleNamespace(checkpoint=checkpoint)
    runtime: Any = SimpleNamespace(is_reporter=True, state=STATE)
    for iteration, expected in ((4, True), (5, False)):
        found: Any = SimpleNamespace(iteration=iteration)
        assert resume._is_older(found, config, config, runtime) is expected
    other: Any = SimpleNamespace(checkpoint=replace(checkpoint, load=None))
    assert resume._is_older(SimpleNamespace(iteration=4), other, other, runtime) is False  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLACES)
def test_a_run_that_goes_on_from_its_copies_owns_what_it_saved(name: str, tmp_path: Path) -> None:
    directory = str(place(name, tmp_path))
    came: list[Path] = []
    checkpoints: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=CheckpointConfig(save=directory)),
        saver=SimpleNamespace(resume_from=came.append),
    )
    RunCheckpoints.go_on(checkpoints, None, has_saved=True)
    assert [path.parent.resolve() for path in came] == [as_path(directory).resolve()]


@pytest.mark.parametrize("name", PLACES)
def test_a_run_that_replaces_another_one_is_warned_of(name: str, tmp_path: Path) -> None:
    directory, lines = str(place(name, tmp_path)), list[str]()
    checkpoint = CheckpointConfig(save=directory)
    config: Any = SimpleNamespace(checkpoint=checkpoint, training=SimpleNamespace(skip_train=False))
    report_earlier_run(config, lines.append)
    assert lines == []
    save(as_path(directory), 4, [])
    report_earlier_run(config, lines.append)
    assert lines == [
        f"WARNING: {directory} has a checkpoint of iteration 4, and --load is not set: this run starts from random "
        f"weights and replaces that run; to resume it, pass --resume {directory}"
    ]
    config.checkpoint = replace(checkpoint, load=directory)
    report_earlier_run(config, lines.append)
    report_earlier_run(SimpleNamespace(checkpoint=checkpoint, training=SimpleNamespace(skip_train=True)), lines.append)  # type: ignore[arg-type]
    assert len(lines) == 1
