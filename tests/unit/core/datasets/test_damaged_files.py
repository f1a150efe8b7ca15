"""Damaged, forged and cut token files give one clear error, or data of the file."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import (
    INDEX_HEADER,
    IndexedDataset,
    IndexedDatasetBuilder,
    report_lost_pages,
)
from megatron.core.errors import DataError, InputError
from tests.harness.bounded import bad_cases
from tests.harness.mutations import mutated_bytes
from tests.harness.training_run import REPOSITORY
from tests.unit.config.command_lines import write_data_set

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


_COUNTS = (0, 1, 99, 101, 2**31, 2**32, 2**60, 2**62, 2**63, 2**64 - 1)


def mutated_index(data: bytes, draw: Random) -> bytes:
    """Return an index with other counts in its header, other entries, or damaged bytes."""
    if draw.random() < 0.4:
        return mutated_bytes(data, draw)
    magic, version, code, sequences, documents = INDEX_HEADER.unpack_from(data)
    body = bytearray(data[INDEX_HEADER.size :])
    kind = draw.randrange(3)
    if kind == 0:
        sequences, documents = draw.choice((*_COUNTS, sequences)), draw.choice((*_COUNTS, documents))
    elif kind == 1:
        code = draw.randrange(256)
    else:
        place = draw.randrange(0, len(body) - 8, 4)
        body[place : place + 8] = struct.pack("<q", draw.choice((-1, 1, 2**31, 2**62, -(2**63), 601, 5)))
    return INDEX_HEADER.pack(magic, version, code, sequences, documents) + body


def attempts(tmp_path: Path) -> Callable[[int], None]:
    """Return what reads all of a data set whose index is mutated."""
    prefix = tmp_path / "data"
    write_data_set(prefix)
    index = tmp_path / "data.idx"
    original = index.read_bytes()

    def attempt(number: int) -> None:
        draw = Random(f"index {number}")
        new = tmp_path / "data.idx.new"
        new.write_bytes(mutated_index(original, draw))
        os.replace(new, index)
        message = "none"
        try:
            data = IndexedDataset(str(prefix), mmap_bin_files=draw.random() < 0.5)
            for sequence in range(len(data)):
                assert data[sequence].nbytes <= 600
        except InputError as error:
            message = str(error)
        assert message

    attempt(0)
    return attempt


def test_mutated_indices_are_read_or_refused(tmp_path: Path) -> None:
    assert bad_cases(attempts(tmp_path), 500) == []


@pytest.mark.long
def test_ten_thousand_mutated_indices_are_read_or_refused(tmp_path: Path) -> None:
    assert bad_cases(attempts(tmp_path), 10_000) == []


PROGRAM = """
import os, sys
import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset import report_lost_pages
assert report_lost_pages(int(sys.argv[2])), "the extension is not built: see CONTRIBUTING.md"
view = IndexedDataset(sys.argv[1]).get(0)
os.truncate(sys.argv[1] + ".bin", 100)
exec(sys.argv[3])
"""
SUM = "print(int(view.sum()))"
SUM_OF_SHARED_MEMORY = """
import mmap
with open("/dev/shm/" + str(os.getpid()), "w+b") as file:
    os.unlink(file.name)
    file.truncate(8192)
    shared = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
    print(shared[5000])
"""


@pytest.fixture
def prefix() -> Iterator[str]:
    """Return a data set of a few pages, on a disk: files in shared memory are not reported."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path = Path(folder, "data")
        with IndexedDatasetBuilder(path, "i4", False) as builder:
            builder.add_document(np.arange(8192), [8192], ())
            builder.finalize()
        yield str(path)


def read(prefix: str, rank: int, program: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, prefix, str(rank), program]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("rank", "who"), [(0, "error: "), (3, "error: rank 3: ")])
def test_reading_a_lost_page_ends_the_process_with_a_line(rank: int, who: str, prefix: str) -> None:
    result = read(prefix, rank, SUM)
    assert result.returncode == 2
    assert result.stderr == (
        f"{who}{prefix}.bin became shorter while it was being read, or its disk failed; bring the whole file back and "
        "start again\n"
    )


def test_in_a_thread_as_well(prefix: str) -> None:
    result = read(prefix, 0, f"import threading\nthreading.Thread(target=lambda: {SUM}).start()")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no shared memory here")
def test_what_is_no_file_of_ours_ends_as_ever(prefix: str) -> None:
    result = read(prefix, 0, SUM_OF_SHARED_MEMORY)
    assert (result.returncode, result.stderr) == (-signal.SIGBUS, "")


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 100, 32764])
def test_a_cut_is_seen_before_the_next_read(num_bytes: int, mapped: bool, prefix: str) -> None:
    dataset = IndexedDataset(prefix, mmap_bin_files=mapped)
    assert dataset.get(0, 8190).tolist() == [8190, 8191]
    os.truncate(f"{prefix}.bin", num_bytes)
    with pytest.raises(DataError, match=r"data\.bin shrank below its 32768 bytes while it was in use; write it again$"):
        dataset.get(0, 8190)


def test_a_process_without_the_extension_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGBUS)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets._bus_error", None)
    assert not report_lost_pages(0)
    assert signal.getsignal(signal.SIGBUS) == before
