"""Data loading: build the data sets, prefetch micro-batches on one rank and broadcast them to its TP group."""

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


def build_datasets(
    builder: DatasetSplitsBuilder, targets: SampleTargets, runtime: Runtime, *, is_brief: bool = False
) -> DatasetSplits:
    """Build the data sets: first on rank 0, then on one process per node, so that the others find the index cache.

    ``is_brief`` omits Megatron's lines with the numbers of samples. Nodes need not share a file system: each may have
    its own copy of the data and its own cache.

    Raises:
        DataError: some rank cannot build them. Every rank raises it.
    """
    if runtime.is_reporter and not is_brief:
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
    """Data loader of one split that yields a rank's micro-batches in order, prefetched by ``--num-workers`` threads.

    The first rank of a tensor-parallel group reads the fields that its pipeline stage needs and broadcasts them to the
    group, once per micro-batch. A stage that needs none reads and sends nothing. Values have their smallest types until
    they are on the device. ``sample_ids`` returns the samples of a whole step over all ranks; its cost grows with the
    global batch, so only the rank that reports them calls it. With ``whole_set`` the source yields that many samples
    from the first one, each once, and masks the padding of its last micro-batches. With ``shift`` a rank gets the
    samples of the data-parallel rank that many positions after it. With ``tells_data_sets`` the micro-batches of a
    blend record the data set of each sample, as an index into ``data_sets``. A source that ``evaluates`` may yield
    samples that are only padding.
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
            # Every rank has the sampler, so that all find out together when no samples are left.
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
        """Hash the data set rows of the samples, or the sample numbers if the caller provides the samples."""
        return sample_ids_hash(sample_ids if self.dataset is None else sample_keys(self.dataset, sample_ids))

    def next(self) -> Batch:
        """Return this rank's shard of the next micro-batch, on its device.

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
        """Stop the prefetch threads; no micro-batch can be read after this."""
        if self._packed is not None:
            self._packed.close()


def _read_ahead(
    reader: MicroBatchReader,
    sampler: Iterable[list[int]],
    device: Device,
    num_threads: int,
    flight: FlightRecorder,
) -> ReadAhead[_Job, torch.Tensor]:
    """Prefetch a rank's packed micro-batches into host memory that the device can copy from."""

    def jobs() -> Iterator[_Job]:
        for sample_ids in sampler:
            # Allocated here and not in the prefetch thread, which has no current CUDA device yet.
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
    """Prefetch the packed micro-batches of the caller's iterator, with at most one thread to keep their order."""

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
    """Build the layout of a rank's micro-batches: the fields that its pipeline stage uses, for its sequence shard.

    ``tells_data_sets`` adds the index of each sample's data set on the stage with the loss. ``evaluates`` is set for
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
    """Select the fields for a pipeline stage: tokens for the embedding, labels for the loss, document ids if needed.

    Rotary positions are needed by every stage with layers, learned and sinusoidal ones only by the embedding. MoE
    layers need the padding mask if the data has padding.
    """
    chunks = config.stage_layout.chunks(pp_rank)
    has_embedding = any(chunk.has_embedding for chunk in chunks)
    positions = config.model.position_embedding_type
    return BatchContents(
        tokens=has_embedding,
        labels=any(chunk.has_loss for chunk in chunks),
        position_ids=config.data.reset_position_ids
        and (positions == "rope" or (positions in ("learned_absolute", "sinusoidal") and has_embedding)),
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
