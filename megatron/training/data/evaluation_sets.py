"""Evaluation data: the validation set, extra validation sets by name, and the test set at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

from megatron.core.datasets.blended_megatron_dataset_builder import DatasetSplits
from megatron.core.datasets.gpt_dataset import ExternalSamples, SampleDataset
from megatron.training.config.data_lists import extra_validation_sets
from megatron.training.config.run_config import RunConfig
from megatron.training.data.batch_source import BatchSource
from megatron.training.train_state import TrainState

SourceMaker = Callable[[SampleDataset | ExternalSamples, int, int | None], BatchSource]
"""Return the micro-batches of a data set from a position on, or of that many samples of it, each once."""


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """Hold one set to evaluate on.

    ``name`` is written to the metrics file, ``title`` to the log. The context of ``open_source`` gives each rank
    ``num_microbatches`` micro-batches. ``num_advanced`` is the number of samples after which the next evaluation
    continues; it is 0 for a set whose evaluations all read the same samples.
    """

    name: str
    title: str
    num_microbatches: int
    open_source: Callable[[], AbstractContextManager[BatchSource]]
    num_advanced: int = 0


@dataclass(frozen=True, eq=False)
class EvaluationSets:
    """Hold the validation sets of every evaluation, and the test set of the last; empty where there is no data.

    ``lasting_source`` is the source that stays open from one evaluation to the next.
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
    """Return what a run is evaluated on; nothing with ``--eval-iters 0``."""
    if config.validation.eval_iters == 0:
        return EvaluationSets((), ())
    samples_per_microbatch = config.training.micro_batch_size * config.data_parallel_size
    num_samples = config.validation.eval_iters * config.training.global_batch_size

    num_microbatches = num_samples // samples_per_microbatch

    def whole(name: str, title: str, dataset: SampleDataset, count: int | None) -> EvaluationSet:
        size = len(dataset) if count is None else count
        number = -(-size // samples_per_microbatch)
        return EvaluationSet(name, title, number, lambda: closing(source(dataset, 0, size)))

    validation = []
    lasting = None
    if datasets.valid is not None:
        if config.validation.full_validation:
            assert not isinstance(datasets.valid, ExternalSamples), "refused with the command line"
            validation.append(whole("validation", "validation set", datasets.valid, None))
        else:
            # One source for the whole run: each evaluation continues after the last.
            lasting = opened = source(datasets.valid, train_state.consumed_valid_samples, None)
            validation.append(
                EvaluationSet(
                    "validation", "validation set", num_microbatches, lambda: nullcontext(opened), num_samples
                )
            )
    counts = {extra.name: extra.num_samples for extra in extra_validation_sets(config.validation)}
    for name, dataset in datasets.extra_valid.items():
        validation.append(whole(name, f"validation set {name}", dataset, counts[name]))
    return EvaluationSets(tuple(validation), tuple(_test_sets(datasets, num_microbatches, source)), lasting)


def _test_sets(datasets: DatasetSplits, num_microbatches: int, source: SourceMaker) -> Iterator[EvaluationSet]:
    test = datasets.test
    if test is not None:
        yield EvaluationSet("test", "test set", num_microbatches, lambda: closing(source(test, 0, None)))
