"""Data loading: build the data sets, read micro-batches ahead on one rank and broadcast them to its peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.config import RunConfig
from megatron.core.collectives import broadcast, raise_on_all_ranks
from megatron.core.console import print_line
from megatron.core.context_parallel import chunk_length, chunks_of, cut_sequence
from megatron.core.datasets import (
    Batch,
    BatchContents,
    BatchLayout,
    DataloaderType,
    DatasetSplits,
    ExternalReader,
    ExternalSamples,
    MicroBatchReader,
    MicroBatchSampler,
    ReadAhead,
    SampleDataset,
    SampleOrder,
    WholeSetSampler,
    blend_names,
    data_set_numbers,
    sample_ids_hash,
)
from megatron.core.datasets.sample_keys import sample_keys
from megatron.core.device import Device
from megatron.core.errors import DataError, MegatronError
from megatron.core.flight_recorder import FlightRecorder
from megatron.training.data_plan import DatasetSplitsBuilder, SampleTargets
from megatron.training.initialize import Runtime


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


_Job = tuple[list[int], torch.Tensor]


class BatchSource:
    """Give a rank its part of the micro-batches of one split in order, read ahead by ``--num-workers`` threads.

    The first rank of a tensor-parallel group reads what its pipeline stage needs and sends it to the others, in one
    broadcast a micro-batch; a stage that needs nothing reads and sends nothing. Values stay in the smallest types
    that hold them until they are on the device. ``sample_ids`` names the samples of a whole step over all ranks; its
    cost grows with the global batch, so that only a rank that reports them asks. With ``whole_set`` the source gives
    that many samples from the first on, each once, and what fills its last micro-batches counts nothing. With
    ``shift`` a rank gets what is meant for the data-parallel rank so many places after it. With ``tells_data_sets`` the
    micro-batches of a blend say which of its ``data_sets``, by name, each sample is of. A source that
    ``evaluates`` gives samples that may be padding as a whole.
    """

    def __init__(
        self,
        dataset: SampleDataset | ExternalSamples,
        config: RunConfig,
        runtime: Runtime,
        vocab_size: int,
        consumed_samples: int,
        whole_set: int | None = None,
        shift: int = 0,
        tells_data_sets: bool = False,
        evaluates: bool = False,
    ) -> None:
        state, device = runtime.state, runtime.device
        self.dataset = None if isinstance(dataset, ExternalSamples) else dataset
        self._device = device.torch_device
        self._tp = state.tp
        self.data_sets = blend_names(dataset) if tells_data_sets else ()
        self._layout = batch_layout(
            config, state.pp.rank, state.cp.rank, vocab_size, bool(self.data_sets), evaluates=evaluates
        )
        positions = torch.arange(config.data.seq_length, device=self._device)
        self._positions = cut_sequence(positions, state.cp, dim=0).expand(config.training.micro_batch_size, -1)
        place = (config.training.micro_batch_size, (state.dp.rank + shift) % state.dp.size, state.dp.size)
        num_threads = config.data.num_workers
        self._packed: ReadAhead[_Job, torch.Tensor] | ReadAhead[torch.Tensor, torch.Tensor] | None = None
        is_reading = state.tp.is_first and self._layout.num_bytes > 0
        self.order: SampleOrder | None = None
        if not isinstance(dataset, ExternalSamples):
            self.order = order = sample_order(dataset, config)
            # Every rank finds out alike that no samples are left.
            sampler: Iterable[list[int]] = WholeSetSampler(whole_set or 0, *place)
            if whole_set is None:
                sampler = MicroBatchSampler(order, consumed_samples, *place)
            if is_reading:
                data_sets_of = partial(data_set_numbers, dataset) if self._layout.contents.data_sets else None
                reader = MicroBatchReader(dataset, self._layout, vocab_size, data_sets_of)
                self._packed = _read_ahead(reader, sampler, device, num_threads, runtime.flight)
        elif is_reading:
            external = ExternalReader(
                dataset.read_microbatches(consumed_samples, *place),
                self._layout,
                vocab_size,
                reset_position_ids=config.data.reset_position_ids,
                reset_attention_mask=config.data.reset_attention_mask,
            )
            self._packed = _read_external(external, self._layout.num_bytes, device, num_threads)

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the ``count`` samples after ``consumed_samples``, over all data-parallel ranks."""
        if self.order is None:
            return np.arange(consumed_samples, consumed_samples + count, dtype=np.int64)
        return self.order.sample_ids(consumed_samples, count)

    def sample_ids_hash(self, sample_ids: NDArray[np.int64]) -> str:
        """Hash which rows of which data sets the samples are; of samples that the caller makes, their numbers."""
        return sample_ids_hash(sample_ids if self.dataset is None else sample_keys(self.dataset, sample_ids))

    def next(self) -> Batch:
        """Return this rank's part of the next micro-batch, on its device.

        Raises:
            DataError: on the rank that reads: a sample cannot be used.
        """
        if not self._layout.num_bytes:
            return Batch(position_ids=self._positions)
        if self._packed is not None:
            packed = next(self._packed, None)
            assert packed is not None, "the data set was asked for every sample that the run reads"
            memory = packed.to(self._device, non_blocking=True)
        else:
            memory = torch.empty(self._layout.num_bytes, dtype=torch.uint8, device=self._device)
        broadcast(memory, self._tp)
        return self._layout.unpack(memory, self._positions)

    def close(self) -> None:
        """Stop the reading threads; there are no more micro-batches after this."""
        if self._packed is not None:
            self._packed.close()


def _read_ahead(
    reader: MicroBatchReader,
    sampler: Iterable[list[int]],
    device: Device,
    num_threads: int,
    flight: FlightRecorder,
) -> ReadAhead[_Job, torch.Tensor]:
    """Return the packed micro-batches of a rank, in memory that the device can fetch them from."""

    def jobs() -> Iterator[_Job]:
        for sample_ids in sampler:
            # Taken here and not where it is filled: another thread has no current CUDA device yet.
            yield sample_ids, device.empty_host_memory(reader.layout.num_bytes)

    def read(job: _Job) -> torch.Tensor:
        sample_ids, memory = job
        with flight.reading_of(sample_ids):
            reader.read(sample_ids, memory.numpy())
        return memory

    return ReadAhead(read, jobs(), num_threads)


def _read_external(
    reader: ExternalReader, num_bytes: int, device: Device, num_threads: int
) -> ReadAhead[torch.Tensor, torch.Tensor]:
    """Return the packed micro-batches that the caller makes, by one thread at most: they come one after the other."""

    def jobs() -> Iterator[torch.Tensor]:
        while True:
            yield device.empty_host_memory(num_bytes)

    def read(memory: torch.Tensor) -> torch.Tensor:
        reader.read(memory.numpy())
        return memory

    return ReadAhead(read, jobs(), min(num_threads, 1))


def batch_layout(
    config: RunConfig,
    pp_rank: int,
    cp_rank: int,
    vocab_size: int | None,
    tells_data_sets: bool = False,
    *,
    evaluates: bool = False,
) -> BatchLayout:
    """Return what a rank needs of a micro-batch: what its pipeline stage uses, of its part of the sequence.

    ``tells_data_sets`` adds the number of each sample's data set on the stage with the loss. ``evaluates`` is set for
    the micro-batches of an evaluation.
    """
    length, size = config.data.seq_length, config.model.context_parallel_size
    parts = [slice(0, length)]
    if size > 1:
        chunk = chunk_length(length, size)
        parts = [slice(index * chunk, (index + 1) * chunk) for index in chunks_of(cp_rank, size)]
    contents = batch_contents(config, pp_rank, evaluates=evaluates)
    contents = dataclasses.replace(contents, data_sets=tells_data_sets and contents.labels)
    return BatchLayout(contents, config.training.micro_batch_size, length, vocab_size, parts)


def batch_contents(config: RunConfig, pp_rank: int, *, evaluates: bool = False) -> BatchContents:
    """Return what a pipeline stage needs: tokens for the embedding, labels for the loss, boundaries where there are.

    Rotary positions are needed wherever there are layers, learned ones by the embedding. Layers of experts are told of
    padding if the data has some.
    """
    chunks = config.stage_layout.chunks(pp_rank)
    has_embedding = any(chunk.has_embedding for chunk in chunks)
    positions = config.model.position_embedding_type
    return BatchContents(
        tokens=has_embedding,
        labels=any(chunk.has_loss for chunk in chunks),
        position_ids=config.data.reset_position_ids
        and (positions == "rope" or (positions == "learned_absolute" and has_embedding)),
        document_ids=config.data.reset_attention_mask
        and any(chunk.layer_numbers or (chunk.has_loss and config.model.mtp.mtp_depth) for chunk in chunks),
        padding_mask=_may_pad(config, evaluates)
        and any(config.model.has_experts_among(chunk.layer_numbers, is_last=chunk.has_loss) for chunk in chunks),
    )


def _may_pad(config: RunConfig, evaluates: bool) -> bool:
    """Return whether batches need a padding mask. Evaluation needs one only with a capacity factor."""
    if evaluates:
        return config.model.moe.moe_expert_capacity_factor is not None
    return config.data.has_padding
