"""How far the index of a split is built, for who watches it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.indices.index_builder import BlendIndices, IndexBuilder, SampleIndex

Told = Callable[[str, int, int], None]
"""Take the name of a split, how many of its samples are indexed, and how many there are."""


def untold(split: str, done: int, total: int) -> None:
    """Tell nobody how far it is."""


class CountedIndexBuilder:
    """Build by another index builder, and tell how much of a split is done.

    A sample is found in the text and then shuffled: half of the work each. What is taken from the cache is done at
    once. Nothing is told of what is built without a `begin`.
    """

    def __init__(self, builder: IndexBuilder, told: Told) -> None:
        self.name = builder.name
        self._builder = builder
        self._told = told
        self._split, self._total = "", 0
        self._done = self._share = 0

    def begin(self, split: str, num_samples: int) -> None:
        """Begin with a split that takes so many samples of its data sets."""
        self._split, self._total, self._done, self._share = split, num_samples, 0, 0
        self._tell(0)

    def next_data_set(self, num_samples: int) -> None:
        """Count the data set before as done, built or found, and begin with one of which so many are taken."""
        self._done, self._share = self._done + self._share, num_samples
        self._tell(0)

    def end(self) -> None:
        """Count the whole split as done."""
        self._tell(self._total)
        self._total = 0

    def document_index(
        self,
        documents: NDArray[np.int32],
        num_epochs: int,
        random_state: np.random.RandomState,
        separate_final_epoch: bool = False,
    ) -> NDArray[np.int32]:
        """Build it; see `IndexBuilder`."""
        return self._builder.document_index(documents, num_epochs, random_state, separate_final_epoch)

    def sample_index(
        self,
        lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
    ) -> SampleIndex:
        """Build it, and tell that half of the data set is done; see `IndexBuilder`."""
        built = self._builder.sample_index(lengths, document_index, sequence_length, num_samples)
        self._tell(self._share // 2)
        return built

    def shuffle_index(
        self, num_samples: int, total: int, random_state: np.random.RandomState
    ) -> NDArray[np.uint32] | NDArray[np.int64]:
        """Build it; see `IndexBuilder`."""
        return self._builder.shuffle_index(num_samples, total, random_state)

    def blending_indices(self, weights: NDArray[np.float64], size: int) -> BlendIndices:
        """Build them; see `IndexBuilder`."""
        return self._builder.blending_indices(weights, size)

    def exhaustive_blending_indices(self, sizes: NDArray[np.int64]) -> BlendIndices:
        """Build them; see `IndexBuilder`."""
        return self._builder.exhaustive_blending_indices(sizes)

    def _tell(self, more: int) -> None:
        if self._total > 0:
            self._told(self._split, min(self._done + more, self._total), self._total)
