"""One training step: micro-batches, forward and backward, gradient reduction, update, and reduced results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.collectives import all_reduce
from megatron.core.datasets import Batch, SkippedSamples
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.errors import TrainingError
from megatron.core.host_memory import Copied
from megatron.core.models import Model
from megatron.core.ops import DropoutSamples, weights_kept
from megatron.core.optimizer import StepOutcome
from megatron.core.pipeline_parallel import (
    SCHEDULES,
    Action,
    ChunkForward,
    ChunkResult,
    MicrobatchLoss,
    ModelChunk,
    ScheduleResult,
    StagePlace,
    run_schedule,
    with_deferred_grads,
)
from megatron.core.timers import Timers
from megatron.core.transformer.moe import LoadReport
from megatron.training.dist_signal_handler import ExitRequest
from megatron.training.initialize import Runtime
from megatron.training.loggers import DataSetLoss, StepReport
from megatron.training.model_setup import ModelAndOptimizer


class DataSetSums:
    """Sums of losses and tokens per data set on this rank, all on the device.

    ``names`` are the data sets of the blend in order, the same on all ranks; without names, nothing is summed.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._numbers = torch.arange(len(self._names), device=device)
        self._sums: torch.Tensor | None = None

    def begin(self) -> torch.Tensor | None:
        """Reset the sums at the start of a step, and return them for `add`, or None without data sets.

        A rank that computes no loss has them too, because all ranks must reduce the same number of values.

        Shapes: ``-> [n, 2]`` float64, the loss sum and the number of tokens.
        """
        if self._names:
            self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=self._numbers.device)
        return self._sums

    def add(self, batch: Batch, result: ChunkResult) -> None:
        """Add the samples of a micro-batch, if this chunk computed their losses."""
        if self._sums is not None and isinstance(result, MicrobatchLoss) and result.samples is not None:
            assert batch.data_sets is not None, "the source says which data set a sample is of"
            # A matmul adds in a fixed order; on CUDA, index_add would not be deterministic.
            chosen = self._numbers[:, None] == batch.data_sets
            self._sums += chosen.to(result.samples.dtype) @ result.samples

    def losses(self, totals: Sequence[tuple[float, float]]) -> Mapping[str, DataSetLoss]:
        """Return the losses by name of the data sets that have tokens in the sums over all ranks."""
        return {
            name: DataSetLoss(loss_sum / num_tokens, round(num_tokens))
            for name, (loss_sum, num_tokens) in zip(self._names, totals)
            if num_tokens > 0
        }


@dataclass(frozen=True)
class StepReduction:
    """Sums over all ranks after a step; ``auxiliary`` are means by name.

    ``data_sets`` are the loss sum and the number of tokens of each data set of a blend, if they are counted separately.
    ``read_along`` are values of this rank only that were read from the device in the same transfer.
    """

    loss_sum: float
    num_tokens: float
    signal_received: bool
    time_is_up: bool
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    read_along: tuple[float, ...] = ()
    data_sets: tuple[tuple[float, float], ...] = ()

    @property
    def lm_loss(self) -> float:
        return self.loss_sum / max(self.num_tokens, 1.0)


def agree(
    result: ScheduleResult,
    exit_request: ExitRequest | None,
    runtime: Runtime,
    auxiliary_names: Sequence[str] = (),
    read_along: torch.Tensor | None = None,
) -> StepReduction:
    """Sum losses and exit requests over all ranks in one collective, so that every rank decides in the same way.

    Of the ranks that computed the same loss, only the first tensor-parallel rank counts. ``auxiliary_names`` are the
    auxiliary losses that are reported, the same on every rank. The host waits for the device here: other values that it
    needs are read together with the sums, as ``read_along``.

    Shapes: ``read_along: [n]`` float64.
    """
    values = sum_over_ranks(result, exit_request, runtime, auxiliary_names)
    return read_agreement(values, runtime, auxiliary_names, read_along)


def agree_to_exit(exit_request: ExitRequest | None, runtime: Runtime) -> StepReduction:
    """Agree only on exit requests, if the ranks have computed nothing."""
    nothing = torch.zeros((), dtype=torch.float64, device=runtime.device.torch_device)
    return agree(ScheduleResult(nothing, nothing, {}), exit_request, runtime)


def sum_over_ranks(
    result: ScheduleResult, exit_request: ExitRequest | None, runtime: Runtime, auxiliary_names: Sequence[str] = ()
) -> torch.Tensor:
    """Return the sums of `agree`, on the device, for `read_agreement`: first the loss sum and the tokens.

    If the result has ``n`` separate data sets, their sums are the last values.

    Shapes: ``-> [4 + 2 * len(auxiliary_names) + 2 * n]`` float64.
    """
    signal_received = exit_request is not None and exit_request.signal_received
    time_is_up = exit_request is not None and exit_request.time_is_up
    of_data_sets = result.data_sets
    num_sums = 4 + 2 * len(auxiliary_names)
    size = num_sums + (0 if of_data_sets is None else of_data_sets.numel())
    values = torch.zeros(size, dtype=torch.float64, device=runtime.device.torch_device)
    if runtime.state.tp.is_first:
        if runtime.state.pp.is_last:
            values[0], values[1] = result.loss_sum, result.num_tokens
        for index, name in enumerate(auxiliary_names, start=2):
            if name in result.auxiliary:
                values[2 * index : 2 * index + 2] = result.auxiliary[name]
        if of_data_sets is not None:
            values[num_sums:] = of_data_sets.flatten()
    # fill_ instead of assignment, which would copy a value from the host and wait for the copy.
    values[2].fill_(signal_received)
    values[3].fill_(time_is_up)
    all_reduce(values, runtime.state.world)
    return values


def read_agreement(
    values: torch.Tensor, runtime: Runtime, auxiliary_names: Sequence[str], read_along: torch.Tensor | None = None
) -> StepReduction:
    """Read the sums from the device; the host waits for the device here.

    Raises:
        GivenUpError: communication was aborted meanwhile, so the sums are invalid.
    """
    read = (values if read_along is None else torch.cat((values, read_along))).tolist()
    runtime.flight.ensure_not_given_up()
    return _reduction_of(read, len(values), auxiliary_names)


def _reduction_of(read: Sequence[float], num_values: int, auxiliary_names: Sequence[str]) -> StepReduction:
    """Convert the values of `sum_over_ranks` that were read, and after them those that were read along."""
    loss_sum, num_tokens, signals, times, *sums_and_counts = read[:num_values]
    pairs = list(zip(sums_and_counts[::2], sums_and_counts[1::2]))
    auxiliary = {name: total / max(count, 1.0) for name, (total, count) in zip(auxiliary_names, pairs)}
    data_sets = tuple(pairs[len(auxiliary_names) :])
    return StepReduction(loss_sum, num_tokens, signals > 0, times > 0, auxiliary, tuple(read[num_values:]), data_sets)


class MicrobatchSource(Protocol):
    """Source of micro-batches in order."""

    def next(self) -> Batch:
        """Return the next micro-batch on this process's device."""
        ...


class Microbatches:
    """Micro-batches of an iteration by number, for each of a rank's model chunks.

    Every chunk reads them in order, but the chunks are at different positions. A micro-batch is kept from its first
    read by a chunk until its last.
    """

    def __init__(self, source: MicrobatchSource, num_chunks: int) -> None:
        self._source = source
        self._num_chunks = num_chunks
        self._num_read = 0
        self._held: dict[int, Batch] = {}
        self._num_uses: dict[int, int] = {}

    def take(self, microbatch: int) -> Batch:
        """Return a micro-batch; the last chunk's call releases it."""
        while self._num_read <= microbatch:
            self._held[self._num_read] = self._source.next()
            self._num_uses[self._num_read] = 0
            self._num_read += 1
        self._num_uses[microbatch] += 1
        if self._num_uses[microbatch] < self._num_chunks:
            return self._held[microbatch]
        del self._num_uses[microbatch]
        return self._held.pop(microbatch)


ForwardStep = Callable[[Batch, Model, "torch.Tensor | None"], ChunkResult]
"""Runs a model chunk on one micro-batch, given the hidden states of the previous chunk (None on the first chunk).

The last chunk returns the micro-batch's loss sum and token count, every other chunk its hidden states. Both kinds of
result include the layers' auxiliary losses, if there are any."""

_NUM_NAMED_SAMPLES = 16


class SampleSource(MicrobatchSource, Protocol):
    """Source of micro-batches in order, with the ids of their samples."""

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the ``count`` samples after ``consumed_samples``, over all data-parallel ranks."""
        ...

    def sample_ids_hash(self, sample_ids: NDArray[np.int64]) -> str:
        """Hash the samples' text."""
        ...


@dataclass(frozen=True, eq=False)
class BegunStep:
    """State of a step at its start; ``iteration`` is the number of completed iterations."""

    start_time: float
    iteration: int
    consumed_samples: int
    global_batch_size: int
    sample_ids_hash: str | None
    learning_rate: float
    decoupled_learning_rate: float | None
    loss_scale: float


class _KeptMicrobatches:
    """Source of micro-batches that keeps those it returns, to return them again."""

    def __init__(self, source: MicrobatchSource) -> None:
        self._source = source
        self._kept: list[Batch] = []

    def next(self) -> Batch:
        self._kept.append(self._source.next())
        return self._kept[-1]

    def again(self) -> MicrobatchSource:
        """Return a source of the same micro-batches."""
        return _Repeated(iter(self._kept))


@dataclass(frozen=True)
class _Repeated:
    batches: Iterator[Batch]

    def next(self) -> Batch:
        return next(self.batches)


@dataclass(frozen=True, eq=False)
class _StepEnd:
    """State of a run at the end of a step; ``iteration`` and ``consumed_samples`` count it."""

    begun: BegunStep
    iteration: int
    consumed_samples: int
    next_learning_rate: float
    next_decoupled_learning_rate: float | None


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step whose results the host has not read: ``num_sums`` values of `sum_over_ranks`, then the optimizer's totals.

    ``results`` is their copy to the host, and ``values`` keeps its source alive. ``source`` has the micro-batches.
    """

    end: _StepEnd
    values: torch.Tensor
    results: Copied
    num_sums: int
    source: _KeptMicrobatches


class StepGuard(Protocol):
    """Checks the results of training steps, and decides about those that look wrong; the same on all ranks.

    ``left_out`` are the samples that the run has skipped.
    """

    left_out: SkippedSamples

    @property
    def limits(self) -> tuple[float, float] | None:
        """Return the largest accepted loss and gradient norm, or None without limits."""

    @property
    def repeats_all(self) -> bool:
        """Return whether every step is computed twice, to compare the results."""

    def begin(self, begun: BegunStep) -> None:
        """Record the start of a step."""

    def see(self, chunk: int, microbatch: int, result: ChunkResult) -> ChunkResult:
        """Record a model chunk's result for a micro-batch, and return it."""
        ...

    def resolve(
        self, step: TrainingStep, begun: BegunStep, trouble: TrainingError | None, agreement: StepReduction
    ) -> tuple[StepReduction, StepOutcome]:
        """Find out why a step went wrong, and return its final result.

        ``trouble`` is None if everything was finite.

        Raises:
            TrainingError: the run cannot continue.
        """
        ...

    def compare(self, step: TrainingStep, begun: BegunStep, agreement: StepReduction) -> None:
        """Recompute a step and compare it with its first results; the new gradients are used."""


def is_within(limits: tuple[float, float], loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Return whether a finite loss and a gradient norm are within the limits, without waiting for the device."""
    largest_loss, largest_norm = limits
    return loss.isfinite() & (loss <= largest_loss) & (norm <= largest_norm)


class TrainingStep:
    """Runs iterations of a model on a source of micro-batches, checked by a ``guard`` if there is one.

    ``observe_gradients`` is called between the last reduction of the gradients and the update. ``action_clock`` is
    called with the actions of an iteration and returns the executor's clock. ``data_sets`` are the names of the blend's
    data sets, the same on all ranks. Their losses are summed separately if the micro-batches record each sample's data
    set.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: ModelAndOptimizer,
        forward_step: ForwardStep,
        timers: Timers,
        observe_gradients: Callable[[], None] | None = None,
        action_clock: Callable[[Sequence[Action]], Callable[[], float] | None] = lambda actions: None,
        guard: StepGuard | None = None,
        data_sets: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.parts = parts
        self.forward_step = forward_step
        self.timers = timers
        self._observe_gradients = observe_gradients
        self._action_clock = action_clock
        self._guard = guard
        self._data_sets = DataSetSums(data_sets, runtime.device.torch_device)
        # The backward pass costs twice the forward pass; recomputed activations do not count.
        self._flops_per_sequence = 3.0 * parts.chunks[0].config.forward_flops_per_sequence(config.data.seq_length)
        self._peak_tflops = runtime.device.peak_tflops(config.model.params_dtype)
        self.overlaps_results = config.training.overlap_step_results and runtime.device.is_cuda
        """Whether the results of a step are read after the launch of the next, see `launch`."""
        if self.overlaps_results:
            self._copies = runtime.device.host_copies()
            # False from the first step on whose gradients are not finite, so that no later step changes the weights.
            self._is_sound = torch.ones((), dtype=torch.bool, device=runtime.device.torch_device)
        self._newest: LaunchedStep | None = None
        self._finish_time = -math.inf

    def run(
        self, train_state: TrainState, source: SampleSource, global_batch_size: int, exit_request: ExitRequest | None
    ) -> tuple[StepReport, StepReduction]:
        """Train one iteration and advance ``train_state``.

        Raises:
            TrainingError: a gradient is not finite and loss scaling cannot help; the weights are unchanged.
        """
        begun = self._begin(train_state, source, global_batch_size)
        if self._guard is not None:
            self._guard.begin(begun)
        result = self.compute(source, begun)
        if self.parts.float8 is not None:
            self.parts.float8.update(self.runtime.state.world, train_state.iteration)
        agreement, is_accepted = self._update(result, exit_request, begun)
        agreement, outcome = self._outcome(agreement, is_accepted, begun, source)
        expert_load = self._count_experts(outcome)
        if outcome.success:
            self.parts.scheduler.step(global_batch_size)
        self._advance(train_state, begun)
        train_state.skipped_iterations += not outcome.success
        return self._report(self._end(begun, train_state), outcome, agreement, expert_load), agreement

    def launch(
        self, train_state: TrainState, source: SampleSource, global_batch_size: int, exit_request: ExitRequest | None
    ) -> LaunchedStep:
        """Launch an iteration and advance ``train_state``, without waiting for the device.

        Call `finish` for each launched step in order, at the latest after the launch of the next one. If the gradients
        of a step are not finite, the device makes neither its update nor any later one.
        """
        begun = self._begin(train_state, source, global_batch_size)
        if self._guard is not None:
            self._guard.begin(begun)
        kept = _KeptMicrobatches(source)
        result = self.compute(kept, begun)
        if self.parts.float8 is not None:
            self.parts.float8.update(self.runtime.state.world, train_state.iteration)
        optimizer = self.parts.optimizer
        with self.timers("optimizer", log_level=1):
            totals = optimizer.begin_step(self.timers, lambda norm: self._is_sound)
        self._is_sound.logical_and_(totals[0] < math.inf)
        sums = sum_over_ranks(result, exit_request, self.runtime, self.parts.chunks[0].auxiliary_loss_names)
        values = torch.cat((sums, totals))
        results = self._copies.to_host(values)
        optimizer.begin_param_gather()
        self.parts.scheduler.step(global_batch_size)
        self._advance(train_state, begun)
        self._newest = LaunchedStep(self._end(begun, train_state), values, results, len(sums), kept)
        return self._newest

    def finish(
        self, launched: LaunchedStep, train_state: TrainState, source: SampleSource
    ) -> tuple[StepReport, StepReduction]:
        """Wait for a launched step, and return its results.

        Raises:
            TrainingError: a gradient is not finite. The weights and ``train_state`` are those before the step.
        """
        agreement = self._read(launched)
        if not math.isfinite(agreement.read_along[0]):
            self._fail(launched, agreement, train_state, source)
        outcome = self.parts.optimizer.finish_step(agreement.read_along, gathers=False)
        return self._report(launched.end, outcome, agreement, None), agreement

    def finish_last(self, launched: LaunchedStep) -> StepReport | None:
        """Return the report of a step after the launch of the next one has failed, or None if it has no valid results.

        Other ranks need not call this.
        """
        if self.runtime.flight.is_given_up:
            return None
        agreement = self._read(launched)
        if not math.isfinite(agreement.read_along[0]):
            return None
        outcome = self.parts.optimizer.finish_step(agreement.read_along, gathers=False)
        return self._report(launched.end, outcome, agreement, None)

    def _read(self, launched: LaunchedStep) -> StepReduction:
        self._copies.wait_on_host(launched.results)
        read = launched.results.tensor.tolist()
        self.runtime.flight.ensure_not_given_up()
        return _reduction_of(read, launched.num_sums, self.parts.chunks[0].auxiliary_loss_names)

    def _fail(
        self, launched: LaunchedStep, agreement: StepReduction, train_state: TrainState, source: SampleSource
    ) -> NoReturn:
        """Raise the error of a step whose gradients are not finite; all ranks must call this."""
        begun = launched.end.begun
        num_samples = train_state.consumed_train_samples - begun.consumed_samples
        train_state.iteration, train_state.consumed_train_samples = begun.iteration, begun.consumed_samples
        train_state.floating_point_operations_so_far -= self._flops_per_sequence * num_samples
        self.parts.scheduler.step(-num_samples)
        if launched is not self._newest:
            # The gradients are those of the next step.
            self.compute(launched.source.again(), begun, records_all_norms=True)
            if math.isfinite(self.parts.optimizer.measure()):
                raise TrainingError(
                    "a gradient was not finite before the optimizer step, but all are finite if the step is computed "
                    f"again; no parameter was changed {self.name_samples(source, begun)}"
                )
        self._outcome(agreement, True, begun, source)
        raise AssertionError("a step with gradients that are not finite is an error")

    def _end(self, begun: BegunStep, train_state: TrainState) -> _StepEnd:
        scheduler = self.parts.scheduler
        return _StepEnd(
            begun,
            train_state.iteration,
            train_state.consumed_train_samples,
            scheduler.learning_rate,
            scheduler.decoupled_learning_rate,
        )

    def _advance(self, train_state: TrainState, begun: BegunStep) -> None:
        train_state.iteration += 1
        train_state.consumed_train_samples += begun.global_batch_size
        train_state.floating_point_operations_so_far += self._flops_per_sequence * begun.global_batch_size

    def _count_experts(self, outcome: StepOutcome) -> LoadReport | None:
        """Update the experts' biases after an optimizer step, and return the tokens per expert in MoE models."""
        loads = self.parts.expert_loads
        if loads is None:
            return None
        totals = loads.collect(self.runtime.device.torch_device)
        if outcome.success:
            loads.move_biases(totals)
        return loads.report(totals)

    def compute(
        self, source: MicrobatchSource, begun: BegunStep, shift: int = 0, *, records_all_norms: bool = False
    ) -> ScheduleResult:
        """Compute the losses and reduced gradients of a step, without an update of the weights.

        With ``shift`` the source yields the samples of the data-parallel rank that many positions after this one. A
        failed step is computed again with ``records_all_norms`` (see `DistributedDataParallel.local_grad_norms`).
        """
        for chunk in self.parts.ddp_chunks:
            chunk.zero_grad_buffer(records_all_norms)
        for graphs in self.parts.graphs:
            graphs.begin_step()
        if self.parts.expert_loads is not None:
            self.parts.expert_loads.begin_step()
        if self.parts.qk_clip is not None:
            self.parts.qk_clip.begin_step()
        of_data_sets = self._data_sets.begin()
        per_microbatch = self.config.training.micro_batch_size * self.config.data_parallel_size
        keeps = self.config.model.fp8.keeps_weights(begun.global_batch_size // per_microbatch)
        with weights_kept(self.parts.float8_weights if keeps else ()):
            result = replace(self._forward_backward(source, begun, shift), data_sets=of_data_sets)
        if self.config.training.empty_unused_memory_level >= 2:
            self.runtime.device.empty_cache()
        self._finish_gradients(result)
        return result

    def repeat(self, source: MicrobatchSource, begun: BegunStep) -> tuple[StepReduction, StepOutcome]:
        """Recompute a step, and update the weights whatever its loss is.

        Raises:
            TrainingError: a gradient is not finite.
        """
        result = self.compute(source, begun)
        names = self.parts.chunks[0].auxiliary_loss_names
        agreement = agree(result, None, self.runtime, names, self.parts.optimizer.begin_step(self.timers))
        return agreement, self.parts.optimizer.finish_step(agreement.read_along)

    def name_samples(self, source: SampleSource, begun: BegunStep) -> str:
        """Format a step's iteration and samples for a message."""
        ids = source.sample_ids(begun.consumed_samples, min(begun.global_batch_size, _NUM_NAMED_SAMPLES))
        more = begun.global_batch_size - len(ids)
        named = ", ".join(map(str, ids.tolist())) + (f" and {more} more" if more else "")
        return f"(iteration {begun.iteration + 1}, sample ids {named})"

    def _update(
        self, result: ScheduleResult, exit_request: ExitRequest | None, begun: BegunStep
    ) -> tuple[StepReduction, bool]:
        """Update the weights if the step is accepted; return the agreed values, and whether it was accepted."""
        names, optimizer, guard = self.parts.chunks[0].auxiliary_loss_names, self.parts.optimizer, self._guard
        if guard is not None and guard.repeats_all:
            guard.compare(self, begun, agree(result, None, self.runtime))
        limits = None if guard is None else guard.limits
        if limits is None:
            with self.timers("optimizer", log_level=1):
                totals = optimizer.begin_step(self.timers)
            return agree(result, exit_request, self.runtime, names, totals), True
        # The device decides: the host does not wait for it before `read_agreement`.
        sums = sum_over_ranks(result, exit_request, self.runtime, names)
        loss = sums[0] / sums[1].clamp(min=1.0)
        answer = torch.zeros(1, dtype=torch.float64, device=sums.device)

        def accept(norm: torch.Tensor) -> torch.Tensor:
            answer.copy_(is_within(limits, loss, norm).view(1))
            all_reduce(answer, self.runtime.state.world, "min")
            return answer[0] > 0

        with self.timers("optimizer", log_level=1):
            totals = optimizer.begin_step(self.timers, accept)
        agreement = read_agreement(sums, self.runtime, names, torch.cat((totals, answer)))
        *read, is_accepted = agreement.read_along
        return replace(agreement, read_along=tuple(read)), is_accepted > 0

    def _begin(self, train_state: TrainState, source: SampleSource, global_batch_size: int) -> BegunStep:
        start_time = time.perf_counter()
        sample_ids_hash = None
        if self.runtime.is_reporter:
            ids = source.sample_ids(train_state.consumed_train_samples, global_batch_size)
            sample_ids_hash = source.sample_ids_hash(ids)
        return BegunStep(
            start_time=start_time,
            iteration=train_state.iteration,
            consumed_samples=train_state.consumed_train_samples,
            global_batch_size=global_batch_size,
            sample_ids_hash=sample_ids_hash,
            learning_rate=self.parts.scheduler.learning_rate,
            decoupled_learning_rate=self.parts.scheduler.decoupled_learning_rate,
            loss_scale=self.parts.optimizer.loss_scale,
        )

    def _finish_gradients(self, result: ScheduleResult) -> None:
        with self.timers("all-grads-sync", log_level=1):
            num_tokens = result.num_tokens if self.config.training.calculate_per_token_loss else None
            finalize_model_grads(self.parts.ddp_chunks, self.runtime.state, num_tokens, self.timers)
        if self._observe_gradients is not None:
            self._observe_gradients()

    def _report(
        self,
        end: _StepEnd,
        outcome: StepOutcome,
        agreement: StepReduction,
        expert_load: LoadReport | None,
    ) -> StepReport:
        parts, config, begun = self.parts, self.config, end.begun
        now = time.perf_counter()
        # A step that was launched before the end of the last one takes the time since then.
        elapsed_s = now - max(begun.start_time, self._finish_time)
        self._finish_time = now
        flops = self._flops_per_sequence * begun.global_batch_size
        tflops = flops / elapsed_s / self.runtime.state.world_size / 1e12
        return StepReport(
            iteration=end.iteration,
            consumed_samples=end.consumed_samples,
            global_batch_size=begun.global_batch_size,
            num_tokens=agreement.num_tokens,
            lm_loss=agreement.lm_loss,
            data_sets=self._data_sets.losses(agreement.data_sets),
            auxiliary=agreement.auxiliary if expert_load is None else {**agreement.auxiliary, **expert_load.numbers()},
            expert_load=expert_load,
            learning_rate=begun.learning_rate,
            next_learning_rate=end.next_learning_rate,
            decoupled_learning_rate=begun.decoupled_learning_rate,
            next_decoupled_learning_rate=end.next_decoupled_learning_rate,
            loss_scale=begun.loss_scale,
            next_loss_scale=parts.optimizer.loss_scale,
            grad_norm=outcome.grad_norm,
            num_zeros=outcome.num_zeros,
            params_norm=parts.optimizer.params_norm() if config.logging.log_params_norm else None,
            is_skipped=not outcome.success,
            step_time_s=elapsed_s,
            tokens_per_second=begun.global_batch_size * config.data.seq_length / elapsed_s,
            tflops_per_device=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            sample_ids_hash=begun.sample_ids_hash,
        )

    def _forward_backward(self, source: MicrobatchSource, begun: BegunStep, shift: int) -> ScheduleResult:
        parts, config, pp = self.parts, self.config, self.runtime.state.pp
        per_microbatch = config.training.micro_batch_size * config.data_parallel_size
        microbatches = Microbatches(source, len(parts.chunks))
        chunks = [
            ModelChunk(
                self._forward(microbatches, number, begun.iteration, shift),
                *(ddp_chunk.no_sync, weight_grad_queue, parts.late_grads if chunk is parts.chunks[-1] else None),
            )
            for number, (chunk, ddp_chunk, weight_grad_queue) in enumerate(
                zip(parts.chunks, parts.ddp_chunks, parts.weight_grad_queues)
            )
        ]

        def actions_of(rank: int) -> Sequence[Action]:
            actions = SCHEDULES[config.pipeline_schedule](
                pp.size,
                rank,
                begun.global_batch_size // per_microbatch,
                len(chunks),
                config.model.microbatch_group_size_per_virtual_pipeline_stage,
            )
            return with_deferred_grads(
                actions,
                StagePlace(pp.size, rank, len(chunks)),
                delays=config.model.delay_wgrad_compute,
                defers=config.model.defer_embedding_wgrad_compute,
                max_microbatches=config.model.wgrad_deferral_limit,
            )

        actions = actions_of(pp.rank)
        for model in parts.chunks:
            if not model.training:
                model.train()
        with self.timers("forward-backward", log_level=1):
            for weights in parts.weights:
                weights.leave()
            result = run_schedule(
                actions,
                chunks,
                device=self.runtime.device.torch_device,
                connection=parts.connection,
                order=None if parts.connection is None else parts.connection.order_of(actions_of),
                calculate_per_token_loss=config.training.calculate_per_token_loss,
                num_replicas=parts.num_replicas_in_loss,
                loss_scale=begun.loss_scale,
                clock=self._action_clock(actions),
                timers=self.timers,
            )
            for weights in parts.weights:
                weights.onload()
            return result

    def _forward(self, microbatches: Microbatches, chunk: int, iteration: int, shift: int) -> ChunkForward:
        model, guard = self.parts.chunks[chunk], self._guard

        def forward(microbatch: int, hidden: torch.Tensor | None) -> ChunkResult:
            with self.timers("batch-generator", log_level=2):
                batch = microbatches.take(microbatch)
                if model.config.draws_by_sample:
                    batch = replace(batch, dropout_samples=self._dropout_samples(iteration, microbatch, shift))
            with self.timers("forward-compute", log_level=2):
                result = self.forward_step(batch, model, hidden)
                self._data_sets.add(batch, result)
                return result if guard is None else guard.see(chunk, microbatch, result)

        return forward

    def _dropout_samples(self, iteration: int, microbatch: int, shift: int) -> DropoutSamples:
        """Return the samples of this rank's micro-batch by their positions in the iteration's global batch."""
        config, size = self.config, self.config.training.micro_batch_size
        rank = (self.runtime.state.dp.rank + shift) % config.data_parallel_size
        first = (microbatch * config.data_parallel_size + rank) * size
        device = self.runtime.device.torch_device
        return DropoutSamples.at(config.initialization.seed, iteration, first, size, device)

    def _outcome(
        self, agreement: StepReduction, is_accepted: bool, begun: BegunStep, source: SampleSource
    ) -> tuple[StepReduction, StepOutcome]:
        trouble: TrainingError | None = None
        outcome: StepOutcome | None = None
        try:
            outcome = self.parts.optimizer.finish_step(agreement.read_along, is_accepted)
        except TrainingError as error:
            trouble = type(error)(f"{error} {self.name_samples(source, begun)}")
        # A non-finite step without an error is to be skipped.
        if outcome is not None and (is_accepted or outcome.grad_norm is None):
            return agreement, outcome
        guard = self._guard
        if guard is None:
            assert trouble is not None, "only a guard keeps an update from being made"
            raise trouble
        resolved, outcome = guard.resolve(self, begun, trouble, agreement)
        signal_received, time_is_up = agreement.signal_received, agreement.time_is_up
        return replace(resolved, signal_received=signal_received, time_is_up=time_is_up), outcome
