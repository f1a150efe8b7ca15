"""Run one task with this project's code and print its seconds and a checksum of its arrays as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tasks import (
    BLEND_SAMPLES,
    END_OF_DOCUMENT,
    NUM_EPOCHS,
    SAMPLE_ARRAYS,
    SEED,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    blend_weights,
    digest,
    exhaustive_sizes,
    large_samples,
    measure,
    read,
)

from megatron.core.datasets import _helpers
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.datasets.index_builder import CompiledIndexBuilder
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset

BUILDER = CompiledIndexBuilder(_helpers)


def open_dataset(folder: Path, name: str, num_samples: int | None, resets: bool = False) -> GPTDataset:
    """Open a data set whose index is in the cache from the second time on."""
    config = GPTDatasetConfig(
        sequence_length=SEQUENCE_LENGTH,
        random_seed=SEED,
        mock=True,  # the data set is opened here, not by the configuration
        eod_token_id=END_OF_DOCUMENT,
        vocab_size=VOCAB_SIZE,
        reset_position_ids=resets,
        reset_attention_mask=resets,
        eod_mask_loss=resets,
    )
    tokens = IndexedDataset(folder / name)
    cache = IndexCache(folder / "cache_ours", print)
    return GPTDataset(tokens, range(len(tokens)), num_samples, "train", config, BUILDER, cache)


def prepare(task: str, folder: Path) -> tuple[Callable[[], Any], Callable[[Any], list[Any]]]:
    """Return what to time, and what makes of its result the arrays to compare."""
    kind, _, rest = task.partition("_")
    if kind == "sample":
        build = getattr(_helpers, task)
        lengths, documents = np.load(folder / "lengths.npy"), np.load(folder / "documents.npy")
        num_samples = large_samples(folder)
        return (lambda: build(lengths, documents, SEQUENCE_LENGTH, num_samples)), lambda index: [index]
    if kind == "document":
        sequences = np.arange(len(np.load(folder / "lengths.npy", mmap_mode="r")), dtype=np.int32)
        return (lambda: BUILDER.document_index(sequences, NUM_EPOCHS, np.random.RandomState(SEED))), lambda i: [i]
    if kind == "shuffle":
        total = large_samples(folder)
        return (lambda: BUILDER.shuffle_index(total, total, np.random.RandomState(SEED))), lambda index: [index]
    if task == "blend_64_exhaustive":
        sizes = exhaustive_sizes(64, BLEND_SAMPLES[64])
        return (lambda: BUILDER.exhaustive_blending_indices(sizes)), list
    if kind == "blend":
        num_datasets, weights_kind = rest.split("_")
        weights, size = blend_weights(int(num_datasets), weights_kind), BLEND_SAMPLES[int(num_datasets)]
        return (lambda: BUILDER.blending_indices(weights, size)), list
    if task == "open_cached":
        num_samples = large_samples(folder)
        open_dataset(folder, "large", num_samples)
        return (lambda: open_dataset(folder, "large", num_samples)), lambda dataset: [np.int64(len(dataset))]
    if task == "read_sequences":
        tokens = IndexedDataset(folder / "text")
        order = np.random.RandomState(5).randint(0, len(tokens), size=200_000).tolist()
        return (lambda: read(tokens, order)), list
    dataset = open_dataset(folder, "text", None, resets=task.endswith("resets"))
    count = 400 if task.endswith("resets") else 10_000
    return (lambda: read(dataset, range(count))), lambda samples: [s[key] for s in samples for key in SAMPLE_ARRAYS]


def main() -> None:
    """Run the command line: task, folder, repeats."""
    task, folder, repeats = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    function, arrays = prepare(task, folder)
    seconds, result = measure(function, repeats)
    print(json.dumps({**seconds, "digest": digest(arrays(result))}))


if __name__ == "__main__":
    main()
