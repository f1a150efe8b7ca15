"""Data sets composed of others: a weighted blend, a chain of segments, and a blend that starts in mid-run."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.conversation_dataset import FileSamples
from megatron.core.datasets.gpt_dataset import GPTSample, SampleDataset
from megatron.core.datasets.index_builder import IndexBuilder
from megatron.core.datasets.index_cache import Arrays, IndexArrays, IndexCache, find_damage
from megatron.core.errors import DataError


class BlendedDataset:
    """Weighted blend of data sets: sample i is sample ``dataset_sample_index[i]`` of data set ``dataset_index[i]``.

    Raises:
        DataError: the blend needs more samples of a data set than the data set has.
    """

    def __init__(self, datasets: Sequence[SampleDataset], blend: IndexArrays, name: str) -> None:
        self.datasets = tuple(datasets)
        self.name = name
        self._blend = blend
        for dataset, needed in zip(self.datasets, count_taken(blend), strict=True):
            if needed > len(dataset):
                raise DataError(f"{name}: the blend needs {needed} samples of a data set that has only {len(dataset)}")

    @property
    def dataset_index(self) -> NDArray[np.int16]:
        """Index of each sample's data set."""
        return self._blend["dataset_index"]

    @property
    def dataset_sample_index(self) -> NDArray[np.int64]:
        """Index of each sample within its data set."""
        return self._blend["dataset_sample_index"]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def _place(self, index: int) -> tuple[SampleDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        dataset, sample = self.dataset_index.item(index), self.dataset_sample_index.item(index)
        if not (0 <= dataset < len(self.datasets) and 0 <= sample < len(self.datasets[dataset])):
            raise DataError(
                f"sample {index} of {self.name} is out of range: the {self._blend.source} is damaged; delete it, and "
                "the next run rebuilds it"
            )
        return self.datasets[dataset], sample

    def __getitem__(self, index: int) -> GPTSample:
        dataset, sample = self._place(index)
        return dataset[sample]

    def source_of(self, index: int) -> str:
        """Return the name of the data set that a sample comes from."""
        dataset, sample = self._place(index)
        return dataset.source_of(sample)


def normalize_weights(weights: Sequence[float]) -> NDArray[np.float64]:
    """Normalize weights to a sum of 1, twice, as Megatron-LM does, for bitwise equal results."""
    values = np.asarray(weights, np.float64)
    values = values / np.sum(values)
    return np.asarray(values / np.sum(values), np.float64)


def samples_per_dataset(weights: Sequence[float], num_samples: int, surplus: float = 0.0) -> list[int]:
    """Divide ``num_samples`` among the data sets by weight, round up, and add the relative ``surplus``."""
    values = np.asarray(weights, np.float64)
    shares = (values / np.sum(values)).tolist()
    return [math.ceil(math.ceil(num_samples * share) * (1 + surplus)) for share in shares]


def load_or_build_blend(
    weights: Sequence[float],
    size: int | None,
    split_name: str,
    index_builder: IndexBuilder,
    cache: IndexCache,
) -> IndexArrays:
    """Load or build the indices of a blend of ``size`` samples. With size None, the weights are data set sizes.

    Raises:
        DataError: there are more data sets than the index dtype can number.
    """

    def build() -> dict[str, NDArray[Any]]:
        if size is None:
            dataset, sample = index_builder.exhaustive_blending_indices(np.asarray(weights, np.int64))
        else:
            dataset, sample = index_builder.blending_indices(normalize_weights(weights), size)
        taken = np.bincount(dataset, minlength=len(weights)).astype(np.int64)
        return {"dataset_index": dataset, "dataset_sample_index": sample, "samples_taken": taken}

    def find_blend_damage(arrays: Arrays) -> str | None:
        taken = arrays["samples_taken"]
        if (damage := find_damage(arrays, expected)) is None and (taken.min() < 0 or taken.sum() != shape[0]):
            damage = f"samples_taken do not sum to {shape[0]}"
        return damage

    shape = (int(sum(weights)) if size is None else size,)
    expected: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "dataset_index": (shape, np.dtype(np.int16)),
        "dataset_sample_index": (shape, np.dtype(np.int64)),
        "samples_taken": ((len(weights),), np.dtype(np.int64)),
    }
    return cache.load_or_build(
        f"BlendedDataset-{split_name}",
        tuple(expected),
        {"weights": [float(weight).hex() for weight in weights], "size": size, "exhaustive": size is None},
        build,
        find_blend_damage,
    )


def count_taken(blend: IndexArrays) -> list[int]:
    """Return the number of samples that a blend takes from each data set."""
    counts: list[int] = blend["samples_taken"].tolist()
    return counts


class SegmentChain:
    """Samples of one data set: the concatenation of its segments, without the first ``offset`` samples."""

    def __init__(self, segments: Sequence[FileSamples], offset: int = 0) -> None:
        self.segments = tuple(segments)
        self.offset = offset
        self.starts = list(itertools.accumulate((len(segment) for segment in self.segments), initial=0))

    def __len__(self) -> int:
        return max(self.starts[-1] - self.offset, 0)

    def place(self, index: int) -> tuple[int, int]:
        """Return the segment of a sample and its index in that segment.

        Raises:
            IndexError: the index is out of range.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        segment = bisect.bisect_right(self.starts, self.offset + index) - 1
        return segment, self.offset + index - self.starts[segment]

    def __getitem__(self, index: int) -> GPTSample:
        segment, sample = self.place(index)
        return self.segments[segment][sample]

    def source_of(self, index: int) -> str:
        """Return the name of the data set; ``index`` is ignored."""
        return self.segments[0].source_of(0)


class LaterPhase:
    """Samples of ``dataset`` numbered from ``start``. Smaller numbers belong to earlier blends of the run.

    ``length`` limits the total number of samples, with the earlier blends included.
    """

    def __init__(self, dataset: SampleDataset, start: int, length: int | None = None) -> None:
        self.dataset = dataset
        self.start = start
        self._length = start + len(dataset) if length is None else length

    def __len__(self) -> int:
        return self._length

    def place(self, index: int) -> int:
        """Return the index of a sample in ``dataset``.

        Raises:
            IndexError: the index is out of range.
            DataError: the sample belongs to an earlier blend.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        if index < self.start:
            raise DataError(f"sample {index} was read before the data changed after {self.start} samples")
        return index - self.start

    def __getitem__(self, index: int) -> GPTSample:
        return self.dataset[self.place(index)]

    def source_of(self, index: int) -> str:
        """Return the name of the data set that a sample comes from."""
        return self.dataset.source_of(self.place(index))
