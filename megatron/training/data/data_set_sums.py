"""The loss of each data set of a blend: summed over the samples of a step beside the step's own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.datasets.batch import Batch
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss


@dataclass(frozen=True)
class DataSetLoss:
    """Hold the mean loss over the tokens that an iteration had of one data set, and their number."""

    lm_loss: float
    num_tokens: int


class DataSetSums:
    """Sum the losses and the tokens of each data set on this rank, all on the device.

    ``names`` are those of the blend's data sets in its order, the same on all ranks; there is nothing to sum where
    there are none.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._numbers = torch.arange(len(self._names), device=device)
        self._sums: torch.Tensor | None = None

    def begin(self) -> torch.Tensor | None:
        """Return the sums of a step that begins, which `add` adds to; None where no data sets are told apart.

        A rank that computes no loss has them too: all ranks sum as many numbers.

        Shapes: ``-> [n, 2]`` float64, the loss sum and the number of tokens.
        """
        if self._names:
            self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=self._numbers.device)
        return self._sums

    def add(self, batch: Batch, result: ChunkResult) -> None:
        """Add the samples of a micro-batch, where this chunk has made their losses."""
        if self._sums is not None and isinstance(result, MicrobatchLoss) and result.samples is not None:
            assert batch.data_sets is not None, "the source says which data set a sample is of"
            # A product adds in one order; on CUDA, adding by index would take any.
            chosen = self._numbers[:, None] == batch.data_sets
            self._sums += chosen.to(result.samples.dtype) @ result.samples

    def losses(self, totals: Sequence[tuple[float, float]]) -> Mapping[str, DataSetLoss]:
        """Return, by name, the losses of the data sets that have tokens in the sums over all ranks."""
        return {
            name: DataSetLoss(loss_sum / num_tokens, round(num_tokens))
            for name, (loss_sum, num_tokens) in zip(self._names, totals)
            if num_tokens > 0
        }
