"""Samples of a training step, and the documents that they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core.datasets import (
    Blend,
    BlendedDatasetBuilder,
    DataHistory,
    ExternalSamples,
    GPTDatasetConfig,
    GPTSample,
    OpenedPart,
    ResumedDataset,
    SampleDataset,
    SamplePlace,
    locate_sample,
    open_data_set,
    recorded_history,
    sample_ids_hash,
    select_index_builder,
)
from megatron.core.datasets.sample_keys import sample_keys
from megatron.core.errors import ConfigurationError, DataError
from megatron.core.tokenizers import Tokenizer
from megatron.training.batch_source import sample_order
from megatron.training.data_plan import dataset_config, sample_targets
from megatron.training.step_position import StepPosition

Report = Callable[[str], None]


@dataclass(frozen=True)
class StepSample:
    """One sample of a step: its number in the run, the rank that reads it, and the location of its text."""

    sample_id: int
    microbatch: int
    data_parallel_rank: int
    weight: float | None
    """Weight of its data set in the blend; None for data that is not read from files."""
    place: SamplePlace
    sample: GPTSample


class StepSamples:
    """Samples of a step; ``hash`` is their hash as in the metrics file.

    Raises:
        DataError: the data is not the run's training data, or cannot be read.
    """

    def __init__(self, position: StepPosition, tokenizer: Tokenizer, report: Report) -> None:
        config = position.run.config
        if config.data.dataloader_type == "external" or config.data.is_registered:
            source = f"--dataset {config.data.dataset}" if config.data.is_registered else "--dataloader-type external"
            raise ConfigurationError(f"the samples come from the run's own script ({source}), so they cannot be shown")
        self._position = position
        self._config = config
        self._history, self._dataset = _open_data(position, tokenizer, report)
        order = sample_order(self._dataset, config)
        self._ids = order.sample_ids(position.first_sample, position.num_samples)
        self.hash = sample_ids_hash(sample_keys(self._dataset, self._ids))

    def __iter__(self) -> Iterator[StepSample]:
        micro_batch_size = self._config.training.micro_batch_size
        chunk = micro_batch_size * self._config.data_parallel_size
        shares = _shares(self._history)
        for number, sample_id in enumerate(self._ids.tolist()):
            place = locate_sample(self._dataset, sample_id)
            yield StepSample(
                sample_id=sample_id,
                microbatch=number // chunk,
                data_parallel_rank=number % chunk // micro_batch_size,
                weight=shares[place.data_set] if shares else None,
                place=place,
                sample=self._dataset[sample_id],
            )


def _shares(history: DataHistory | None) -> list[float]:
    weights = [] if history is None else [weight for weight in history.phases[-1].weights if weight > 0]
    return [weight / sum(weights) for weight in weights]


def _open_data(
    position: StepPosition, tokenizer: Tokenizer, report: Report
) -> tuple[DataHistory | None, SampleDataset]:
    config, progress = position.run.config, position.run.progress
    history = recorded_history(progress.train_data)
    if history is None:
        # Nothing is recorded, so the configuration alone determines the data.
        targets = sample_targets(config)
        builder = BlendedDatasetBuilder(dataset_config(config, tokenizer), (targets.train, 0, 0), report)
        splits = builder.build()
        if splits.train is None or isinstance(splits.train, ExternalSamples):
            raise DataError("the run has no training data")
        return splits.history, splits.train
    later = [phase.start for phase in history.phases if phase.start > position.first_sample]
    history = history.until(position.first_sample)
    num_samples = later[0] if later else max(config.train_samples, position.first_sample + position.num_samples)
    numbers = history.phases[-1].data_sets
    if not numbers:
        raise DataError(
            f"step {position.step} did not read files, so its samples cannot be shown; the run read other data between "
            f"samples {history.phases[-1].start} and {later[0] if later else history.consumed_samples}"
        )
    own = dataset_config(config, tokenizer)
    dataset_options = GPTDatasetConfig(
        sequence_length=history.data_sets[numbers[0]].key.sequence_length,
        random_seed=config.initialization.seed,
        blend=Blend(tuple(history.data_sets[number].prefix for number in numbers)),
        path_to_cache=config.data.data_cache_path,
        mmap_bin_files=config.data.mmap_bin_files,
        eod_token_id=tokenizer.eod_id,
        conversations=own.conversations,
        fill_in_the_middle=own.fill_in_the_middle,
    )
    parts = {number: _open_part(history, number, dataset_options, report) for number in numbers}
    dataset, history = ResumedDataset(dataset_options, parts, select_index_builder(report), report).build(
        history, num_samples
    )
    return history, dataset


def _open_part(history: DataHistory, number: int, config: GPTDatasetConfig, report: Report) -> OpenedPart:
    """Open a data set that the run has read.

    Raises:
        DataError: it does not exist, or its text has changed.
    """
    record = history.data_sets[number]
    key = record.key
    dataset = open_data_set(record.prefix, config, report)
    if dataset.lengths_fingerprint != key.lengths_fingerprint:
        raise DataError(
            f"{record.prefix} is not the data that the run trained on: the lengths of its sequences have changed; "
            "restore the data"
        )
    return OpenedPart(dataset, range(key.first_sequence, key.end_sequence))
