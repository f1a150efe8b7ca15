"""Step replay: recompute a faulty step to attribute the fault to data, weights or a device."""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from megatron.config import RunConfig
from megatron.core.collectives import all_gather_objects
from megatron.core.datasets import Batch
from megatron.core.distributed import (
    ABSURD_RATIO,
    OUTLIER_RATIO,
    BadWeightsError,
    DistributedDataParallel,
    describe_bad_weights,
    differing_replicas,
    find_huge_weights,
    find_outlying_weights,
    gather_bad_weights,
)
from megatron.core.errors import DataError, TrainingError
from megatron.core.layer_output import LayerOutput
from megatron.core.models import Model
from megatron.core.optimizer import check_weights
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import ChunkResult, MicrobatchLoss
from megatron.training import (
    BatchSource,
    BegunStep,
    ForwardStep,
    MicrobatchSource,
    ModelAndOptimizer,
    Runtime,
    StepReduction,
    TrainingStep,
    evaluate,
    read_agreement,
    sum_over_ranks,
)

Cause = Literal["weights", "data", "transient device", "persistent device", "training", "overflow", "right"]
"""Root cause of a result that looked wrong.

``training`` means that other samples look wrong too and that no device is at fault, ``overflow`` that values exceed the
range of float16, and ``right`` that the result is reproducible and plausible.
"""


@dataclass(frozen=True)
class FaultAttribution:
    """Root cause of a result that looked wrong, with the findings in words.

    ``samples`` are the ids of outlying samples, and ``ranks`` those whose device is, or may be, at fault.
    """

    cause: Cause
    text: str
    samples: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


class Rewind(TrainingError):
    """Request to roll the run back to its newest validated checkpoint; all ranks raise it."""


_TOLERANCE = 1.0e-3
"""Relative difference up to which two values count as equal; nondeterministic summation orders differ by less."""


@dataclass(frozen=True)
class RankTrace:
    """Values of one rank: one for each chunk and micro-batch, and the norms of its own gradients.

    ``forward`` has the loss of the last chunk and the L1 norm of the hidden states of every other chunk, before any
    communication. ``gradient`` is the norm of the gradients before the reduction whose norms are known for every step,
    or None if norms are not recorded. ``large_gradient`` is the norm of the other gradients, or None if it is unknown,
    as in the first computation of a step.
    """

    rank: int
    host: str
    place: Mapping[str, int]
    forward: Mapping[tuple[int, int], float]
    gradient: float | None
    large_gradient: float | None = None

    def stage_values(self, chunk: int) -> list[float]:
        """Return the values of one chunk by micro-batch."""
        return [value for (of, _), value in sorted(self.forward.items()) if of == chunk]


class StepTrace:
    """Recorder of the results of a rank's chunks in a step, without waiting for the device."""

    def __init__(self) -> None:
        self._forward: dict[tuple[int, int], torch.Tensor] = {}

    def clear(self) -> None:
        """Reset the trace for a new computation."""
        self._forward = {}

    def note(self, chunk: int, microbatch: int, result: ChunkResult) -> None:
        """Record one result."""
        if isinstance(result, MicrobatchLoss):
            figure = result.loss_sum.detach()
        else:
            hidden = result.hidden if isinstance(result, LayerOutput) else result
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            figure = torch.linalg.vector_norm(hidden.detach(), ord=1, dtype=dtype)
        self._forward[chunk, microbatch] = figure

    def gather(self, chunks: Sequence[DistributedDataParallel], state: ParallelState) -> list[RankTrace]:
        """Gather the values of all ranks; collective, and the host waits for the device."""
        gradient = large_gradient = None
        if all(chunk.config.check_for_nan_in_loss_and_grad for chunk in chunks):
            norms = [each for chunk in chunks for each in chunk.local_grad_norms()]
            gradient = math.hypot(*(each.norm for each in norms if each.is_always_known))
            large = [each.norm for each in norms if not each.is_always_known]
            large_gradient = math.hypot(*large) if large else None
        forward = {key: float(figure) for key, figure in self._forward.items()}
        trace = RankTrace(state.rank, platform.node(), dict(state.place), forward, gradient, large_gradient)
        return all_gather_objects(trace, state.world)


def is_same(one: float | None, other: float | None) -> bool:
    """Return whether two values are of the same computation: equal except for rounding, or both not finite."""
    if one is None or other is None:
        return one is other
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))


def ranks_that_differ(first: Sequence[RankTrace], second: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the ranks at which two computations of a step diverge first, in the order of the data flow.

    In the forward pass a fault propagates from stage to stage, and in the backward pass in reverse. Of the ranks with
    different values, those are returned that did not receive the difference from another rank.
    """
    places = sorted({(chunk, trace.place["pp"]) for trace in first for chunk, _ in trace.forward})
    for chunk, stage in places:
        found = [
            one
            for one, other in zip(first, second, strict=True)
            if one.place["pp"] == stage and not all(map(is_same, one.stage_values(chunk), other.stage_values(chunk)))
        ]
        if found:
            return found
    differing = [one for one, other in zip(first, second, strict=True) if not _has_same_gradients(one, other)]
    last = max((trace.place["pp"] for trace in differing), default=0)
    return [trace for trace in differing if trace.place["pp"] == last]


def _has_same_gradients(one: RankTrace, other: RankTrace) -> bool:
    """Return whether the gradients of two computations are equal, as far as both have recorded them."""
    is_known = one.large_gradient is not None and other.large_gradient is not None
    return is_same(one.gradient, other.gradient) and (not is_known or is_same(one.large_gradient, other.large_gradient))


def ranks_not_finite(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the ranks at which a computation first became non-finite, in the order of the data flow."""
    return ranks_that_differ(
        [_with_values(each, _mark) for each in traces], [_with_values(each, _zero) for each in traces]
    )


def _with_values(trace: RankTrace, change: Callable[[float], float]) -> RankTrace:
    """Return a trace in which each known value is changed by a function."""
    gradients = (trace.gradient, trace.large_gradient)
    gradient, large_gradient = (None if value is None else change(value) for value in gradients)
    forward = {key: change(value) for key, value in trace.forward.items()}
    return dataclasses.replace(trace, forward=forward, gradient=gradient, large_gradient=large_gradient)


def _mark(value: float) -> float:
    return 0.0 if math.isfinite(value) else math.nan


def _zero(value: float) -> float:
    return 0.0


def describe_ranks(traces: Sequence[RankTrace]) -> str:
    """Describe ranks with their hosts in words."""
    if not traces:
        return "a rank that cannot be distinguished from the others"
    named = ", ".join(f"rank {trace.rank} on {trace.host}" for trace in traces)
    return named if len(traces) == 1 else f"one of {named}, which cannot be distinguished"


_OUTLYING = 6.0
_LEAST_SPREAD = 0.02
_CONSISTENT_SPREAD = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""


class _OneRow:
    """Micro-batches in which one row's sample replaces all others."""

    def __init__(self, source: MicrobatchSource, row: int) -> None:
        self._source = source
        self._row = row

    def next(self) -> Batch:
        """Return the next micro-batch, with its one sample repeated."""
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
    parts: ModelAndOptimizer,
    forward_step: ForwardStep,
    source: MicrobatchSource,
    row: int,
    num_microbatches: int,
) -> Mapping[tuple[int, int], float]:
    """Return the mean loss of the sample in one row of each micro-batch, by micro-batch and data-parallel rank.

    Dropout is disabled. Every rank must call this, and gets all losses.
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
    """Return the samples whose loss is not finite or an outlier, the largest first, and the median of all losses."""
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    median = statistics.median(finite) if finite else math.nan
    spread = _CONSISTENT_SPREAD * statistics.median([abs(loss - median) for loss in finite]) if finite else 0.0
    limit = median + _OUTLYING * max(spread, _LEAST_SPREAD * abs(median))
    bad = [sample for sample, loss in losses.items() if not loss <= limit]
    return tuple(sorted(bad, key=lambda sample: -losses[sample])), median


_NUM_NAMED = 16
_OTHER_SCALE = 2.0**-24
"""Factor on the loss scale that makes a gradient finite if it only overflows in float16."""
_SMALLER_SCALES = (1.0, 2.0**-6, 2.0**-12, 2.0**-18, _OTHER_SCALE)
"""Factors tried in turn for other samples: the largest finite one loses the fewest gradients to underflow."""
OpenSource = Callable[[int, int], BatchSource]
"""Opens the training data after a number of consumed samples, for the data-parallel rank at an offset."""


@dataclass(frozen=True)
class Observed:
    """Results of one computation of a step, known to all ranks."""

    loss: float
    grad_norm: float
    traces: Sequence[RankTrace]

    def is_like(self, other: Observed) -> bool:
        """Return whether another computation has the same result."""
        return (
            is_same(self.loss, other.loss)
            and is_same(self.grad_norm, other.grad_norm)
            and not ranks_that_differ(self.traces, other.traces)
        )

    @property
    def is_finite(self) -> bool:
        """Return whether all values that any rank computed are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm) and not ranks_not_finite(self.traces)


@dataclass(frozen=True, eq=False)
class StepReplay:
    """Replay of steps whose update was not applied; all ranks replay together and reach the same verdict.

    ``describe`` describes what is wrong with a loss and a gradient norm. ``prepare`` restores the state that a step
    changes in addition to the weights, before each computation. ``was_ever_fine`` returns whether this process has
    accepted a step.
    """

    config: RunConfig
    runtime: Runtime
    parts: ModelAndOptimizer
    forward_step: ForwardStep
    open_source: OpenSource
    trace: StepTrace
    describe: Callable[[float, float], str]
    prepare: Callable[[], None]
    was_ever_fine: Callable[[], bool]

    def first(self, agreement: StepReduction) -> Observed:
        """Collect the results of a step that was just computed; the norm is the worst of all ranks."""
        norms = all_gather_objects(self.parts.optimizer.measure(), self.runtime.state.world)
        norm = max(norms) if all(map(math.isfinite, norms)) else math.nan
        return Observed(agreement.lm_loss, norm, self.trace.gather(self.parts.ddp_chunks, self.runtime.state))

    def examine(
        self, step: TrainingStep, begun: BegunStep, trouble: TrainingError | None, first: Observed
    ) -> FaultAttribution:
        """Find the root cause of a step that went wrong.

        The weights are checked first. Then the step is recomputed from the same state: a different result implicates a
        device. The same samples are also computed by other data-parallel ranks, and other samples are computed, if
        there are any. A fault that stays with the rank is due to the device, and a fault that moves with the samples is
        due to the data. A float16 step is also computed at a smaller loss scale: a finite result there means overflow.
        """
        if isinstance(trouble, BadWeightsError):
            return FaultAttribution("weights", str(trouble))
        found = self._check_weights()
        if found is not None:
            return found
        again = self._compute(step, begun)
        if not first.is_like(again):
            blamed = ranks_that_differ(first.traces, again.traces)
            return FaultAttribution(
                "transient device",
                f"the same step gave a different result when it was computed again (loss {first.loss:g}, then "
                f"{again.loss:g}; gradient norm {first.grad_norm:g}, then {again.grad_norm:g}): the device of "
                f"{describe_ranks(blamed)}",
                ranks=tuple(trace.rank for trace in blamed),
            )
        if not self.describe(again.loss, again.grad_norm):
            return FaultAttribution("right", "the same step gave the same result again, and nothing indicates an error")
        blamed = self._ranks_that_keep_it(step, begun, again)
        if blamed:
            return _persistent(blamed, "other ranks compute different results from the same samples")
        if self._is_float16 and not again.is_finite:
            smaller = replace(begun, loss_scale=begun.loss_scale * _OTHER_SCALE)
            if self._compute(step, smaller).is_finite:
                return FaultAttribution(
                    "overflow",
                    f"the same step gave the same result again at the loss scale {begun.loss_scale:g}, and a finite "
                    f"one at {smaller.loss_scale:g}: gradients are too large for float16, and no device is at fault",
                )
        other = self._other_samples(step, begun)
        if other is not None and self.describe(other.loss, other.grad_norm):
            return self._of_all_samples(other)
        return self._of_the_data(begun, is_alone=other is None)

    def _check_weights(self) -> FaultAttribution | None:
        state = self.runtime.state
        try:
            check_weights(self.parts.ddp_chunks, state.world)
        except BadWeightsError as error:
            return FaultAttribution("weights", str(error))
        parameters = self._parameters()
        differing = differing_replicas(parameters, state)
        ratio = OUTLIER_RATIO if differing else ABSURD_RATIO
        outlying = gather_bad_weights(find_outlying_weights(parameters, ratio), state.world)
        found = [differing] if differing else []
        if outlying:
            found.append(f"weights are far larger than their neighbors: {describe_bad_weights(outlying)}")
        return FaultAttribution("weights", "; ".join(found)) if found else None

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.parts.chunks for parameter in chunk.parameters()]

    @property
    def _is_float16(self) -> bool:
        return self.config.model.params_dtype == "float16"

    def _compute(self, step: TrainingStep, begun: BegunStep, consumed: int | None = None, shift: int = 0) -> Observed:
        self.prepare()
        with closing(self.open_source(begun.consumed_samples if consumed is None else consumed, shift)) as source:
            result = step.compute(source, begun, shift, records_all_norms=True)
        return self.first(read_agreement(sum_over_ranks(result, None, self.runtime), self.runtime, ()))

    def _ranks_that_keep_it(self, step: TrainingStep, begun: BegunStep, first: Observed) -> list[RankTrace]:
        """Return the ranks whose result differs from those of the corresponding ranks in other replicas."""
        size = self.runtime.state.dp.size
        if size == 1:
            return []
        moved = self._compute(step, begun, shift=1)
        by_place = {_place(trace): trace for trace in moved.traces}
        aligned = [by_place[_place(trace, (trace.place["dp"] - 1) % size)] for trace in first.traces]
        blame: Counter[int] = Counter()
        for one in ranks_that_differ(first.traces, aligned):
            other = aligned[one.rank]
            for mine, its in ((one, other), (other, one)):
                is_worse = _worst(mine) > _worst(its)
                blame[mine.rank] += 1 + 2 * is_worse
        most = max(blame.values(), default=0)
        return [trace for trace in first.traces if most and blame[trace.rank] == most]

    def _other_samples(self, step: TrainingStep, begun: BegunStep) -> Observed | None:
        """Compute the batch before the step's, or the batch after the first step; None if there is none.

        In float16, an overflow is retried at smaller loss scales, because the loss scale of a spike may be too large
        for other samples.
        """
        size, other = begun.global_batch_size, None
        consumed = begun.consumed_samples - size if begun.consumed_samples >= size else begun.consumed_samples + size
        for factor in _SMALLER_SCALES if self._is_float16 else (1.0,):
            try:
                other = self._compute(step, replace(begun, loss_scale=begun.loss_scale * factor), consumed)
            except DataError:  # on every rank: the data ends with this step
                return None
            if other.is_finite:
                break
        return other

    def _of_all_samples(self, other: Observed) -> FaultAttribution:
        """Return the verdict if other samples, which were fine before, look wrong too."""
        local = find_outlying_weights(self._parameters())
        outlying = gather_bad_weights(local, self.runtime.state.world)
        if outlying:
            return FaultAttribution(
                "weights", f"weights are far larger than their neighbors: {describe_bad_weights(outlying)}"
            )
        blamed = ranks_not_finite(other.traces)
        named = tuple(trace.rank for trace in blamed)
        same = "the same step gave the same result again, and other samples also give a wrong result"
        copies = self.config.parallel_sizes.num_copies_apart
        alone = "one replica cannot" if self.runtime.state.dp.size == 1 else "replicas that share experts cannot"
        if self._is_float16 and blamed:
            too_large = f"{same}, at any loss scale: numbers are too large for float16"
            if copies > 1:
                return FaultAttribution("overflow", too_large)
            doubt = f", or the device of {describe_ranks(blamed)} fails; {alone} distinguish them"
            return FaultAttribution("overflow", too_large + doubt, ranks=named)
        huge = gather_bad_weights(find_huge_weights(self._parameters()), self.runtime.state.world)
        if huge:
            return _training(f"{same}, and weights have become too large: {describe_bad_weights(huge)}")
        if copies > 1:
            return _training(
                f"{same}, and {copies} data-parallel replicas give the same result, so no device is at fault"
            )
        if not blamed:
            return _training(f"{same}, and the results of every rank are finite")
        if not self.was_ever_fine():
            return _training(
                f"{same}, and no step of this process was fine before: the model, its loss or the device of "
                f"{describe_ranks(blamed)}; {alone} distinguish them"
            )
        return _persistent(
            blamed,
            (
                "samples that were fine before now give a wrong result too, and the weights are finite and of normal "
                "size"
            ),
        )

    def _of_the_data(self, begun: BegunStep, *, is_alone: bool) -> FaultAttribution:
        """Return the verdict if the samples are at fault, with the outliers among them."""
        config, training = self.config, self.config.training
        size, copies = training.micro_batch_size, config.data_parallel_size
        number = begun.global_batch_size // (size * copies)
        losses: dict[int, float] = {}
        with closing(self.open_source(begun.consumed_samples, 0)) as source:
            ids = source.sample_ids(begun.consumed_samples, begun.global_batch_size)
        for row in range(size):
            with closing(self.open_source(begun.consumed_samples, 0)) as source:
                of_row = sample_losses(config, self.runtime, self.parts, self.forward_step, source, row, number)
            for (microbatch, copy), loss in of_row.items():
                losses[int(ids[(microbatch * copies + copy) * size + row])] = loss
        samples, median = outlying_samples(losses)
        proof = "there are no other samples to compare with" if is_alone else "other samples are fine"
        if samples:
            named = ", ".join(f"{sample} (loss {losses[sample]:.6g})" for sample in samples[:_NUM_NAMED])
            found = f"sample{'s' if len(samples) > 1 else ''} {named}; the median of the batch is {median:.6g}"
        else:
            found = "no sample has an outlying loss"
        return FaultAttribution(
            "data",
            f"the same step gave the same result again, the weights are finite, and {proof}: the data; {found}",
            samples=samples,
        )


def _persistent(blamed: Sequence[RankTrace], reason: str) -> FaultAttribution:
    return FaultAttribution(
        "persistent device",
        f"the same step gave the same result again, and {reason}: the device of {describe_ranks(blamed)}; run without "
        "it",
        ranks=tuple(trace.rank for trace in blamed),
    )


def _training(reason: str) -> FaultAttribution:
    return FaultAttribution("training", f"{reason}: the training itself; lower --lr or --clip-grad, or roll back")


def _place(trace: RankTrace, copy: int | None = None) -> tuple[int, ...]:
    place = trace.place
    return (place["pp"], place["dp"] if copy is None else copy, place["cp"], place["tp"])


def _worst(trace: RankTrace) -> float:
    """Return the largest value of a rank, or infinity if a value is not finite."""
    figures = [*trace.forward.values(), trace.gradient or 0.0, trace.large_gradient or 0.0]
    return max(abs(figure) if math.isfinite(figure) else math.inf for figure in figures)
