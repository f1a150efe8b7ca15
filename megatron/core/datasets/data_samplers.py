"""Assign samples to the micro-batches of each data-parallel rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.errors import DataError

DataloaderType = Literal["single", "cyclic"]

PADDING_ID: Final = -1
"""Id of a padding sample, which fills a micro-batch and does not contribute to the loss."""

_EPOCHS_KEPT = 2


@dataclass(frozen=True)
class SampleOrder:
    """Order in which a run consumes the samples of one data set, as a function of seed and position.

    ``single`` reads samples 0, 1, … and stops after the last. ``cyclic`` draws a new permutation for every epoch and
    never stops. Neither depends on the number of ranks or the batch size. The last permutations are cached, because
    prefetching may already read the epoch after that of the current step.

    Raises:
        DataError: there are no samples.
    """

    dataloader_type: DataloaderType
    num_samples: int
    seed: int = 1234
    _permutations: dict[int, NDArray[np.int32] | NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("a data set has no samples; add text or increase its share of --split")

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """Return the ``count`` sample ids after ``consumed_samples``; fewer at the end of ``single``."""
        end = consumed_samples + count
        if self.dataloader_type == "single":
            return np.arange(consumed_samples, max(consumed_samples, min(end, self.num_samples)), dtype=np.int64)
        parts = []
        for epoch in range(consumed_samples // self.num_samples, -(-end // self.num_samples)):
            first = epoch * self.num_samples
            order = self.epoch_permutation(epoch)
            parts.append(order[max(consumed_samples - first, 0) : end - first])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def epoch_permutation(self, epoch: int) -> NDArray[np.int32] | NDArray[np.int64]:
        """Return the permutation of the samples in one epoch of ``cyclic``."""
        if epoch not in self._permutations:
            for other in sorted(self._permutations)[: 1 - _EPOCHS_KEPT]:
                del self._permutations[other]
            self._permutations[epoch] = self._draw(epoch)
        return self._permutations[epoch]

    def _draw(self, epoch: int) -> NDArray[np.int32] | NDArray[np.int64]:
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        order: NDArray[np.int64] = torch.randperm(self.num_samples, generator=generator).numpy()
        return order if self.num_samples > np.iinfo(np.int32).max else order.astype(np.int32)


@dataclass(frozen=True)
class MicroBatchSampler:
    """Sampler that yields the sample ids of one data-parallel rank, one list per micro-batch.

    From each ``micro_batch_size * data_parallel_size`` samples of the global order, rank r takes the r-th group of
    ``micro_batch_size``. A last part that does not fill every rank is dropped. A training step thus reads the same
    samples for any number of ranks.

    Raises:
        DataError: ``single`` has no samples left after ``consumed_samples``.
    """

    order: SampleOrder
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        assert 0 <= self.data_parallel_rank < self.data_parallel_size
        left = self.order.num_samples - self.consumed_samples
        if self.order.dataloader_type == "single" and left < self._chunk:
            raise DataError(
                f"{self.consumed_samples} of the data set's {self.order.num_samples} samples are consumed: "
                f"{max(left, 0)} are left, but one micro-batch on every rank needs {self._chunk}; train for more "
                "iterations than before (--train-iters) or use --dataloader-type cyclic"
            )

    @property
    def _chunk(self) -> int:
        return self.micro_batch_size * self.data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.data_parallel_rank * self.micro_batch_size
        for chunk in self._chunks():
            yield chunk[begin : begin + self.micro_batch_size].tolist()

    def _chunks(self) -> Iterator[NDArray[np.int64]]:
        position = self.consumed_samples
        while self.order.dataloader_type == "cyclic" or position + self._chunk <= self.order.num_samples:
            yield self.order.sample_ids(position, self._chunk)
            position += self._chunk


@dataclass(frozen=True)
class WholeSetSampler:
    """Sampler that yields the first ``num_samples`` samples once, in order, split over ranks like `MicroBatchSampler`.

    Every rank gets the same number of full micro-batches. The last ones are filled with padding samples (`PADDING_ID`).
    """

    num_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __len__(self) -> int:
        return -(-self.num_samples // (self.micro_batch_size * self.data_parallel_size))

    def __iter__(self) -> Iterator[list[int]]:
        for microbatch in range(len(self)):
            first = (microbatch * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch_size
            ids = range(first, first + self.micro_batch_size)
            yield [sample_id if sample_id < self.num_samples else PADDING_ID for sample_id in ids]


def sample_ids_hash(sample_ids: NDArray[np.int64]) -> str:
    """Hash the samples of a step, in global order, to 16 hexadecimal digits that do not depend on the parallelism."""
    return hashlib.blake2b(np.ascontiguousarray(sample_ids, "<i8").data, digest_size=8).hexdigest()
