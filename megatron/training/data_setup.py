"""Build the data sets of a run and the iterators that training and evaluation read from."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.batch import Batch, MicroBatchReader, collate
from megatron.core.datasets.blended_dataset_builder import DatasetSplits
from megatron.core.datasets.data_samplers import (
    DataloaderType,
    MicroBatchSampler,
    SampleOrder,
    WholeSetSampler,
    sample_ids_hash,
)
from megatron.core.datasets.external_samples import ExternalSamples
from megatron.core.datasets.gpt_dataset import SampleDataset
from megatron.core.datasets.sample_keys import sample_keys
from megatron.core.dist_checkpointing.serialization import raise_on_all_ranks
from megatron.core.errors import DataError, MegatronError
from megatron.training.config.run_config import RunConfig
from megatron.training.console import print_line
from megatron.training.data_plan import DatasetSplitsBuilder, SampleTargets
from megatron.training.initialize import Runtime

_JOIN_INTERVAL_S = 0.01
_PREFETCHED_BATCHES = 4


def build_datasets(builder: DatasetSplitsBuilder, targets: SampleTargets, runtime: Runtime) -> DatasetSplits:
    """Build the data sets: rank 0 first, then one process of each machine, so that the others find its index cache.

    Machines need not share a file system: each may hold a copy of the data and keep a cache of its own.

    Raises:
        DataError: on every rank alike, where one of them cannot build them.
    """
    if runtime.is_reporter:
        print_line(" > datasets target sizes (minimum size):")
        print_line(f"    train:      {targets.train}")
        print_line(f"    validation: {'all' if targets.valid is None else targets.valid}")
        print_line(f"    test:       {targets.test}")
        for extra in targets.extra_valid:
            print_line(f"    {extra.name + ':':11} {'all' if extra.num_samples is None else extra.num_samples}")
    datasets: DatasetSplits | None = None
    for is_due in (runtime.is_reporter, runtime.is_first_on_machine, True):
        error: MegatronError | None = None
        if is_due and datasets is None:
            try:
                datasets = builder.build()
            except MegatronError as failure:
                error = failure if runtime.is_reporter else DataError(f"rank {runtime.state.rank}: {failure}")
        raise_on_all_ranks(error, runtime.state.world)
    assert datasets is not None, "every rank is due in the end"
    return datasets


def sample_order(dataset: SampleDataset, config: RunConfig) -> SampleOrder:
    """Return the order in which a run reads the samples of a data set."""
    dataloader_type: DataloaderType = "cyclic" if config.data.dataloader_type == "cyclic" else "single"
    return SampleOrder(dataloader_type, len(dataset), config.initialization.seed)


class BatchSource:
    """Give the micro-batches of one split in order, read ahead by a thread.

    ``sample_ids`` names the samples of a whole step over all ranks, whether it was read or not. With ``whole_set`` the
    source gives that many samples from the first on, each once, and what fills its last micro-batches counts nothing.
    """

    def __init__(
        self,
        dataset: SampleDataset | ExternalSamples,
        config: RunConfig,
        runtime: Runtime,
        vocab_size: int,
        consumed_samples: int,
        whole_set: int | None = None,
    ) -> None:
        self.device = runtime.device.torch_device
        self.dataset = None if isinstance(dataset, ExternalSamples) else dataset
        self.order = None if self.dataset is None else sample_order(self.dataset, config)
        place = (config.training.micro_batch_size, runtime.state.dp.rank, runtime.state.dp.size)
        batches: Iterator[Batch]
        if isinstance(dataset, ExternalSamples):
            batches = map(collate, dataset.read_microbatches(consumed_samples, *place))
        else:
            reader = MicroBatchReader(dataset, vocab_size)
            sampler: Iterable[list[int]] = WholeSetSampler(whole_set or 0, *place)
            if whole_set is None:
                sampler = MicroBatchSampler(sample_order(dataset, config), consumed_samples, *place)
            batches = (reader[sample_ids] for sample_ids in sampler)
        self._batches = prefetch(batches, _PREFETCHED_BATCHES) if config.data.num_workers > 0 else batches

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the ``count`` samples after ``consumed_samples``, over all data-parallel ranks."""
        if self.order is None:
            return np.arange(consumed_samples, consumed_samples + count, dtype=np.int64)
        return self.order.sample_ids(consumed_samples, count)

    def sample_ids_hash(self, sample_ids: NDArray[np.int64]) -> str:
        """Hash which rows of which data sets the samples are; of samples that the caller makes, their numbers."""
        return sample_ids_hash(sample_ids if self.dataset is None else sample_keys(self.dataset, sample_ids))

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
