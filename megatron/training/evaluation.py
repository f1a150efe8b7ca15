"""Evaluation: the loss on the validation sets and on the test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeGuard

import torch

from megatron.checkpoint import TrainState
from megatron.config import RunConfig, extra_validation_sets
from megatron.core.datasets import Batch, DatasetSplits, ExternalSamples, SampleDataset
from megatron.core.models import Model
from megatron.core.pipeline_parallel import Action, ChunkResult, ModelChunk, forward_only, run_schedule
from megatron.training.batch_source import BatchSource
from megatron.training.initialize import Runtime
from megatron.training.model_setup import ModelAndOptimizer
from megatron.training.training_step import ForwardStep, Microbatches, MicrobatchSource, agree

_FORWARDS_PER_STEP = 3
"""Cost of a training step per micro-batch in forward passes: the backward pass costs two."""


@dataclass(eq=False)
class _KeptMicrobatches:
    """Micro-batches of a source, recorded so that ``rewind`` can replay them."""

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
        """Start again with the first micro-batch."""
        self._again = iter(self.kept)


def evaluate_weights(
    config: RunConfig,
    runtime: Runtime,
    parts: ModelAndOptimizer,
    forward_step: ForwardStep,
    source: MicrobatchSource,
    num_microbatches: int,
    begin_microbatch: Callable[[int], None] = lambda microbatch: None,
) -> list[tuple[str, str, float]]:
    """Evaluate the weights, and on the same micro-batches their average (EMA) if there is one.

    Each result has a suffix for the set's name in the metrics, a suffix for the log line, and the loss; see `evaluate`.
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
    parts: ModelAndOptimizer,
    forward_step: ForwardStep,
    source: MicrobatchSource,
    num_microbatches: int,
    begin_microbatch: Callable[[int], None] = lambda microbatch: None,
) -> float:
    """Return the mean loss per token over ``num_microbatches`` micro-batches of each rank, equal on all ranks.

    ``begin_microbatch`` is called with the number of each micro-batch that this rank's first chunk starts.
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


SourceMaker = Callable[[SampleDataset | ExternalSamples, int, int | None], BatchSource]
"""Open a data set from a position on, or with a count, that many samples of it, each once."""


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """One data set of an evaluation.

    ``name`` is written to the metrics file, ``title`` to the log. The context of ``open_source`` gives each rank
    ``num_microbatches`` micro-batches, which have ``num_samples`` samples over all ranks. ``num_advanced`` is the
    number of samples after which the next evaluation continues; it is 0 for a set whose evaluations all read the same
    samples.
    """

    name: str
    title: str
    num_samples: int
    num_microbatches: int
    open_source: Callable[[], AbstractContextManager[BatchSource]]
    num_advanced: int = 0


@dataclass(frozen=True, eq=False)
class EvaluationSets:
    """Validation sets of every evaluation, and the test set of the last one; empty without data.

    ``lasting_source`` is the source that stays open between evaluations.
    """

    validation: tuple[EvaluationSet, ...]
    test: tuple[EvaluationSet, ...]
    lasting_source: BatchSource | None = None

    def close(self) -> None:
        """Close the source that stays open."""
        if self.lasting_source is not None:
            self.lasting_source.close()


def plan_evaluation(
    config: RunConfig, datasets: DatasetSplits, train_state: TrainState, source: SourceMaker
) -> EvaluationSets:
    """Plan the data sets of a run's evaluations; there are none with ``--eval-iters 0``."""
    if config.validation.eval_iters == 0:
        return EvaluationSets((), ())
    samples_per_microbatch = config.training.micro_batch_size * config.data_parallel_size
    num_samples = config.validation.most_eval_iters * config.training.global_batch_size
    num_microbatches = num_samples // samples_per_microbatch

    def whole(name: str, title: str, dataset: SampleDataset, count: int | None) -> EvaluationSet:
        size = len(dataset) if count is None else count
        number = -(-size // samples_per_microbatch)
        return EvaluationSet(name, title, size, number, lambda: closing(source(dataset, 0, size)))

    def is_read_once(dataset: SampleDataset | ExternalSamples) -> TypeGuard[SampleDataset]:
        is_small = config.validation.eval_iters is None
        return is_small and not isinstance(dataset, ExternalSamples) and len(dataset) < num_samples

    validation, test = list[EvaluationSet](), list[EvaluationSet]()
    lasting = None
    if datasets.valid is not None:
        name, title = "validation", "validation set"
        if config.validation.full_validation or is_read_once(datasets.valid):
            assert not isinstance(datasets.valid, ExternalSamples), "rejected with the command line"
            validation.append(whole(name, title, datasets.valid, None))
        else:
            # One source for the whole run: each evaluation continues after the previous one.
            lasting = opened = source(datasets.valid, train_state.consumed_valid_samples, None)
            validation.append(
                EvaluationSet(name, title, num_samples, num_microbatches, lambda: nullcontext(opened), num_samples)
            )
    if (test_set := datasets.test) is not None:
        if is_read_once(test_set):
            test.append(whole("test", "test set", test_set, None))
        else:
            restarted = partial(_open_first, source, test_set)
            test.append(EvaluationSet("test", "test set", num_samples, num_microbatches, restarted))
    counts = {extra.name: extra.num_samples for extra in extra_validation_sets(config.validation)}
    for name, dataset in datasets.extra_valid.items():
        validation.append(whole(name, f"validation set {name}", dataset, counts[name]))
    return EvaluationSets(tuple(validation), tuple(test), lasting)


def _open_first(source: SourceMaker, dataset: SampleDataset | ExternalSamples) -> AbstractContextManager[BatchSource]:
    return closing(source(dataset, 0, None))


@dataclass(eq=False)
class EvaluationRecord:
    """Newest loss of each evaluation set of a run, and the measured time per micro-batch.

    ``step_s`` is the time of the newest training step per micro-batch, from which the time of a first evaluation is
    estimated.
    """

    losses: dict[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    _elapsed_s: float = 0.0
    _num_microbatches: int = 0

    def add(self, num_microbatches: int, elapsed_s: float) -> None:
        """Add the time of an evaluation of ``num_microbatches`` micro-batches per rank."""
        self._elapsed_s += elapsed_s
        self._num_microbatches += num_microbatches

    def estimate_s(self, sets: Sequence[EvaluationSet]) -> float | None:
        """Return the estimated seconds to evaluate some sets, or None before anything was measured."""
        if self._num_microbatches:
            each_s = self._elapsed_s / self._num_microbatches
        elif self.step_s:
            each_s = self.step_s / _FORWARDS_PER_STEP
        else:
            return None
        return each_s * sum(chosen.num_microbatches for chosen in sets)
