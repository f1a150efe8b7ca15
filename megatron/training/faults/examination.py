"""Tell data, weights and devices apart: compute a step that went wrong again, and other things beside it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from megatron.core.collectives import all_gather_objects
from megatron.core.distributed.weight_checks import (
    ABSURD_RATIO,
    OUTLIER_RATIO,
    BadWeightsError,
    describe_bad_weights,
    differing_replicas,
    find_huge_weights,
    find_outlying_weights,
    gather_bad_weights,
)
from megatron.core.errors import DataError, TrainingError
from megatron.core.optimizer.clip_grads import check_weights
from megatron.training.agreement import Agreement, read_agreement, sum_over_ranks
from megatron.training.config.run_config import RunConfig
from megatron.training.data.batch_source import BatchSource
from megatron.training.faults.sample_losses import outlying_samples, sample_losses
from megatron.training.faults.step_trace import (
    RankTrace,
    StepTrace,
    describe_ranks,
    is_same,
    ranks_not_finite,
    ranks_that_differ,
)
from megatron.training.faults.verdict import Verdict
from megatron.training.model_setup import TrainingParts
from megatron.training.process.initialize import Runtime
from megatron.training.training_step import BegunStep, ForwardStep, TrainingStep

_NUM_NAMED = 16
_OTHER_SCALE = 2.0**-24
"""The factor on the loss scale at which a gradient that only overflows in float16 is finite."""
_SMALLER_SCALES = (1.0, 2.0**-6, 2.0**-12, 2.0**-18, _OTHER_SCALE)
"""Factors at which other samples are tried in turn: at the largest that is finite fewest gradients vanish."""
OpenSource = Callable[[int, int], BatchSource]
"""Returns the training data from a number of consumed samples on, for a rank so many data-parallel places on."""


@dataclass(frozen=True)
class Observed:
    """Hold what all ranks know of one computation of a step."""

    loss: float
    grad_norm: float
    traces: Sequence[RankTrace]

    def is_like(self, other: Observed) -> bool:
        """Return whether another computation has come to the same."""
        return (
            is_same(self.loss, other.loss)
            and is_same(self.grad_norm, other.grad_norm)
            and not ranks_that_differ(self.traces, other.traces)
        )

    @property
    def is_finite(self) -> bool:
        """Return whether all that any rank computed is finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm) and not ranks_not_finite(self.traces)


@dataclass(frozen=True, eq=False)
class Examination:
    """Examine steps whose update was not made; all ranks together, and all come to the same verdict.

    ``describe`` says what speaks against a loss and a gradient norm; ``prepare`` puts back what a step changes besides
    weights, before each computation; ``was_ever_fine`` says whether a step of this process was accepted.
    """

    config: RunConfig
    runtime: Runtime
    parts: TrainingParts
    forward_step: ForwardStep
    open_source: OpenSource
    trace: StepTrace
    describe: Callable[[float, float], str]
    prepare: Callable[[], None]
    was_ever_fine: Callable[[], bool]

    def first(self, agreement: Agreement) -> Observed:
        """Return what is known of a step that was just computed; the norm is the worst of any rank's."""
        norms = all_gather_objects(self.parts.optimizer.measure(), self.runtime.state.world)
        norm = max(norms) if all(map(math.isfinite, norms)) else math.nan
        return Observed(agreement.lm_loss, norm, self.trace.gather(self.parts.ddp_chunks, self.runtime.state))

    def examine(self, step: TrainingStep, begun: BegunStep, trouble: TrainingError | None, first: Observed) -> Verdict:
        """Return why a step went wrong.

        Weights are looked at first. Then the step is computed again, from the same state: another result means a
        device. The same one is computed by other data-parallel ranks, and other samples are, where there are some:
        what stays with the rank is the device, what goes with the samples is the data. A float16 step is computed at a
        smaller loss scale too: what is finite there has overflowed.
        """
        if isinstance(trouble, BadWeightsError):
            return Verdict("weights", str(trouble))
        found = self._check_weights()
        if found is not None:
            return found
        again = self._compute(step, begun)
        if not first.is_like(again):
            blamed = ranks_that_differ(first.traces, again.traces)
            return Verdict(
                "transient device",
                f"the same step gave another result when it was computed again (loss {first.loss:g}, then "
                f"{again.loss:g}; gradient norm {first.grad_norm:g}, then {again.grad_norm:g}): the device of "
                f"{describe_ranks(blamed)}",
                ranks=tuple(trace.rank for trace in blamed),
            )
        if not self.describe(again.loss, again.grad_norm):
            return Verdict("right", "the same step gave the same result again, and nothing speaks against it")
        blamed = self._ranks_that_keep_it(step, begun, again)
        if blamed:
            return _persistent(blamed, "other ranks compute other results from the same samples")
        if self._is_float16 and not again.is_finite:
            smaller = replace(begun, loss_scale=begun.loss_scale * _OTHER_SCALE)
            if self._compute(step, smaller).is_finite:
                return Verdict(
                    "overflow",
                    f"the same step gave the same result again at the loss scale {begun.loss_scale:g}, and a finite "
                    f"one at {smaller.loss_scale:g}: gradients are too large for float16, and no device is to blame",
                )
        other = self._other_samples(step, begun)
        if other is not None and self.describe(other.loss, other.grad_norm):
            return self._of_all_samples(other)
        return self._of_the_data(begun, is_alone=other is None)

    def _check_weights(self) -> Verdict | None:
        state = self.runtime.state
        try:
            check_weights(self.parts.ddp_chunks, state.world)
        except BadWeightsError as error:
            return Verdict("weights", str(error))
        parameters = self._parameters()
        differing = differing_replicas(parameters, state)
        ratio = OUTLIER_RATIO if differing else ABSURD_RATIO
        outlying = gather_bad_weights(find_outlying_weights(parameters, ratio), state.world)
        found = [differing] if differing else []
        if outlying:
            found.append(f"weights are far larger than those beside them: {describe_bad_weights(outlying)}")
        return Verdict("weights", "; ".join(found)) if found else None

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.parts.chunks for parameter in chunk.parameters()]

    @property
    def _is_float16(self) -> bool:
        return self.config.model.params_dtype == "float16"

    def _compute(self, step: TrainingStep, begun: BegunStep, consumed: int | None = None, shift: int = 0) -> Observed:
        self.prepare()
        with closing(self.open_source(begun.consumed_samples if consumed is None else consumed, shift)) as source:
            result = step.compute(source, begun, shift)
        return self.first(read_agreement(sum_over_ranks(result, None, self.runtime), self.runtime, ()))

    def _ranks_that_keep_it(self, step: TrainingStep, begun: BegunStep, first: Observed) -> list[RankTrace]:
        """Return the ranks that compute another result than the ranks that hold the same part of other copies."""
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
        """Compute the batch before the step's, or the one after the first; None where there is none.

        In float16 what overflows is computed at smaller loss scales: that of a spike may be too large for others.
        """
        size, other = begun.global_batch_size, None
        consumed = begun.consumed_samples - size if begun.consumed_samples >= size else begun.consumed_samples + size
        for factor in _SMALLER_SCALES if self._is_float16 else (1.0,):
            try:
                other = self._compute(step, replace(begun, loss_scale=begun.loss_scale * factor), consumed)
            except DataError:  # on every rank alike: the data ends with this step
                return None
            if other.is_finite:
                break
        return other

    def _of_all_samples(self, other: Observed) -> Verdict:
        """Return the verdict where other samples, which were fine, look as wrong."""
        local = find_outlying_weights(self._parameters())
        outlying = gather_bad_weights(local, self.runtime.state.world)
        if outlying:
            return Verdict(
                "weights", f"weights are far larger than those beside them: {describe_bad_weights(outlying)}"
            )
        blamed = ranks_not_finite(other.traces)
        named = tuple(trace.rank for trace in blamed)
        same = "the same step gave the same result again, other samples look as wrong"
        copies = self.config.parallel_sizes.num_copies_apart
        alone = "one copy cannot" if self.runtime.state.dp.size == 1 else "copies that share experts cannot"
        if self._is_float16 and blamed:
            too_large = f"{same}, at any loss scale: numbers are too large for float16"
            if copies > 1:
                return Verdict("overflow", too_large)
            doubt = f", or the device of {describe_ranks(blamed)} fails; {alone} tell which"
            return Verdict("overflow", too_large + doubt, ranks=named)
        huge = gather_bad_weights(find_huge_weights(self._parameters()), self.runtime.state.world)
        if huge:
            return _training(f"{same}, and weights have grown beyond use: {describe_bad_weights(huge)}")
        if copies > 1:
            return _training(
                f"{same}, and {copies} data-parallel copies come to the same, so that no device is to blame"
            )
        if not blamed:
            return _training(f"{same}, and every rank computes what is finite")
        if not self.was_ever_fine():
            return _training(
                f"{same}, and no step of this process was fine before: the model, its loss or the device of "
                f"{describe_ranks(blamed)}; {alone} tell which"
            )
        return _persistent(
            blamed, "samples that were fine before look as wrong now, and the weights are finite and of usual size"
        )

    def _of_the_data(self, begun: BegunStep, *, is_alone: bool) -> Verdict:
        """Return the verdict where the samples are to blame, with those that stand out."""
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
        proof = "there are no others to compare with" if is_alone else "other samples are fine"
        if samples:
            named = ", ".join(f"{sample} (loss {losses[sample]:.6g})" for sample in samples[:_NUM_NAMED])
            found = f"sample{'s' if len(samples) > 1 else ''} {named}; the median of the batch is {median:.6g}"
        else:
            found = "none of the samples stands out from the batch by its loss"
        return Verdict(
            "data",
            f"the same step gave the same result again, the weights are finite, and {proof}: the data; {found}",
            samples=samples,
        )


def _persistent(blamed: Sequence[RankTrace], reason: str) -> Verdict:
    return Verdict(
        "persistent device",
        f"the same step gave the same result again, and {reason}: the device of {describe_ranks(blamed)}; run without "
        "it",
        ranks=tuple(trace.rank for trace in blamed),
    )


def _training(reason: str) -> Verdict:
    return Verdict("training", f"{reason}: the training itself; lower --lr or --clip-grad, or go back")


def _place(trace: RankTrace, copy: int | None = None) -> tuple[int, ...]:
    place = trace.place
    return (place["pp"], place["dp"] if copy is None else copy, place["cp"], place["tp"])


def _worst(trace: RankTrace) -> float:
    """Return the largest figure of a rank; infinity for what is not finite."""
    figures = [*trace.forward.values(), trace.gradient or 0.0]
    return max(abs(figure) if math.isfinite(figure) else math.inf for figure in figures)
