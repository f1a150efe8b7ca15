"""Run one task with megatron-core's code and print its seconds and a checksum of its arrays as JSON."""

from __future__ import annotations

# mypy: ignore-errors
# It runs against another package of the same name.
import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
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

warnings.simplefilter("ignore")

from megatron.core.datasets import helpers_cpp  # noqa: E402
from megatron.core.datasets.gpt_dataset import (  # noqa: E402
    GPTDataset,
    GPTDatasetConfig,
    _build_document_index,
    _build_shuffle_index,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402


class Tokenizer:
    """Say what the data set asks of a tokenizer."""

    vocab_size = VOCAB_SIZE
    eod = END_OF_DOCUMENT
    pad = -1
    unique_identifiers = "none"


def open_dataset(folder: Path, name: str, num_samples: int | None, resets: bool = False) -> GPTDataset:
    """Open a data set whose index is in the cache from the second time on."""
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQUENCE_LENGTH,
        blend=([str(folder / name)], None),
        split="1,0,0",
        tokenizer=Tokenizer(),
        path_to_cache=str(folder / "cache_reference"),
        reset_position_ids=resets,
        reset_attention_mask=resets,
        eod_mask_loss=resets,
    )
    tokens = IndexedDataset(str(folder / name), mmap=True)
    documents = np.arange(len(tokens.sequence_lengths), dtype=np.int32)
    return GPTDataset(tokens, str(folder / name), documents, num_samples, Split.train, config)


def blend(weights: Any, size: int) -> tuple[Any, Any]:
    """Make the arrays and have them filled, as the library's data set does."""
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers_cpp.build_blending_indices(dataset, sample, weights, len(weights), size, False)
    return dataset, sample


def exhaust(sizes: Any) -> tuple[Any, Any]:
    """Make the arrays and have them filled, as the library's data set does."""
    total = int(sizes.sum())
    dataset, sample = np.zeros(total, np.int16), np.zeros(total, np.int64)
    helpers_cpp.build_exhaustive_blending_indices(dataset, sample, sizes, len(sizes))
    return dataset, sample


def prepare(task: str, folder: Path) -> tuple[Callable[[], Any], Callable[[Any], list[Any]]]:
    """Return what to time, and what makes of its result the arrays to compare."""
    kind, _, rest = task.partition("_")
    if kind == "sample":
        build = getattr(helpers_cpp, task.replace("sample_index", "build_sample_idx"))
        lengths, documents = np.load(folder / "lengths.npy"), np.load(folder / "documents.npy")
        tokens = int(lengths.sum(dtype=np.int64))
        return (lambda: build(lengths, documents, SEQUENCE_LENGTH, NUM_EPOCHS, tokens, True, 1)), lambda index: [index]
    if kind == "document":
        sequences = np.arange(len(np.load(folder / "lengths.npy", mmap_mode="r")), dtype=np.int32)
        return (lambda: _build_document_index(sequences, NUM_EPOCHS, np.random.RandomState(SEED), False)), lambda i: [i]
    if kind == "shuffle":
        total = large_samples(folder)
        return (lambda: _build_shuffle_index(total, total, np.random.RandomState(SEED))), lambda index: [index]
    if task == "blend_64_exhaustive":
        sizes = exhaustive_sizes(64, BLEND_SAMPLES[64])
        return (lambda: exhaust(sizes)), list
    if kind == "blend":
        num_datasets, weights_kind = rest.split("_")
        weights, size = blend_weights(int(num_datasets), weights_kind), BLEND_SAMPLES[int(num_datasets)]
        return (lambda: blend(weights, size)), list
    if task == "open_cached":
        num_samples = large_samples(folder)
        open_dataset(folder, "large", num_samples)
        return (lambda: open_dataset(folder, "large", num_samples)), lambda dataset: [np.int64(len(dataset))]
    if task == "read_sequences":
        tokens = IndexedDataset(str(folder / "text"), mmap=True)
        order = np.random.RandomState(5).randint(0, len(tokens), size=200_000).tolist()
        return (lambda: read(tokens, order)), list
    dataset = open_dataset(folder, "text", None, resets=task.endswith("resets"))
    count = 400 if task.endswith("resets") else 10_000
    return (lambda: read(dataset, range(count))), lambda samples: [
        sample[key].numpy() for sample in samples for key in SAMPLE_ARRAYS
    ]


def main() -> None:
    """Run the command line: task, folder, repeats."""
    task, folder, repeats = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    function, arrays = prepare(task, folder)
    seconds, result = measure(function, repeats)
    print(json.dumps({**seconds, "digest": digest(arrays(result)), "version": version("megatron-core")}))


if __name__ == "__main__":
    main()
