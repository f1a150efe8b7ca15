"""Find the data set, document and tokens of a sample number; count the samples read from each data set."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.blended_dataset import BlendedDataset, LaterPhase, SegmentChain
from megatron.core.datasets.conversation_dataset import FileSamples
from megatron.core.datasets.data_history import DataHistory
from megatron.core.datasets.data_samplers import SampleOrder
from megatron.core.datasets.gpt_dataset import ExternalSamples, SampleDataset

SampleKeys = NDArray[np.int64]
"""(data set of the blend, row of its sample index) of each sample, ``[n, 2]``, independent of the parallelism."""


@dataclass(frozen=True)
class TextPiece:
    """Consecutive tokens of one sequence of a token file."""

    document: int
    sequence: int
    begin: int
    end: int
    """End of the token range within the sequence, exclusive."""
    byte_offset: int
    """Offset of the first token in the ``.bin`` file."""


@dataclass(frozen=True)
class SamplePlace:
    """Location of a sample: the index of its data set in the blend, its indices there, and its pieces of text."""

    data_set: int
    sample: int
    """Index in the reading order of the data set, over all of its segments."""
    row: int
    """Index in the unshuffled order."""
    prefix: str
    pieces: tuple[TextPiece, ...]


def sample_keys(dataset: SampleDataset, sample_ids: NDArray[np.int64]) -> SampleKeys:
    """Return the keys of samples. The row of a mock sample is its number.

    Raises:
        IndexError: a sample id is out of range.
    """
    data_sets, samples = _in_blend(dataset, sample_ids)
    rows = samples.copy()
    for number in np.unique(data_sets).tolist():
        chosen = data_sets == number
        rows[chosen] = _rows(_part(dataset, number), samples[chosen])
    return np.stack((data_sets, rows), axis=1)


def data_set_numbers(dataset: SampleDataset, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return _in_blend(dataset, sample_ids)[0]


def blend_names(dataset: SampleDataset | ExternalSamples | None) -> tuple[str, ...]:
    """Return distinct names of a blend's data sets, in their order; empty if there are fewer than two.

    A name is the shortest path suffix that no other data set shares. Repeated data sets are numbered.
    """
    if isinstance(dataset, LaterPhase):
        return blend_names(dataset.dataset)
    if not isinstance(dataset, BlendedDataset) or len(dataset.datasets) < 2:
        return ()
    paths = [Path(part.source_of(0)).parts for part in dataset.datasets]
    ends: dict[tuple[str, ...], str] = {}
    for depth in itertools.count(1):
        left = set(paths) - set(ends)
        alike = Counter(path[-depth:] for path in left)
        ends |= {path: str(Path(*path[-depth:])) for path in left if alike[path[-depth:]] == 1}
        if len(ends) == len(set(paths)):
            break
    names: dict[str, None] = {}
    for path in paths:
        tried = itertools.chain([ends[path]], (f"{ends[path]} ({number})" for number in itertools.count(2)))
        names[next(name for name in tried if name not in names)] = None
    return tuple(names)


def locate_sample(dataset: SampleDataset, sample_id: int) -> SamplePlace:
    """Find the text of a sample.

    Raises:
        IndexError: the sample id is out of range.
    """
    data_sets, samples = _in_blend(dataset, np.array([sample_id], np.int64))
    number, sample = int(data_sets[0]), int(samples[0])
    part = _part(dataset, number)
    row = int(_rows(part, samples)[0])
    if isinstance(part, SegmentChain):
        segment, within = part.place(sample)
        pieces = _pieces(part.segments[segment], within)
        return SamplePlace(number, part.offset + sample, row, part.source_of(sample), pieces)
    pieces = _pieces(part, sample) if isinstance(part, FileSamples) else ()
    return SamplePlace(number, sample, row, part.source_of(sample), pieces)


def _in_blend(dataset: SampleDataset, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the data set of each sample and its index in the data set."""
    if len(sample_ids) and not 0 <= int(sample_ids.min()) <= int(sample_ids.max()) < len(dataset):
        raise IndexError(f"samples {int(sample_ids.min())} to {int(sample_ids.max())} of {len(dataset)}")
    if isinstance(dataset, LaterPhase):
        if len(sample_ids):
            dataset.place(int(sample_ids.min()))
        return _in_blend(dataset.dataset, sample_ids - dataset.start)
    if isinstance(dataset, BlendedDataset):
        return dataset.dataset_index[sample_ids].astype(np.int64), dataset.dataset_sample_index[sample_ids]
    return np.zeros(len(sample_ids), np.int64), sample_ids


def _part(dataset: SampleDataset, number: int) -> SampleDataset:
    if isinstance(dataset, LaterPhase):
        return _part(dataset.dataset, number)
    return dataset.datasets[number] if isinstance(dataset, BlendedDataset) else dataset


def _rows(part: SampleDataset, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    if isinstance(part, SegmentChain):
        places = samples + part.offset
        segments = np.searchsorted(part.starts, places, side="right") - 1
        rows = np.empty_like(places)
        for number in np.unique(segments).tolist():
            chosen = segments == number
            start = part.starts[number]
            rows[chosen] = start + _rows(part.segments[number], places[chosen] - start)
        return rows
    if isinstance(part, FileSamples):
        return part.shuffle_index[samples].astype(np.int64)
    return samples


def _pieces(dataset: FileSamples, sample: int) -> tuple[TextPiece, ...]:
    indexed = dataset.indexed_dataset
    pieces: list[TextPiece] = []
    for sequence, begin, stop in dataset.parts_of(int(dataset.shuffle_index[sample])):
        start = int(indexed.sequence_pointers[sequence]) + begin * indexed.dtype.itemsize
        pieces.append(TextPiece(_document_of(indexed.document_indices, sequence), sequence, begin, stop, start))
    return tuple(pieces)


def _document_of(document_indices: Sequence[int] | NDArray[np.int64], sequence: int) -> int:
    return int(np.searchsorted(document_indices, sequence, side="right")) - 1


_CHUNK = 1 << 20


class ReadCounter:
    """Incremental counter of the samples that a run has read from each data set.

    ``dataset`` is the data set of the history's last phase, which the run reads in ``order``. Each sample is counted
    once.
    """

    def __init__(self, history: DataHistory, dataset: SampleDataset, order: SampleOrder) -> None:
        self._history = history
        self._dataset = dataset
        self._order = order
        phase = history.phases[-1]
        self._numbers = [number for number, weight in zip(phase.data_sets, phase.weights) if weight > 0]
        self._counts = np.array([record.consumed_samples for record in history.data_sets], np.int64)
        self._position = history.consumed_samples

    def history_at(self, consumed_samples: int) -> DataHistory:
        """Return the history after ``consumed_samples``, which must not decrease between calls."""
        assert consumed_samples >= self._position, "a run does not go back"
        for begin in range(self._position, consumed_samples, _CHUNK):
            ids = self._order.sample_ids(begin, min(_CHUNK, consumed_samples - begin))
            taken = np.bincount(data_set_numbers(self._dataset, ids), minlength=len(self._numbers))
            self._counts[self._numbers] += taken
        self._position = consumed_samples
        return self._history.with_consumed(consumed_samples, self._counts.tolist())
