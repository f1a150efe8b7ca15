"""Name what is measured, and write the files that both sides work on."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_EPOCHS = 10
SEQUENCE_LENGTH = 1024
SEED = 1234
END_OF_DOCUMENT = 0
VOCAB_SIZE = 50257
SAMPLE_ARRAYS = ("tokens", "labels", "loss_mask", "position_ids")  # what both sides return alike

BLEND_KINDS = ("random", "sizes", "equal")
BLEND_SAMPLES = {8: 20_000_000, 64: 10_000_000, 512: 2_000_000}


@dataclass(frozen=True)
class Task:
    """Name one thing to measure, how many samples a call gives, and what it shall take.

    That is ``ratio_wanted`` times less than the reference, and less than ``seconds_wanted``.
    """

    name: str
    count: int = 0
    ratio_wanted: float | None = None
    seconds_wanted: float | None = None


def tasks() -> list[Task]:
    """Return all tasks, in the order in which each round runs them."""
    blend_ratios = {64: 4.0, 512: 6.0}
    result = [Task(f"sample_index_int{bits}", ratio_wanted=3.0) for bits in (32, 64)]
    result += [Task(f"{name}_index", ratio_wanted=2.0) for name in ("document", "shuffle")]
    for size, samples in BLEND_SAMPLES.items():
        result += [Task(f"blend_{size}_{kind}", samples, blend_ratios.get(size)) for kind in BLEND_KINDS]
    result += [Task("blend_64_exhaustive", BLEND_SAMPLES[64]), Task("open_cached", seconds_wanted=0.05)]
    result += [
        Task("read_sequences", 200_000),
        Task("read_samples", 10_000, 3.0),
        Task("read_samples_resets", 400, 20.0),
    ]
    return result


def blend_weights(num_datasets: int, kind: str) -> Any:
    """Return weights that are scaled as both sides scale them."""
    random = np.random.RandomState(num_datasets)
    weights = {
        "random": random.rand(num_datasets) + 0.05,
        "sizes": np.exp(1.5 * random.randn(num_datasets)),
        "equal": np.ones(num_datasets),
    }[kind]
    weights = weights / weights.sum()
    return weights / weights.sum()


def exhaustive_sizes(num_datasets: int, num_samples: int) -> Any:
    """Return sizes of data sets that have about ``num_samples`` samples together."""
    random = np.random.RandomState(num_datasets)
    return random.randint(1, 2 * num_samples // num_datasets, size=num_datasets).astype(np.int64)


def write_inputs(folder: Path, num_documents: int) -> None:
    """Write lengths and shuffled documents for the indices, and a small data set of random text to read from."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, cut, write_index

    lengths = np.random.RandomState(1).randint(1, 4100, size=num_documents).astype(np.int32)
    np.save(folder / "lengths.npy", lengths)
    documents = np.tile(np.arange(num_documents, dtype=np.int32), NUM_EPOCHS)
    np.random.default_rng(3).shuffle(documents)
    np.save(folder / "documents.npy", documents)
    ones = np.ones(num_documents, np.int64)
    write_index(folder / "large.idx", np.dtype("<u2"), lambda: cut(lengths), lambda: cut(ones))
    with open(folder / "large.bin", "wb") as tokens:
        tokens.truncate(2 * int(lengths.sum(dtype=np.int64)))  # holes: only its size matters
    random = np.random.RandomState(2)
    with IndexedDatasetBuilder(folder / "text", np.uint16) as builder:
        for _ in range(20_000):
            document = random.randint(1, VOCAB_SIZE, size=random.randint(20, 1600))
            document[-1] = END_OF_DOCUMENT
            builder.add_document(document)
        builder.finalize()


def large_samples(folder: Path) -> int:
    """Return the samples of all epochs over the large data set."""
    tokens = int(np.load(folder / "lengths.npy", mmap_mode="r").sum(dtype=np.int64))
    return (NUM_EPOCHS * tokens - 1) // SEQUENCE_LENGTH


def digest(arrays: Sequence[Any]) -> str:
    """Return a checksum of the bytes of arrays."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).data.cast("B"), value)
    return f"{value:08x}"


def measure(function: Callable[[], Any], repeats: int) -> tuple[dict[str, list[float]], Any]:
    """Call a function some times after one call that is not counted; return the seconds of each and the last result.

    Processor seconds do not count the time in which other processes had the processor.
    The first call reads files and touches memory that the others use again.
    """
    seconds: dict[str, list[float]] = {"seconds": [], "processor_seconds": []}
    result = function()
    for _ in range(repeats):
        result = None  # its memory is given back before, not during, the next call
        start, start_processor = time.perf_counter(), time.process_time()
        result = function()
        seconds["processor_seconds"].append(time.process_time() - start_processor)
        seconds["seconds"].append(time.perf_counter() - start)
    return seconds, result


def read(dataset: Any, order: Sequence[int]) -> list[Any]:
    """Read in order, and keep the last ones."""
    for i in order[:-50]:
        dataset[i]
    return [dataset[i] for i in order[-50:]]
