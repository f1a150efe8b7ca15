"""The index cache: found by content, whole or absent, rebuilt where damaged, shared by many processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
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
from megatron.core.datasets.index_builder import NumpyIndexBuilder
from megatron.core.datasets.index_cache import IndexCache, find_damage
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.errors import DataError
from tests.unit.core.datasets.oracles import copy_documents

GOLDEN = Path(__file__).parents[3] / "golden" / "data"
NAMES = ("document_index", "sample_index", "shuffle_index")


def open_dataset(
    folder: Path | None,
    lines: list[str],
    prefix: Path = GOLDEN / "c_multi",
    num_samples: int = 60,
    sequences: range = range(97),
    split_name: str = "train",
    **options: object,
) -> GPTDataset:
    values = {"sequence_length": 64, "mock": True, "eod_token_id": 0} | options
    config = GPTDatasetConfig(**values)  # type: ignore[arg-type]
    cache = IndexCache(folder, lines.append)
    return GPTDataset(IndexedDataset(prefix), sequences, num_samples, split_name, config, NumpyIndexBuilder(), cache)


def content(dataset: GPTDataset) -> list[bytes]:
    return [getattr(dataset, name).tobytes() for name in NAMES]


def stems(folder: Path) -> set[str]:
    return {path.name.split("-")[0] for path in folder.glob("*-GPTDataset-*")}


def test_files_have_megatrons_names_and_are_read_again(tmp_path: Path) -> None:
    lines: list[str] = []
    built = open_dataset(tmp_path, lines)
    (stem,) = stems(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-GPTDataset-*")) == sorted(
        [f"{stem}-GPTDataset-train-description.txt", *(f"{stem}-GPTDataset-train-{name}.npy" for name in NAMES)]
    )
    text = (tmp_path / f"{stem}-GPTDataset-train-description.txt").read_text()
    assert stem == hashlib.md5(text.encode()).hexdigest()
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert content(open_dataset(tmp_path, lines)) == content(built) == content(open_dataset(None, lines))
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    assert lines == []


def test_everything_that_changes_the_index_changes_the_key(tmp_path: Path) -> None:
    other = tmp_path / "data" / "c_multi"
    other.parent.mkdir()
    with IndexedDatasetBuilder(other, np.int32) as builder:
        copy_documents(GOLDEN / "c_multi", builder)
        builder.add_document([1, 2, 3], [3])
        builder.finalize()
    cache, lines = tmp_path / "cache", list[str]()
    changes: list[dict[str, object]] = [
        {},
        {"random_seed": 1235},
        {"sequence_length": 32},
        {"num_samples": 150},
        {"sequences": range(96)},
        {"sequences": range(1, 97)},
        {"prefix": other},
        {"split_name": "valid"},
        {"split_name": "valid", "drop_last_partial_validation_sequence": False},
    ]
    for number, change in enumerate(changes, start=1):
        open_dataset(cache, lines, **change)  # type: ignore[arg-type]
        assert len(stems(cache)) == number, change
    assert lines == []


def test_what_does_not_change_the_index_keeps_the_key(tmp_path: Path) -> None:
    lines: list[str] = []
    moved = tmp_path / "moved" / "c_multi"
    moved.parent.mkdir()
    for suffix in (".bin", ".idx"):
        Path(f"{moved}{suffix}").write_bytes(Path(f"{GOLDEN / 'c_multi'}{suffix}").read_bytes())
    cache = tmp_path / "cache"
    same: list[dict[str, object]] = [
        {},
        {"prefix": moved},
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
        {"vocab_size": 77, "mmap_bin_files": False},
        {"num_samples": 59},  # the same epochs
    ]
    for change in same:
        open_dataset(cache, lines, **change)  # type: ignore[arg-type]
    assert len(stems(cache)) == 1
    assert lines == []


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_header(path: Path) -> None:
    path.write_bytes(b"XX" + path.read_bytes()[2:])


@pytest.mark.parametrize("name", [*NAMES, "description"])
@pytest.mark.parametrize("damage", [damage_truncate, damage_empty, damage_header])
def test_damaged_files_are_built_again(damage: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    lines: list[str] = []
    whole = content(open_dataset(tmp_path, lines))
    (path,) = tmp_path.glob(f"*-{name}.*")
    original = path.read_bytes()
    damage(path)
    assert content(open_dataset(tmp_path, lines)) == whole
    assert len(lines) == 1
    assert "cannot be used" in lines[0]
    assert "\n" not in lines[0]
    assert path.read_bytes() == original


def test_wrong_shapes_are_damage(tmp_path: Path) -> None:
    lines: list[str] = []
    whole = content(open_dataset(tmp_path, lines))
    (path,) = tmp_path.glob("*-shuffle_index.npy")
    np.save(path, np.arange(7, dtype=np.uint32))
    assert content(open_dataset(tmp_path, lines)) == whole
    assert "shuffle_index has shape (7,)" in lines[0]


@pytest.mark.parametrize("name", [*NAMES, "description"])
def test_missing_files_are_built_in_silence(name: str, tmp_path: Path) -> None:
    lines: list[str] = []
    whole = content(open_dataset(tmp_path, lines))
    (path,) = tmp_path.glob(f"*-{name}.*")
    path.unlink()
    assert content(open_dataset(tmp_path, lines)) == whole
    assert path.exists()
    assert lines == []


def test_flipped_array_bytes_give_an_error_or_tokens_of_the_data(tmp_path: Path) -> None:
    lines: list[str] = []
    open_dataset(tmp_path, lines)
    random = np.random.RandomState(3)
    refused = 0
    for name in NAMES:
        (path,) = tmp_path.glob(f"*-{name}.npy")
        original = path.read_bytes()
        for offset in random.randint(128, len(original), size=40):
            flipped = bytearray(original)
            flipped[offset] ^= 0x80
            path.write_bytes(flipped)
            dataset = open_dataset(tmp_path, lines)
            for i in range(len(dataset)):
                try:
                    assert 0 <= int(dataset[i]["tokens"].max()) < 1000
                except DataError:
                    refused += 1
        path.write_bytes(original)
    assert refused > 60


def test_an_unwritable_folder_means_memory_and_one_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "file").write_text("")  # a folder cannot be made below a file, not even by root
    dataset = open_dataset(tmp_path / "file" / "cache", lines)
    assert content(dataset) == content(open_dataset(None, []))
    assert len(lines) == 1
    assert "cannot be written" in lines[0]
    assert "--data-cache-path" in lines[0]


def test_the_default_folder_lies_beside_the_data(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    with IndexedDatasetBuilder(prefix, "u2") as builder:
        builder.add_document(range(100), [100])
        builder.finalize()
    config = GPTDatasetConfig(sequence_length=9, blend=Blend((str(prefix),)), split="1,0,0")
    BlendedDatasetBuilder(config, (5, 0, 0), print).build()
    folder = tmp_path / "cache" / "GPTDataset_indices"
    assert len(list(folder.glob("*-GPTDataset-train-*"))) == 4
    config = GPTDatasetConfig(sequence_length=9, blend=Blend((str(prefix),) * 2, (1.0, 2.0)), split="1,0,0")
    BlendedDatasetBuilder(config, (5, 0, 0), print).build()
    assert len(list(folder.glob("*-BlendedDataset-train-*"))) == 4


def test_pickled_data_sets_carry_file_names(tmp_path: Path) -> None:
    dataset = open_dataset(tmp_path, [], num_samples=2000)
    payload = pickle.dumps(dataset)
    assert len(payload) < 5000 < sum(map(len, content(dataset)))
    copy = pickle.loads(payload)
    assert content(copy) == content(dataset)
    assert copy[3]["tokens"].tolist() == dataset[3]["tokens"].tolist()
    in_memory = open_dataset(None, [], num_samples=2000)
    assert content(pickle.loads(pickle.dumps(in_memory))) == content(dataset)


def test_lengths_are_hashed_once_and_again_when_the_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, cache, hashed = tmp_path / "corpus", tmp_path / "cache", list[str]()

    def write(lengths: list[int]) -> None:
        with IndexedDatasetBuilder(prefix, "u2") as builder:
            builder.add_document(range(sum(lengths)), lengths)
            builder.finalize()

    def hash_lengths(dataset: IndexedDataset) -> str:
        hashed.append(dataset.prefix)
        return hashlib.md5(dataset.sequence_lengths.tobytes()).hexdigest()

    monkeypatch.setattr(IndexedDataset, "lengths_fingerprint", property(hash_lengths))
    write([40, 60])
    open_dataset(cache, [], prefix=prefix, num_samples=1, sequences=range(2))
    open_dataset(cache, [], prefix=prefix, num_samples=1, sequences=range(2))
    assert len(hashed) == 2  # it may still change within the same tick of the clock
    monkeypatch.setattr("megatron.core.datasets.indexed_dataset._SETTLED_AFTER_NS", 0)
    for _ in range(3):
        open_dataset(cache, [], prefix=prefix, num_samples=1, sequences=range(2))
    assert len(hashed) == 3
    write([70, 30])
    changed = open_dataset(cache, [], prefix=prefix, num_samples=1, sequences=range(2))
    assert len(hashed) == 4
    assert len(stems(cache)) == 2
    alone = open_dataset(None, [], prefix=prefix, num_samples=1, sequences=range(2))
    assert changed.sample_index.tolist() == alone.sample_index.tolist()
    for path in cache.glob("*-IndexedDataset-lengths.txt"):
        path.write_text(path.read_text().replace("a", "b").replace("1", "2"))
    open_dataset(cache, [], prefix=prefix, num_samples=1, sequences=range(2))
    assert len(hashed) == 6  # one for the data set in memory, one instead of the damaged text
    assert len(stems(cache)) == 2


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.npy.0123.tmp", tmp_path / ".b.npy.4567.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3700, time.time() - 3700))
    open_dataset(tmp_path, [])
    assert not old.exists()
    assert new.exists()


def test_a_blend_whose_counts_are_damaged_is_built_again(tmp_path: Path) -> None:
    config = GPTDatasetConfig(
        sequence_length=64,
        blend=Blend((str(GOLDEN / "a_u16"), str(GOLDEN / "c_multi")), (1.0, 2.0)),
        split="1",
        path_to_cache=str(tmp_path),
    )
    lines: list[str] = []
    BlendedDatasetBuilder(config, (30, 0, 0), lines.append).build()
    (path,) = tmp_path.glob("*-samples_taken.npy")
    whole = path.read_bytes()
    np.save(path, np.load(path) + 1)
    BlendedDatasetBuilder(config, (30, 0, 0), lines.append).build()
    assert [line for line in lines if "samples_taken do not sum to 30" in line]
    assert path.read_bytes() == whole


def test_a_text_is_computed_once_per_key_and_again_where_its_file_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    cache = IndexCache(folder, pytest.fail)
    computed = []

    def compute() -> str:
        computed.append(len(computed))
        return f"text{computed[-1]}"

    assert cache.remember("sum", {"size": 3, "name": "a"}, compute) == "text0"
    assert cache.remember("sum", {"size": 4, "name": "a"}, compute) == "text1"
    assert cache.remember("sum", {"name": "a", "size": 3}, compute) == "text0"
    assert cache.remember("sum", {"size": 4, "name": "a"}, compute) == "text1"
    assert computed == [0, 1]
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("text", "next"))
    assert cache.remember("sum", {"size": 3, "name": "a"}, compute) == "text2"
    assert cache.remember("sum", {"size": 3, "name": "a"}, compute) == "text2"
    assert IndexCache(None, pytest.fail).remember("sum", {"size": 3, "name": "a"}, compute) == "text3"


@pytest.mark.parametrize(
    "damaged",
    [np.zeros((3, 3), np.int32), np.zeros((3, 2), np.int64), np.zeros((2, 3), np.int32).T],
    ids=["shape", "dtype", "strides"],
)
def test_an_array_of_another_form_is_damaged(damaged: np.ndarray) -> None:
    expected = {"order": ((3, 2), np.dtype(np.int32))}
    assert find_damage({"order": np.zeros((3, 2), np.int32)}, expected) is None
    problem = find_damage({"order": damaged}, expected)
    assert problem == f"order has shape {damaged.shape} and dtype {damaged.dtype}, expected (3, 2) and int32"


def test_indices_of_earlier_versions_are_found(tmp_path: Path) -> None:
    """The names of the files and the fingerprint of a data set, which checkpoints hold too, never change."""
    open_dataset(tmp_path, [])
    assert stems(tmp_path) == {"05f9ccea6ff650d906f224d029502ca2"}
    assert IndexedDataset(GOLDEN / "c_multi").lengths_fingerprint == "57da35f23ec398a2b0302dc3bc49d3d1"


def test_an_index_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: dict[int, int] = {}
    real_replace = os.replace

    def fsync(descriptor: int) -> None:
        on_disk[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def replace(source: str | Path, target: str | Path) -> None:
        assert on_disk[os.stat(source).st_ino] == os.stat(source).st_size > 0
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    open_dataset(tmp_path, [])
    assert len(on_disk) >= 4


def test_nothing_is_left_of_an_index_that_cannot_be_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: Path, target: Path) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(os, "replace", replace)
    lines: list[str] = []
    assert content(open_dataset(tmp_path, lines)) == content(open_dataset(None, lines))
    assert list(tmp_path.iterdir()) == []
    assert len(lines) == 1
    assert "cannot be written (disk is full)" in lines[0]


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
