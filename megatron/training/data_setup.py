"""Build the data sets of a run and the iterators that training and evaluation read from."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.collectives import broadcast_object
from megatron.core.datasets.batch import Batch, MicroBatchReader
from megatron.core.datasets.blended_dataset_builder import DatasetSplits
from megatron.core.datasets.data_samplers import DataloaderType, MicroBatchSampler, SampleOrder
from megatron.core.datasets.gpt_dataset import SampleDataset
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig, parse_blend
from megatron.core.errors import MegatronError
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.training.config.resolution import DEFAULT_SPLIT
from megatron.training.config.run_config import RunConfig, samples_of_iterations
from megatron.training.initialize import Runtime
from megatron.training.train_state import TrainState

_JOIN_INTERVAL_S = 0.01
_PREFETCHED_BATCHES = 4


class DatasetSplitsBuilder(Protocol):
    """Check and build the data sets of the three splits."""

    def check(self) -> None:
        """Raise `DataError` for data that cannot be used, before anything is built."""

    def build(self) -> DatasetSplits:
        """Build what was checked."""
        ...


DatasetsProvider = Callable[[RunConfig, Tokenizer, "SampleTargets", Callable[[str], None]], DatasetSplitsBuilder]
"""Return what builds the data sets, given how many samples each must have and where to report lines."""


@dataclass(frozen=True)
class SampleTargets:
    """Hold how many samples a run will read of each split."""

    train: int
    valid: int
    test: int


def sample_targets(config: RunConfig, done: TrainState | None = None) -> SampleTargets:
    """Return how many samples training, all evaluations together, and the final test read.

    A resumed run reads on from what is ``done``. That comes to more than the configuration alone says where the batch
    was larger, or evaluations were more frequent, before.
    """
    done = TrainState() if done is None else done
    per_evaluation = config.validation.eval_iters * config.training.global_batch_size
    iterations_left = max(config.train_iters - done.iteration, 0)
    train = max(
        config.train_samples, samples_of_iterations(config.training, iterations_left, done.consumed_train_samples)
    )
    evaluations = _num_evaluations(config, config.train_iters) + 1
    evaluations_left = max(evaluations - _num_evaluations(config, done.iteration), 1)
    return SampleTargets(
        train=0 if config.training.skip_train else train,
        valid=max(evaluations * per_evaluation, done.consumed_valid_samples + evaluations_left * per_evaluation),
        test=per_evaluation,
    )


def _num_evaluations(config: RunConfig, iterations: int) -> int:
    """Return how many evaluations the first iterations make, the last one of the run left out."""
    interval = config.validation.eval_interval
    return iterations // interval if interval else 0


def build_datasets(builder: DatasetSplitsBuilder, targets: SampleTargets, runtime: Runtime) -> DatasetSplits:
    """Build the data sets, rank 0 first so that the others find its index cache.

    Raises:
        DataError: on every rank alike, where rank 0 cannot build them.
    """
    error: MegatronError | None = None
    if runtime.is_reporter:
        print(" > datasets target sizes (minimum size):", flush=True)
        print(f"    train:      {targets.train}", flush=True)
        print(f"    validation: {targets.valid}", flush=True)
        print(f"    test:       {targets.test}", flush=True)
        try:
            datasets = builder.build()
        except MegatronError as failure:
            error = failure
    error = broadcast_object(error, runtime.state.world)
    if error is not None:
        raise error
    return datasets if runtime.is_reporter else builder.build()


class BatchSource:
    """Give the micro-batches of one split in order, read ahead by a thread.

    ``sample_ids`` names the samples of a whole step over all ranks, whether it was read or not.
    """

    def __init__(
        self, dataset: SampleDataset, config: RunConfig, runtime: Runtime, vocab_size: int, consumed_samples: int
    ) -> None:
        self.device = runtime.device.torch_device
        dataloader_type: DataloaderType = "cyclic" if config.data.dataloader_type == "cyclic" else "single"
        self.order = SampleOrder(dataloader_type, len(dataset), config.initialization.seed)
        sampler = MicroBatchSampler(
            self.order,
            consumed_samples,
            config.training.micro_batch_size,
            runtime.state.dp.rank,
            runtime.state.dp.size,
        )
        reader = MicroBatchReader(dataset, vocab_size)
        batches = (reader[sample_ids] for sample_ids in sampler)
        self._batches = prefetch(batches, _PREFETCHED_BATCHES) if config.data.num_workers > 0 else batches

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the ``count`` samples after ``consumed_samples``, over all data-parallel ranks."""
        return self.order.sample_ids(consumed_samples, count)

    def next(self) -> Batch:
        """Return the next micro-batch on this process's device."""
        batch = next(self._batches, None)
        assert batch is not None, "the data set was asked for every sample that the run reads"
        return batch.to(self.device, non_blocking=True)


def prefetch(batches: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """Read up to ``depth`` micro-batches ahead in a thread; an error of the reader is raised where its batch is due.

    The thread ends with the iterator: one that still reads when the interpreter shuts down aborts the process.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()

    def read() -> None:
        try:
            for batch in batches:
                if stopped.is_set():
                    return
                ready.put(batch)
            ready.put(None)
        except Exception as error:  # noqa: BLE001 handed to the consumer, which raises it
            ready.put(error)

    thread = threading.Thread(target=read, name="batch reader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):  # room for what the thread is about to put
                ready.get_nowait()
            thread.join(_JOIN_INTERVAL_S)


def dataset_config(config: RunConfig, tokenizer: Tokenizer) -> GPTDatasetConfig:
    """Return what the data sets are built from.

    Raises:
        ConfigurationError: the flags contradict each other.
    """
    data = config.data
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    return GPTDatasetConfig(
        sequence_length=data.seq_length,
        random_seed=config.initialization.seed,
        blend=parse_blend(data.data_path) if data.data_path else None,
        blend_per_split=_blends(per_split) if any(per_split) else None,
        split=data.split or DEFAULT_SPLIT,
        mock=data.mock_data,
        path_to_cache=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        eod_token_id=tokenizer.eod_id,
        vocab_size=tokenizer.vocab_size,
    )


def _blends(paths: tuple[tuple[str, ...], ...]) -> tuple[Blend | None, Blend | None, Blend | None]:
    train, valid, test = (parse_blend(items) if items else None for items in paths)
    return train, valid, test
