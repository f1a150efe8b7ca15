"""Samples that the caller makes: what ``--dataloader-type external`` reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from megatron.core.datasets.samples.gpt_dataset import GPTSample


@runtime_checkable
class ExternalSamples(Protocol):
    """Give micro-batches in an order of the caller's own.

    A run that is to go on as if it had not been stopped, at any layout, needs an order that is a function of
    ``consumed_samples``, of which each data-parallel rank takes its share. The first rank of each tensor-parallel group
    reads, where its pipeline stage needs samples, and asks for a few micro-batches more than the run trains on. Loss
    masks hold 0 and 1 only. Positions other than 0, 1, … need ``--reset-position-ids``, ``document_ids``
    ``--reset-attention-mask``.
    """

    def read_microbatches(
        self, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
    ) -> Iterator[Sequence[GPTSample]]:
        """Yield the micro-batches of one data-parallel rank that follow ``consumed_samples`` samples of all ranks."""
        ...
