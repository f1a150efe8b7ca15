"""Measure the loss on data that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megatron.core.datasets.batch import Batch
from megatron.core.models.model import Model
from megatron.core.pipeline_parallel.executor import ChunkResult, ModelChunk, run_schedule
from megatron.core.pipeline_parallel.schedules import Action, forward_only
from megatron.training.agreement import agree
from megatron.training.config.run_config import RunConfig
from megatron.training.data.microbatches import Microbatches, MicrobatchSource
from megatron.training.model_setup import TrainingParts
from megatron.training.process.initialize import Runtime
from megatron.training.training_step import ForwardStep


@dataclass(eq=False)
class _KeptMicrobatches:
    """Give a source's micro-batches, and all of them again after ``rewind``."""

    source: MicrobatchSource
    kept: list[Batch] = field(default_factory=list)
    _again: Iterator[Batch] | None = None

    def next(self) -> Batch:
        """Return the next micro-batch."""
        if self._again is not None:
            return next(self._again)
        self.kept.append(self.source.next())
        return self.kept[-1]

    def rewind(self) -> None:
        """Begin with the first one again."""
        self._again = iter(self.kept)


def evaluate_weights(
    config: RunConfig,
    runtime: Runtime,
    parts: TrainingParts,
    forward_step: ForwardStep,
    source: MicrobatchSource,
    num_microbatches: int,
    begin_microbatch: Callable[[int], None] = lambda microbatch: None,
) -> list[tuple[str, str, float]]:
    """Return the loss of the weights, and on the same micro-batches that of their average, where one is kept.

    Each has what stands behind a set's name in the metrics, and in the log; see `evaluate`.
    """
    rest = (forward_step, source, num_microbatches, begin_microbatch)
    if not parts.optimizer.has_average:
        return [("", "", evaluate(config, runtime, parts, *rest))]
    kept = _KeptMicrobatches(source)
    loss = evaluate(config, runtime, parts, forward_step, kept, num_microbatches, begin_microbatch)
    kept.rewind()
    with parts.optimizer.averaged_weights():
        average = evaluate(config, runtime, parts, forward_step, kept, num_microbatches)
    return [("", "", loss), ("_ema", " with averaged weights", average)]


def evaluate(
    config: RunConfig,
    runtime: Runtime,
    parts: TrainingParts,
    forward_step: ForwardStep,
    source: MicrobatchSource,
    num_microbatches: int,
    begin_microbatch: Callable[[int], None] = lambda microbatch: None,
) -> float:
    """Return the mean loss over the tokens of ``num_microbatches`` micro-batches of each rank, equal on all ranks.

    ``begin_microbatch`` is called with the number of each micro-batch that this rank's first chunk begins.
    """
    pp = runtime.state.pp
    microbatches = Microbatches(source, len(parts.chunks))

    def runnable(model: Model) -> ModelChunk:
        def forward(microbatch: int, hidden: torch.Tensor | None) -> ChunkResult:
            runtime.flight.tick()
            if model is parts.chunks[0]:
                begin_microbatch(microbatch)
            return forward_step(microbatches.take(microbatch), model, hidden)

        return ModelChunk(forward)

    for model in parts.chunks:
        model.eval()
    group_size = config.model.microbatch_group_size_per_virtual_pipeline_stage

    def actions_of(rank: int) -> Sequence[Action]:
        return forward_only(pp.size, rank, num_microbatches, len(parts.chunks), group_size)

    result = run_schedule(
        actions_of(pp.rank),
        [runnable(model) for model in parts.chunks],
        device=runtime.device.torch_device,
        connection=parts.connection,
        order=None if parts.connection is None else parts.connection.order_of(actions_of),
    )
    return agree(result, None, runtime).lm_loss
