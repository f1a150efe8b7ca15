"""Slow and plain forms that data sets are held against: a copy document by document, and dense attention masks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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


def dense_attention_mask(document_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return what may not be attended to: later tokens and other documents.

    Shapes: ``[s] -> [s, s]`` bool, True where attention is forbidden.
    """
    length = len(document_ids)
    later = np.triu(np.ones((length, length), np.bool_), k=1)
    forbidden: NDArray[np.bool_] = later | (document_ids[:, None] != document_ids[None, :])
    return forbidden
