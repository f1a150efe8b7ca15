"""The loss of each sample of a step by itself, to find those that spoil it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.collectives import all_gather_objects
from megatron.core.datasets.batch import Batch
from megatron.core.models.model import Model
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss
from megatron.training.config.run_config import RunConfig
from megatron.training.data.microbatches import MicrobatchSource
from megatron.training.evaluation import evaluate
from megatron.training.model_setup import TrainingParts
from megatron.training.process.initialize import Runtime
from megatron.training.training_step import ForwardStep

_OUTLYING = 6.0
_LEAST_SPREAD = 0.02
_CONSISTENT_SPREAD = 1.4826
"""What the median of absolute deviations is multiplied by to be the standard deviation of a normal distribution."""


class _OneRow:
    """Give micro-batches all of whose samples are the one in a row."""

    def __init__(self, source: MicrobatchSource, row: int) -> None:
        self._source = source
        self._row = row

    def next(self) -> Batch:
        """Return the next micro-batch, its one sample as often as there were samples."""
        batch = self._source.next()
        row = self._row
        rows: dict[str, Any] = {}
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, torch.Tensor) and value.dim() > 1:
                rows[field.name] = value[row : row + 1].expand_as(value).contiguous()
        return dataclasses.replace(batch, **rows)


def sample_losses(
    config: RunConfig,
    runtime: Runtime,
    parts: TrainingParts,
    forward_step: ForwardStep,
    source: MicrobatchSource,
    row: int,
    num_microbatches: int,
) -> Mapping[tuple[int, int], float]:
    """Return the mean loss of the sample in one row of each micro-batch, by micro-batch and data-parallel rank.

    Nothing is dropped out. Every rank must call, and gets all of them.
    """
    state = runtime.state
    noted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(batch: Batch, model: Model, hidden: torch.Tensor | None) -> ChunkResult:
        result = forward_step(batch, model, hidden)
        if isinstance(result, MicrobatchLoss):
            count = result.num_tokens if batch.loss_mask is None else batch.loss_mask.sum()
            noted.append((result.loss_sum.detach(), count))
        return result

    with torch.no_grad():
        evaluate(config, runtime, parts, forward, _OneRow(source, row), num_microbatches)
    own = [(float(loss), float(count)) for loss, count in noted] if state.tp.is_first else []
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for place, losses in all_gather_objects((state.place["dp"], own), state.world):
        for microbatch, (loss, count) in enumerate(losses):
            total, tokens = sums.get((microbatch, place), (0.0, 0.0))
            sums[microbatch, place] = (total + loss, tokens + count)
    return {key: loss / max(count, 1.0) for key, (loss, count) in sums.items()}


def outlying_samples(losses: Mapping[int, float]) -> tuple[tuple[int, ...], float]:
    """Return the samples whose loss is not finite or stands out, the largest first, and the median of all losses."""
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    median = statistics.median(finite) if finite else math.nan
    spread = _CONSISTENT_SPREAD * statistics.median([abs(loss - median) for loss in finite]) if finite else 0.0
    limit = median + _OUTLYING * max(spread, _LEAST_SPREAD * abs(median))
    bad = [sample for sample, loss in losses.items() if not loss <= limit]
    return tuple(sorted(bad, key=lambda sample: -losses[sample])), median
