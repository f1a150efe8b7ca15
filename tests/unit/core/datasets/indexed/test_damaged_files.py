"""Damaged files give one clear error or data of the file: random truncations and flips, in processes that may crash."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import DataError

FORK = multiprocessing.get_context("fork")
LARGEST_TOKEN = 499


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Give a folder in memory where there is one: thousands of small files are written."""
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as name:
        yield Path(name)


def write_data(folder: Path) -> list[str]:
    source = np.random.RandomState(7)
    prefixes = []
    for name, dtype, documents in (("one", np.uint16, 37), ("two", np.int32, 23)):
        prefixes.append(str(folder / name))
        with IndexedDatasetBuilder(folder / name, dtype) as builder:
            for _ in range(documents):
                lengths = source.randint(0, 30, size=source.randint(1, 4)).tolist()
                builder.add_document(source.randint(0, LARGEST_TOKEN + 1, size=sum(lengths)), lengths)
            builder.finalize()
    return prefixes


def read_all(prefixes: list[str], cache: Path, mapped: bool) -> list[str]:
    """Read every sample of a blend and of each data set, and check that they are made of tokens of the files."""
    lines: list[str] = []
    config = GPTDatasetConfig(
        sequence_length=16,
        blend=Blend(tuple(prefixes), (2.0, 1.0)),
        split="8,2,0",
        path_to_cache=str(cache),
        mmap_bin_files=mapped,
        eod_token_id=3,
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    builder = BlendedDatasetBuilder(config, (90, 11, 0), lines.append)
    builder.check()
    splits = builder.build()
    for dataset in (splits.train, splits.valid):
        assert dataset is not None
        for i in range(len(dataset)):
            sample = dataset[i]
            assert sample["tokens"].shape == (16,)
            assert 0 <= int(sample["tokens"].min()) <= int(sample["tokens"].max()) <= LARGEST_TOKEN
    for prefix in prefixes:
        dataset_of_sequences = IndexedDataset(prefix, mmap_bin_files=mapped)
        for i in range(len(dataset_of_sequences)):
            dataset_of_sequences[i]
    return lines


def damage(path: Path, choose: random.Random, may_flip: bool) -> str:
    whole = path.read_bytes()
    if may_flip and choose.random() < 0.8:
        content = bytearray(whole)
        # Headers are short, and worth as many flips as all the rest.
        position = choose.randrange(min(len(whole), 140) if choose.random() < 0.5 else len(whole))
        content[position] ^= 1 << choose.randrange(8)
        path.write_bytes(content)
        return f"byte {position} flipped"
    size = choose.randrange(len(whole))
    path.write_bytes(whole[:size])
    return f"cut to {size} of {len(whole)} bytes"


def damage_again_and_again(folder: Path, seed: int, count: int, results: Queue[Any]) -> None:
    """Damage one file at a time and report how many were refused, built again or read; say first what is tried."""
    choose = random.Random(seed)
    pristine, work = folder / "pristine", folder / f"work{seed}"
    outcomes: Counter[str] = Counter()
    for number in range(count):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(pristine, work)
        kind = choose.choice((".idx", ".bin", ".npy", ".npy", ".txt"))
        path = choose.choice(sorted(work.rglob(f"*{kind}")))
        cached = kind in (".npy", ".txt") or choose.random() < 0.5
        if not cached:
            shutil.rmtree(work / "cache")
        what = f"seed {seed}, number {number}: {path.name} {damage(path, choose, may_flip=kind != '.bin')}"
        (folder / f"attempt{seed}").write_text(what)
        try:
            lines = read_all([str(work / "one"), str(work / "two")], work / "cache", mapped=choose.random() < 0.5)
            outcomes["built again" if any("cannot be used" in line for line in lines) else "read"] += 1
        except DataError as error:
            outcomes["refused" if "\n" not in str(error) else "refused in several lines"] += 1
    results.put(outcomes)


def run_in_processes(folder: Path, batches: int, count: int) -> Counter[str]:
    (folder / "pristine").mkdir()
    read_all(write_data(folder / "pristine"), folder / "pristine" / "cache", mapped=True)
    total: Counter[str] = Counter()
    for seed in range(batches):
        results = FORK.Queue()
        process = FORK.Process(target=damage_again_and_again, args=(folder, seed, count, results))
        process.start()
        process.join(timeout=1200)
        assert process.exitcode == 0, (folder / f"attempt{seed}").read_text()
        total += results.get(timeout=10)
    return total


@pytest.mark.full
def test_damaged_files_are_refused_built_again_or_read(memory_folder: Path) -> None:
    outcomes = run_in_processes(memory_folder, 1, 250)
    assert outcomes.keys() == {"refused", "built again", "read"}
    assert min(outcomes.values()) > 10


@pytest.mark.long
def test_ten_thousand_damaged_files_are_refused_built_again_or_read(memory_folder: Path) -> None:
    outcomes = run_in_processes(memory_folder, 10, 1000)
    assert outcomes.total() == 10_000
    assert outcomes.keys() == {"refused", "built again", "read"}
    assert min(outcomes.values()) > 200
