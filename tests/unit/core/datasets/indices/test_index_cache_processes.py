"""The index cache among processes: many at once on an empty folder, and processes that are killed while they build."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig

GOLDEN = Path(__file__).parents[4] / "golden" / "data"
FORK = multiprocessing.get_context("fork")
RANKS, JOBS = 8, 2


def build(folder: Path, num_samples: int) -> tuple[BlendedDataset, list[str]]:
    """Build a blend of two data sets, with its indices, and return what was reported."""
    lines: list[str] = []
    blend = Blend((str(GOLDEN / "a_u16"), str(GOLDEN / "b_i32")), (3.0, 2.0))
    config = GPTDatasetConfig(sequence_length=64, blend=blend, split="1", path_to_cache=str(folder))
    train = BlendedDatasetBuilder(config, (num_samples, 0, 0), lines.append).build().train
    assert isinstance(train, BlendedDataset)
    return train, lines


def digest(train: BlendedDataset) -> str:
    content = hashlib.md5(train.dataset_index.tobytes() + train.dataset_sample_index.tobytes())
    for part in train.datasets:
        assert isinstance(part, GPTDataset)
        for array in (part.document_index, part.sample_index, part.shuffle_index):
            content.update(array.tobytes())
    for i in range(0, len(train), 97):
        content.update(train[i]["tokens"].tobytes())
    return content.hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def build_at_once(folder: Path, barrier: Barrier, results: Queue[Any]) -> None:
    barrier.wait()
    train, lines = build(folder, 2000)
    results.put((digest(train), [line for line in lines if "WARNING" in line]))


def share_one_empty_cache(folder: Path) -> str:
    """Let every rank of every job build at the same time, which is worse than what a run does."""
    barrier, results = FORK.Barrier(RANKS * JOBS), FORK.Queue()
    workers = [FORK.Process(target=build_at_once, args=(folder, barrier, results)) for _ in range(RANKS * JOBS)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert [warnings for _, warnings in found] == [[]] * len(workers)
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
    (unique,) = {one for one, _ in found}
    return str(unique)


@pytest.mark.full
def test_eight_ranks_of_two_jobs_share_one_empty_cache(tmp_path: Path) -> None:
    digests = {share_one_empty_cache(tmp_path / str(attempt)) for attempt in range(2)}
    assert digests == {digest(build(tmp_path / "alone", 2000)[0])}


@pytest.mark.long
def test_eight_ranks_of_two_jobs_share_one_empty_cache_twenty_times(tmp_path: Path) -> None:
    digests = {share_one_empty_cache(tmp_path / str(attempt)) for attempt in range(20)}
    assert digests == {digest(build(tmp_path / "alone", 2000)[0])}


def start(target: Callable[..., object], *arguments: object) -> BaseProcess:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    return process


def build_and_die(folder: Path, num_samples: int, calls: int) -> None:
    """Build, and be killed at one of the calls that change what others can see; 0 builds to the end."""
    left = [calls]

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for module, name in ((os, "replace"), (os, "fsync"), (np, "save")):
        setattr(module, name, dying(getattr(module, name)))
    build(folder, num_samples)


@pytest.mark.full
def test_killed_at_every_step_of_publishing_the_files_end_the_same(tmp_path: Path) -> None:
    build(tmp_path / "alone", 500)
    expected = files_of(tmp_path / "alone")
    killed = 0
    for calls in range(1, 60):
        process = start(build_and_die, tmp_path / "killed", 500, calls)
        process.join(timeout=60)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        left = files_of(tmp_path / "killed")
        assert left.items() <= expected.items()  # what has its final name is whole
        fresh = tmp_path / f"fresh{calls}"
        start(build_and_die, fresh, 500, calls).join(timeout=60)
        build(fresh, 500)
        assert files_of(fresh) == expected
    assert killed >= 6
    assert files_of(tmp_path / "killed") == expected


def kill_at_random_points(folder: Path, num_samples: int, kills: int) -> None:
    begin = time.perf_counter()
    build(folder / "alone", num_samples)
    duration = time.perf_counter() - begin
    expected = files_of(folder / "alone")
    delays = random.Random(5)
    killed = 0
    for attempt in range(10 * kills):
        process = start(build, folder / "killed", num_samples)
        time.sleep(delays.uniform(0.0, duration))
        process.kill()
        process.join(timeout=60)
        killed += process.exitcode == -signal.SIGKILL
        if killed == kills:
            break
        if process.exitcode == 0:  # done before it was to be killed: begin anew
            for path in (folder / "killed").iterdir():
                path.unlink()
        assert attempt < 10 * kills - 1, "the process was nearly always done before it was to be killed"
    build(folder / "killed", num_samples)
    assert files_of(folder / "killed") == expected


@pytest.mark.long
def test_killed_at_random_points_the_files_end_the_same(tmp_path: Path) -> None:
    kill_at_random_points(tmp_path, 20_000, 5)


@pytest.mark.long
def test_killed_at_twenty_random_points_the_files_end_the_same(tmp_path: Path) -> None:
    kill_at_random_points(tmp_path, 2_000_000, 20)
