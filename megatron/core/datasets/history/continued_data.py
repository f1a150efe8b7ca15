"""Build the training data of a resumed run from its data history. Importing this module imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.datasets.history.data_history import DataHistory, DataSetKey, DataSetRecord, Phase, Segment
from megatron.core.datasets.history.dataset_chain import LaterPhase, SegmentChain
from megatron.core.datasets.indexed.indexed_dataset import IndexedDataset
from megatron.core.datasets.indices.index_builder import IndexBuilder
from megatron.core.datasets.indices.index_cache import IndexCache
from megatron.core.datasets.samples.blended_dataset import (
    BlendedDataset,
    count_taken,
    load_or_build_blend,
    samples_per_dataset,
)
from megatron.core.datasets.samples.conversation_dataset import FileSamples
from megatron.core.datasets.samples.data_source import make_samples
from megatron.core.datasets.samples.gpt_dataset import DataUsage, SampleDataset
from megatron.core.datasets.samples.gpt_dataset_config import GPTDatasetConfig
from megatron.core.errors import DataError

TRAIN = "train"
_NUM_SEEDS = 1 << 32


@dataclass(frozen=True)
class OpenedPart:
    """Hold the part of a data set that a run trains on."""

    dataset: IndexedDataset
    sequences: range

    def key(self, config: GPTDatasetConfig) -> DataSetKey:
        """Return what the part is recorded by: all that its samples depend on, order and paths apart."""
        variant = "" if config.conversations is None else config.conversations.variant
        return DataSetKey(
            name=self.dataset.prefix.rpartition("/")[2] + variant,
            lengths_fingerprint=self.dataset.lengths_fingerprint,
            first_sequence=self.sequences.start,
            end_sequence=self.sequences.stop,
            sequence_length=config.sequence_length,
        )


def segment_of(dataset: FileSamples) -> Segment:
    """Return the segment that a data set is: what its samples' order depends on, apart from its text."""
    usage = dataset.usage
    return Segment(num_samples=None if usage.num_epochs == 1 else usage.num_samples, seed=dataset.config.random_seed)


class ContinuedData:
    """Build the last phase of a history from the parts of its data sets, by their number."""

    def __init__(
        self,
        config: GPTDatasetConfig,
        parts: Mapping[int, OpenedPart],
        index_builder: IndexBuilder,
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._parts = parts
        self._index_builder = index_builder
        self._report = report

    def build(self, history: DataHistory, num_samples: int) -> tuple[SampleDataset, DataHistory]:
        """Return at least ``num_samples`` samples of the run, those before the phase included in the count.

        The history that is returned has the segments that had to be added.

        Raises:
            DataError: a data set holds no text.
        """
        phase = history.phases[-1]
        used = [i for i, weight in enumerate(phase.weights) if weight > 0]
        numbers = [phase.data_sets[i] for i in used]
        weights = [phase.weights[i] for i in used]
        size = _phase_size(history, phase, weights, num_samples)
        blend = None
        taken = [size]
        if len(used) > 1:
            folder = self._config.index_folder(self._parts[numbers[0]].dataset.prefix)
            cache = IndexCache(folder, self._report)
            blend = load_or_build_blend(weights, size, TRAIN, self._index_builder, cache)
            taken = count_taken(blend)
        records = list(history.data_sets)
        datasets: list[SampleDataset] = []
        for number, needed, i in zip(numbers, taken, used, strict=True):
            dataset, records[number] = self._data_set(number, records[number], phase.offsets[i], needed)
            datasets.append(dataset)
        whole = datasets[0] if blend is None else BlendedDataset(datasets, blend, f"{TRAIN} data")
        if history.num_samples is not None:
            whole = LaterPhase(whole, phase.start, history.num_samples)
        elif phase.start > 0:
            whole = LaterPhase(whole, phase.start)
        return whole, dataclasses.replace(history, data_sets=tuple(records))

    def _data_set(
        self, number: int, record: DataSetRecord, offset: int, needed: int
    ) -> tuple[SampleDataset, DataSetRecord]:
        """Return the samples of one data set from ``offset`` on, at least ``needed``, and its record."""
        segments = list(record.segments)
        datasets = [self._segment(number, segment) for segment in segments]
        missing = offset + needed - sum(map(len, datasets))
        if missing > 0 or not segments:
            seed = (self._config.random_seed + len(segments)) % _NUM_SEEDS
            dataset = self._segment(number, Segment(num_samples=max(missing, 1), seed=seed))
            segments.append(segment_of(dataset))
            datasets.append(dataset)
        self._report_usage(datasets, offset + needed)
        record = dataclasses.replace(record, segments=tuple(segments))
        if len(datasets) == 1 and offset == 0:
            return datasets[0], record
        return SegmentChain(datasets, offset), record

    def _segment(self, number: int, segment: Segment) -> FileSamples:
        part = self._parts[number]
        config = dataclasses.replace(self._config, random_seed=segment.seed)
        cache = IndexCache(config.index_folder(part.dataset.prefix), self._report)
        return make_samples(
            part.dataset, part.sequences, segment.num_samples, TRAIN, config, self._index_builder, cache
        )

    def _report_usage(self, segments: Sequence[FileSamples], needed: int) -> None:
        first = segments[0].usage
        usage = first
        if len(segments) > 1:
            num_epochs = sum(segment.usage.num_epochs for segment in segments)
            usage = DataUsage(first.name, needed, first.samples_per_epoch, num_epochs)
        if usage.num_epochs > 1:
            self._report(f" > {usage.describe()}")


def _phase_size(history: DataHistory, phase: Phase, weights: Sequence[float], num_samples: int) -> int:
    """Return how many samples a phase's blend holds: as many as that of a run that begins with it."""
    if not weights:
        raise DataError("no data set of the blend has any samples left; give --data-path more text")
    if history.num_samples is not None:
        return history.num_samples
    size = max(num_samples - phase.start, 1)
    if len(weights) == 1 or (not phase.has_given_weights and size <= sum(weights)):
        return size
    return sum(samples_per_dataset(weights, size))
