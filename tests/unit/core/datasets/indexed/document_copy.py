"""Copy the documents of one data set into another, one by one: the slow way, which others are held against."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder


def copy_documents(prefix: Path, builder: IndexedDatasetBuilder) -> None:
    source = IndexedDataset(prefix)
    indices, modes = source.document_indices.tolist(), source.sequence_modes
    for first, last in itertools.pairwise(indices):
        sequences = [source[i] for i in range(first, last)]
        builder.add_document(
            np.concatenate([np.empty(0, source.dtype), *sequences]),
            [len(sequence) for sequence in sequences],
            () if modes is None else modes[first:last].tolist(),
        )
