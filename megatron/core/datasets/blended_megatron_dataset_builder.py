"""Build the training, validation and test data of a configuration, for a new run or from a data history.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.datasets.blended_dataset import (
    BlendedDataset,
    LaterPhase,
    SegmentChain,
    count_taken,
    load_or_build_blend,
    samples_per_dataset,
)
from megatron.core.datasets.conversation_dataset import (
    ConversationDataset,
    FileSamples,
    PackedConversations,
    count_epochs,
)
from megatron.core.datasets.conversation_file import ConversationFile
from megatron.core.datasets.data_history import (
    BlendPart,
    DataHistory,
    DataSetKey,
    DataSetRecord,
    Phase,
    RunPosition,
    Segment,
    begin_history,
    continue_history,
    number_occurrences,
)
from megatron.core.datasets.gpt_dataset import DataUsage, GPTDataset, MockGPTDataset, SampleDataset, token_range_error
from megatron.core.datasets.gpt_dataset_config import (
    SPLIT_NAMES,
    Blend,
    GPTDatasetConfig,
    parse_split,
    split_boundaries,
    suggest_split,
)
from megatron.core.datasets.index_builder import (
    CountedIndexBuilder,
    IndexBuilder,
    Told,
    count_samples,
    ignore_index_progress,
    plan_epochs,
    select_index_builder,
)
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.errors import DataError

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import ExternalSamples


def open_data_set(prefix: str, config: GPTDatasetConfig, report: Callable[[str], None]) -> IndexedDataset:
    """Open the data set of a data path: token files, or conversations if the configuration requests them.

    Raises:
        DataError: the data set cannot be opened.
    """
    if config.conversations is None:
        return IndexedDataset(prefix, config.mmap_bin_files)
    return config.conversations.open(prefix, config.index_folder(prefix), config.mmap_bin_files, report)


def make_samples(
    dataset: IndexedDataset,
    sequences: range,
    num_samples: int | None,
    split_name: str,
    config: GPTDatasetConfig,
    index_builder: IndexBuilder,
    cache: IndexCache,
) -> FileSamples:
    """Build samples from some sequences of a data set: at least ``num_samples``, or one epoch if it is None."""
    if isinstance(dataset, ConversationFile):
        return ConversationDataset(dataset, sequences, num_samples, split_name, config, cache)
    return GPTDataset(dataset, sequences, num_samples, split_name, config, index_builder, cache)


def count_held(
    dataset: IndexedDataset,
    sequences: range,
    num_samples: int | None,
    config: GPTDatasetConfig,
    cache: IndexCache,
    *,
    drop_last: bool = True,
) -> int:
    """Return the number of samples that `make_samples` would return, without building them."""
    if isinstance(dataset, ConversationFile):
        per_epoch = len(PackedConversations(dataset, sequences, config, cache))
        return per_epoch * count_epochs(per_epoch, num_samples)
    tokens = dataset.count_tokens(sequences)
    plan = plan_epochs(tokens, config.sequence_length, num_samples)
    return count_samples(tokens * plan.num_epochs, config.sequence_length, drop_last)


TRAIN = "train"
_NUM_SEEDS = 1 << 32


@dataclass(frozen=True)
class OpenedPart:
    """Sequences of a data set that a run trains on."""

    dataset: IndexedDataset
    sequences: range

    def key(self, config: GPTDatasetConfig) -> DataSetKey:
        """Return the key of the data history: everything that the samples depend on, except order and paths."""
        variant = "" if config.conversations is None else config.conversations.variant
        return DataSetKey(
            name=self.dataset.prefix.rpartition("/")[2] + variant,
            lengths_fingerprint=self.dataset.lengths_fingerprint,
            first_sequence=self.sequences.start,
            end_sequence=self.sequences.stop,
            sequence_length=config.sequence_length,
        )


def segment_of(dataset: FileSamples) -> Segment:
    """Return the segment that a data set represents: the inputs of its sample order, apart from the text."""
    usage = dataset.usage
    return Segment(num_samples=None if usage.num_epochs == 1 else usage.num_samples, seed=dataset.config.random_seed)


class ResumedDataset:
    """Builder of the last phase of a data history. ``parts`` maps data set numbers to opened data sets."""

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
        """Return at least ``num_samples`` samples of the run, which includes the samples before the phase.

        The returned history includes the segments that were added.

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
        """Return at least ``needed`` samples of one data set, starting at ``offset``, and its updated record."""
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
    """Return the size of a phase's blend: the same as in a run that starts with this blend."""
    if not weights:
        raise DataError("no data set of the blend has unused samples; add text to --data-path")
    if history.num_samples is not None:
        return history.num_samples
    size = max(num_samples - phase.start, 1)
    if len(weights) == 1 or (not phase.has_given_weights and size <= sum(weights)):
        return size
    return sum(samples_per_dataset(weights, size))


_PATH_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
_PROBED_TOKENS = 1 << 16


@dataclass(frozen=True)
class DatasetSplits:
    """Training, validation and test data; None for a split without data, which was reported.

    ``extra_valid`` holds additional validation sets by name. ``history`` is the record of the training data in
    checkpoints. It is None for data that is not read from files.
    """

    train: SampleDataset | ExternalSamples | None
    valid: SampleDataset | ExternalSamples | None
    test: SampleDataset | ExternalSamples | None
    extra_valid: Mapping[str, SampleDataset] = field(default_factory=dict)
    history: DataHistory | None = None


@dataclass(frozen=True)
class _Source:
    """The part of one data set that belongs to one split."""

    dataset: IndexedDataset
    sequences: range
    tokens: int
    weight: float | None


class BlendedDatasetBuilder:
    """Builder that opens and checks every data set of a configuration and builds the samples of each split.

    ``num_samples`` holds the requested samples of training, validation and test: 0 requests none, None one epoch.
    ``report`` is called with one line for each event that the user should know about: a split without data, text that
    is read more than once, a damaged or unwritable cache, a missing compiled index builder. The training data resumes
    at ``position``. Validation and test data with fewer samples per epoch than ``one_epoch_below`` are built as one
    epoch. ``told`` is a callback for the progress of `build`.
    """

    def __init__(
        self,
        config: GPTDatasetConfig,
        num_samples: tuple[int | None, int | None, int | None],
        report: Callable[[str], None],
        index_builder: IndexBuilder | None = None,
        position: RunPosition | None = None,
        one_epoch_below: int = 0,
    ) -> None:
        self.config = config
        self.position = RunPosition() if position is None else position
        self.num_samples = num_samples
        self.one_epoch_below = one_epoch_below
        self._report = report
        self._index_builder = index_builder
        self.told: Told = ignore_index_progress
        self._opened: dict[str, IndexedDataset] = {}

    def check(self) -> None:
        """Check the files, splits, sizes and token ids of the data without building an index.

        Raises:
            DataError: the first problem found.
        """
        for split in range(len(SPLIT_NAMES)):
            for source in self._open_split(split, report=lambda line: None) or ():
                _probe_vocabulary(source, self.config.vocab_size)
        for name, builder in self._extra_valid_builders():
            with _named_errors(name):
                builder.check()

    def build(self) -> DatasetSplits:
        """Build the samples of each split, or load them from the index cache.

        A test split without enough data is disabled and reported. Training and validation must have data.

        Raises:
            DataError: a file cannot be used, a split whose samples were requested has no data, or there is less text
                than one sample needs.
        """
        if self._index_builder is None and not (self.config.mock and not self.config.extra_valid):
            self._index_builder = select_index_builder(self._report)
        counted = None if self._index_builder is None else CountedIndexBuilder(self._index_builder, self.told)
        train, history = self._build_train(counted)
        extra_valid = {}
        for name, builder in self._extra_valid_builders():
            with _named_errors(name):
                dataset = builder._build_split(SPLIT_NAMES.index("valid"), counted)
            assert dataset is not None, "a validation set without data is rejected"
            extra_valid[name] = dataset
        valid, test = (self._build_split(split, counted) for split in (1, 2))
        if counted is not None:
            counted.end()
        return DatasetSplits(train, valid, test, extra_valid, history)

    def _extra_valid_builders(self) -> Iterator[tuple[str, BlendedDatasetBuilder]]:
        """Yield the name and the builder of each additional validation set. The builders build validation data only."""
        for extra in self.config.extra_valid:
            per_split = (None, extra.blend, None)
            config = dataclasses.replace(self.config, blend=None, blend_per_split=per_split, mock=False, extra_valid=())
            report = functools.partial(self._report_of_set, extra.name)
            yield extra.name, BlendedDatasetBuilder(config, (0, extra.num_samples, 0), report)

    def _report_of_set(self, name: str, line: str) -> None:
        self._report(f"{line} [validation set {name}]")

    def _build_train(self, builder: CountedIndexBuilder | None) -> tuple[SampleDataset | None, DataHistory | None]:
        """Build the training data, from the start or continued from its history; return data and history."""
        position, wanted, seed = self.position, self.num_samples[0], self.config.random_seed
        if self.config.mock:
            return self._build_split(0, builder), None
        sources = self._open_split(0, self._report)
        if not sources:
            return None, position.history
        assert builder is not None
        opened = [OpenedPart(source.dataset, source.sequences) for source in sources]
        keys = number_occurrences([part.key(self.config) for part in opened])
        parts = [
            BlendPart(
                key=key,
                prefix=source.dataset.prefix,
                samples_per_epoch=self._held(source, None),
            )
            for key, source in zip(keys, sources)
        ]
        weights = [source.weight for source in sources if source.weight is not None] or None
        if position.history is None or position.consumed_samples == 0:
            dataset = self._build_sources(sources, wanted, 0, builder)
            datasets = dataset.datasets if isinstance(dataset, BlendedDataset) else (dataset,)
            segments = [segment_of(part) for part in datasets if isinstance(part, FileSamples)]
            return dataset, begin_history(position.dataloader_type, parts, segments, weights, len(dataset), seed)
        assert wanted is not None, "a run knows how many samples it reads"
        history, line = continue_history(
            position.history, parts, weights, position.consumed_samples, wanted, position.dataloader_type, seed
        )
        if line is not None:
            self._report(line)
        numbers = {record.key: number for number, record in enumerate(history.data_sets)}
        by_number = {numbers[key]: part for key, part in zip(keys, opened)}
        return ResumedDataset(self.config, by_number, builder, self._report).build(history, wanted)

    def _build_split(self, split: int, builder: CountedIndexBuilder | None) -> SampleDataset | None:
        wanted = self.num_samples[split]
        if self.config.mock:
            return None if wanted == 0 else MockGPTDataset(wanted, SPLIT_NAMES[split], self.config)
        sources = self._open_split(split, self._report)
        if not sources:
            return None
        assert builder is not None
        return self._build_sources(*self._to_build(sources, split), split, builder)

    def _to_build(self, sources: Sequence[_Source], split: int) -> tuple[Sequence[_Source], int | None]:
        """Return the data sets of a validation or test split, and the number of samples to build; None is one epoch.

        Validation text that is shorter than one sample is repeated. Data sets without weights are then blended by their
        tokens.
        """
        name, wanted = SPLIT_NAMES[split], self.num_samples[split]
        held = [self._held(source, None, drop_last=self._drops_last(split)) for source in sources]
        is_once = wanted is None or sum(held) < self.one_epoch_below
        if name == "valid" and not any(held):
            if len(sources) > 1 and sources[0].weight is None:
                filled = [source for source in sources if source.tokens]
                sources = [dataclasses.replace(source, weight=source.tokens) for source in filled]
            return sources, 1 if is_once else wanted
        if wanted is None or not is_once:
            return sources, wanted
        self._report(
            f" > {name} data: each evaluation reads all {sum(held)} samples once; with --eval-iters N it reads N "
            "iterations"
        )
        return [dataclasses.replace(source, weight=None) for source, size in zip(sources, held) if size], None

    def _build_sources(
        self, sources: Sequence[_Source], wanted: int | None, split: int, builder: CountedIndexBuilder
    ) -> FileSamples | BlendedDataset:
        blend = self._blend_of(split)
        assert blend is not None
        if len(blend.prefixes) == 1 and blend.weights is None:
            builder.begin(SPLIT_NAMES[split], share := wanted or 2)
            return self._build_single(sources[0], wanted, split, builder, share)
        return self._build_blend(sources, wanted, split, builder)

    def _build_single(
        self, source: _Source, num_samples: int | None, split: int, builder: CountedIndexBuilder, share: int
    ) -> FileSamples:
        cache, name = self._cache(source), SPLIT_NAMES[split]
        builder.next_data_set(share)
        dataset = make_samples(source.dataset, source.sequences, num_samples, name, self.config, builder, cache)
        if dataset.usage.num_epochs > 1:
            self._report(f" > {dataset.usage.describe()}")
        if isinstance(dataset, ConversationDataset):
            self._report(f" > {dataset.usage.name}: {dataset.packed.describe()}")
        return dataset

    def _cache(self, source: _Source) -> IndexCache:
        return IndexCache(self.config.index_folder(source.dataset.prefix), self._report)

    def _held(self, source: _Source, num_samples: int | None, *, drop_last: bool = True) -> int:
        """Return the number of samples that a request yields; None requests one epoch."""
        cache = self._cache(source)
        return count_held(source.dataset, source.sequences, num_samples, self.config, cache, drop_last=drop_last)

    def _build_blend(
        self, sources: Sequence[_Source], wanted: int | None, split: int, builder: CountedIndexBuilder
    ) -> BlendedDataset:
        """Build the blend first, then each data set with the number of samples that the blend takes from it.

        Without weights, data sets are read in proportion to their sizes until they are exhausted. If more samples are
        requested than one epoch of all data sets has, the sizes become weights and each data set is repeated.
        """
        name, cache = SPLIT_NAMES[split], self._cache(sources[0])
        sizes = [self._held(source, None, drop_last=self._drops_last(split)) for source in sources]
        weights: Sequence[float] = [source.weight for source in sources if source.weight is not None]
        requests: list[int | None] = [None] * len(sources)
        if not weights:
            weights = sizes
            size = None if wanted is None else min(wanted, sum(sizes))
        if wanted is not None and (weights is not sizes or wanted > sum(sizes)):
            size = sum(samples_per_dataset(weights, wanted))
            requests = list(samples_per_dataset(weights, wanted, self.config.mid_level_dataset_surplus))
        blend = load_or_build_blend(weights, size, name, builder, cache)
        taken = count_taken(blend)
        builder.begin(name, sum(taken))
        datasets = [
            self._build_single(source, self._enough(source, request, needed, split), split, builder, needed)
            for source, request, needed in zip(sources, requests, taken, strict=True)
        ]
        return BlendedDataset(datasets, blend, f"{name} data")

    def _drops_last(self, split: int) -> bool:
        return SPLIT_NAMES[split] != "valid" or self.config.drop_last_partial_validation_sequence

    def _enough(self, source: _Source, request: int | None, needed: int, split: int) -> int | None:
        """Return the request, or ``needed`` if the whole epochs for the request have fewer samples."""
        held = self._held(source, request, drop_last=self._drops_last(split))
        return request if needed <= held else needed

    def _blend_of(self, split: int) -> Blend | None:
        blend = self.config.blend if self.config.blend_per_split is None else self.config.blend_per_split[split]
        if blend is not None and blend.weights is not None and self._takes_all(split):
            return dataclasses.replace(blend, weights=None)
        return blend

    def _takes_all(self, split: int) -> bool:
        """Return whether the split is validation data that is read exactly once, regardless of weights."""
        return SPLIT_NAMES[split] == "valid" and self.num_samples[split] is None

    def _open_split(self, split: int, report: Callable[[str], None]) -> list[_Source] | None:
        """Open the data sets of a split; report and return None if it has none and needs none."""
        name, wanted = SPLIT_NAMES[split], self.num_samples[split]
        blend = self._blend_of(split)
        if self.config.mock or wanted == 0:
            return None
        if blend is None:
            if name == "train" and wanted is not None:
                raise DataError(f"{wanted} training samples are needed, but {_PATH_FLAGS[split]} is not set")
            report(f" > no {name} data: {_PATH_FLAGS[split]} is not set")
            return None
        if blend.weights is not None and wanted is None:
            raise DataError(f"{name} data is blended by weight, which needs a number of samples; omit the weights")
        sources, empty = [], []
        for prefix, weight in zip(blend.prefixes, blend.weights or [None] * len(blend.prefixes), strict=True):
            dataset = self._open(prefix)
            sequences = self._sequences_of(dataset, split)
            if sequences is None:
                self._refuse_or_report_no_share(split, report)
                return None
            if len(sequences) == 0 and (wanted is not None or self._takes_all(split)):
                problem = self._describe_empty_split(dataset, split)
                if not self._may_be_off(split):
                    raise DataError(problem)
                empty.append(problem)
                continue
            sources.append(_Source(dataset, sequences, dataset.count_tokens(sequences), weight))
        if not any(len(source.sequences) for source in sources):
            report(f" > no {name} data: {'; '.join(empty) or ', '.join(blend.prefixes) + ' has no sequences'}")
            return None
        for problem in empty:
            report(f" > {problem}")
        shortage = self._find_shortage(sources, split)
        if shortage is not None:
            if not self._may_be_off(split):
                raise DataError(shortage)
            report(f" > no {name} data: {shortage}")
            return None
        if blend.weights is None and len(sources) > 1:
            # The weight is the number of samples: drop data sets without samples, so that the blend never picks one.
            sources = [source for source in sources if source.tokens > self._least_tokens] or sources
        return sources

    def _open(self, prefix: str) -> IndexedDataset:
        """Open a data set, at most once even if several splits read it."""
        if prefix not in self._opened:
            self._opened[prefix] = open_data_set(prefix, self.config, self._report)
        return self._opened[prefix]

    @property
    def _least_tokens(self) -> int:
        """Largest number of tokens that yields no sample. A conversation of any length yields a sample."""
        return self.config.sequence_length if self.config.conversations is None else 0

    def _sequences_of(self, dataset: IndexedDataset, split: int) -> range | None:
        if self.config.blend_per_split is not None:
            return range(len(dataset))
        return split_boundaries(parse_split(self.config.split), len(dataset))[split]

    def _refuse_or_report_no_share(self, split: int, report: Callable[[str], None]) -> None:
        name, wanted = SPLIT_NAMES[split], self.num_samples[split]
        if name == "train" and wanted is not None:
            raise DataError(
                f"{wanted} training samples are needed, but --split {self.config.split} has a training share of 0; use "
                "a share above 0, as in --split 949,50,1"
            )
        report(f" > no {name} data: --split {self.config.split} has no share for it")

    def _may_be_off(self, split: int) -> bool:
        """Return whether a split may lack data: only the test share of ``--split``, not an explicit test path."""
        return SPLIT_NAMES[split] == "test" and self.config.blend_per_split is None

    def _describe_empty_split(self, dataset: IndexedDataset, split: int) -> str:
        """Describe a split without sequences, and suggest a ``--split`` that assigns it some."""
        name = SPLIT_NAMES[split]
        fact = f"{self._describe_wanted(split)} are needed, but {dataset.prefix}"
        if self.config.blend_per_split is not None:
            return f"{fact} has no sequences; omit it or write it again"
        shares = parse_split(self.config.split)
        # A split without requested samples may stay empty.
        shares_wanted = [0.0 if self.num_samples[i] == 0 else share for i, share in enumerate(shares)]
        better = suggest_split(shares_wanted, len(dataset))
        fact += f" has {len(dataset)} sequences, and --split {self.config.split} leaves none of them for {name}"
        if better is None:
            return f"{fact}; these are too few to divide; use separate data for each split ({_PATH_FLAGS[split]})"
        return f"{fact}; use --split {better}"

    def _describe_wanted(self, split: int) -> str:
        wanted = self.num_samples[split]
        return f"{'all' if wanted is None else wanted} {SPLIT_NAMES[split]} samples"

    def _find_shortage(self, sources: Sequence[_Source], split: int) -> str | None:
        """Describe the shortage if the text does not fill one sample, else return None. Several epochs are fine."""
        wanted, length = self.num_samples[split], self.config.sequence_length
        if wanted is None and not self._takes_all(split):
            return None
        largest = max(source.tokens for source in sources)
        empty = [source for source in sources if source.tokens == 0 and source.weight is not None]
        least = 0 if SPLIT_NAMES[split] == "valid" else self._least_tokens  # less than a validation sample is repeated
        if largest > least and not empty:
            return None
        need = "a whole epoch" if wanted is None else f"{wanted} samples"
        remedy = "use more text, a larger share of --split or a smaller --seq-length"
        if SPLIT_NAMES[split] != "train":
            remedy += ", or --eval-iters 0"
        prefixes = ", ".join(source.dataset.prefix for source in empty or sources)
        return (
            f"too little {SPLIT_NAMES[split]} data: need {need} of {length} + 1 tokens, have "
            f"{0 if empty else largest} tokens in {prefixes}; {remedy}"
        )


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"validation set {name}: {error}") from error


def _probe_vocabulary(source: _Source, vocab_size: int | None) -> None:
    """Check the first tokens of a data set for ids outside the vocabulary, a sign of a different tokenizer."""
    if vocab_size is None:
        return
    seen = 0
    for sequence in source.sequences:
        tokens = source.dataset.get(sequence)[:_PROBED_TOKENS]
        if len(tokens) and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
            raise token_range_error(source.dataset.prefix, int(tokens.min()), int(tokens.max()), vocab_size)
        seen += len(tokens)
        if seen >= _PROBED_TOKENS:
            return
