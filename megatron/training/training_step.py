"""One training step: forward and backward over the micro-batches, reduction, update, and what all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.collectives import all_reduce
from megatron.core.datasets.samples.batch import Batch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.errors import TrainingError
from megatron.core.kernels.dropout_keys import DropoutSamples
from megatron.core.models.model import Model
from megatron.core.optimizer.optimizer import StepOutcome
from megatron.core.pipeline_parallel.action import Action, StagePlace
from megatron.core.pipeline_parallel.executor import (
    ChunkForward,
    ChunkResult,
    ModelChunk,
    ScheduleResult,
    run_schedule,
)
from megatron.core.pipeline_parallel.schedules import SCHEDULES, with_deferred_grads
from megatron.core.timers import Timers
from megatron.training.config.run_config import RunConfig
from megatron.training.data.microbatches import Microbatches, MicrobatchSource
from megatron.training.model_setup import TrainingParts
from megatron.training.process.initialize import Runtime
from megatron.training.process.signals import ExitRequest
from megatron.training.reporting.log_lines import StepReport
from megatron.training.train_state import TrainState

ForwardStep = Callable[[Batch, Model, "torch.Tensor | None"], ChunkResult]
"""Run a model chunk on one micro-batch, given the hidden states of the chunk before (None on the first chunk).

The last chunk returns the micro-batch's loss sum and token count, every other one its hidden states; with either go the
auxiliary losses, where layers have some."""

_NUM_NAMED_SAMPLES = 16


class SampleSource(MicrobatchSource, Protocol):
    """Give micro-batches in order, and name the samples in them."""

    def sample_ids(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """Return the ids of the ``count`` samples after ``consumed_samples``, over all data-parallel ranks."""
        ...

    def sample_ids_hash(self, sample_ids: NDArray[np.int64]) -> str:
        """Hash which text the samples are."""
        ...


@dataclass(frozen=True)
class Agreement:
    """Hold what all ranks have summed over the world after a step; ``auxiliary`` are means by name.

    ``read_along`` are numbers of this rank's own that were read from the device in the same go.
    """

    loss_sum: float
    num_tokens: float
    signal_received: bool
    time_is_up: bool
    auxiliary: Mapping[str, float] = field(default_factory=dict)
    read_along: tuple[float, ...] = ()

    @property
    def lm_loss(self) -> float:
        """Return the mean loss over the tokens of the global batch."""
        return self.loss_sum / max(self.num_tokens, 1.0)


def agree(
    result: ScheduleResult,
    exit_request: ExitRequest | None,
    runtime: Runtime,
    auxiliary_names: Sequence[str] = (),
    read_along: torch.Tensor | None = None,
) -> Agreement:
    """Sum losses and reasons to exit over all ranks, in one collective, so that every rank decides alike.

    Of the ranks that computed the same loss only the first tensor-parallel rank counts. ``auxiliary_names`` are the
    auxiliary losses that are reported, the same on every rank. This is where the host waits for the device: what else
    it has to know comes with the sums, as ``read_along``.

    Shapes: ``read_along: [n]`` float64.
    """
    signal_received = exit_request is not None and exit_request.signal_received
    time_is_up = exit_request is not None and exit_request.time_is_up
    values = torch.zeros(4 + 2 * len(auxiliary_names), dtype=torch.float64, device=runtime.device.torch_device)
    if runtime.state.tp.is_first:
        if runtime.state.pp.is_last:
            values[0], values[1] = result.loss_sum, result.num_tokens
        for index, name in enumerate(auxiliary_names, start=2):
            if name in result.auxiliary:
                values[2 * index : 2 * index + 2] = result.auxiliary[name]
    # Not by assignment, which would copy a number from the host and wait for the copy.
    values[2].fill_(signal_received)
    values[3].fill_(time_is_up)
    all_reduce(values, runtime.state.world)
    num_values = len(values)
    read = (values if read_along is None else torch.cat((values, read_along))).tolist()
    loss_sum, num_tokens, signals, times, *sums_and_counts = read[:num_values]
    means = (total / max(count, 1.0) for total, count in zip(sums_and_counts[::2], sums_and_counts[1::2]))
    auxiliary = dict(zip(auxiliary_names, means))
    return Agreement(loss_sum, num_tokens, signals > 0, times > 0, auxiliary, tuple(read[num_values:]))


@dataclass(frozen=True, eq=False)
class _Begun:
    """Hold what an iteration begins with."""

    start_time: float
    iteration: int
    global_batch_size: int
    sample_ids_hash: str | None
    learning_rate: float
    decoupled_learning_rate: float | None
    loss_scale: float


class TrainingStep:
    """Run iterations of a model on a source of micro-batches.

    ``observe_gradients`` is called between the last reduction of the gradients and the update, and ``action_clock``
    with the actions of an iteration for the executor's clock.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: TrainingParts,
        forward_step: ForwardStep,
        timers: Timers,
        observe_gradients: Callable[[], None] | None = None,
        action_clock: Callable[[Sequence[Action]], Callable[[], float] | None] = lambda actions: None,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.parts = parts
        self.forward_step = forward_step
        self.timers = timers
        self._observe_gradients = observe_gradients
        self._action_clock = action_clock
        # The backward pass costs twice the forward pass; recomputed activations do not count.
        self._flops_per_sequence = 3.0 * parts.chunks[0].config.forward_flops_per_sequence(config.data.seq_length)
        self._peak_tflops = runtime.device.peak_tflops(config.model.params_dtype)

    def run(
        self, train_state: TrainState, source: SampleSource, global_batch_size: int, exit_request: ExitRequest | None
    ) -> tuple[StepReport, Agreement]:
        """Train one iteration and advance ``train_state``.

        Raises:
            TrainingError: a gradient is not finite and no loss scaling can help; no weight has been changed.
        """
        begun = self._begin(train_state, source, global_batch_size)
        for chunk in self.parts.ddp_chunks:
            chunk.zero_grad_buffer()
        for graphs in self.parts.graphs:
            graphs.begin_step()
        result = self._forward_backward(source, begun)
        if self.config.training.empty_unused_memory_level >= 2:
            self.runtime.device.empty_cache()
        self._finish_gradients(result)
        if self.parts.float8 is not None:
            self.parts.float8.update(self.runtime.state.world, train_state.iteration)
        with self.timers("optimizer", log_level=1):
            totals = self.parts.optimizer.begin_step(self.timers)
        agreement = agree(result, exit_request, self.runtime, self.parts.chunks[0].auxiliary_loss_names, totals)
        outcome = self._outcome(agreement, train_state, source, global_batch_size)
        if outcome.success:
            self.parts.scheduler.step(global_batch_size)
        train_state.iteration += 1
        train_state.consumed_train_samples += global_batch_size
        train_state.skipped_iterations += not outcome.success
        train_state.floating_point_operations_so_far += self._flops_per_sequence * global_batch_size
        return self._report(begun, train_state, outcome, agreement), agreement

    def _begin(self, train_state: TrainState, source: SampleSource, global_batch_size: int) -> _Begun:
        start_time = time.perf_counter()
        sample_ids_hash = None
        if self.runtime.is_reporter:
            ids = source.sample_ids(train_state.consumed_train_samples, global_batch_size)
            sample_ids_hash = source.sample_ids_hash(ids)
        return _Begun(
            start_time=start_time,
            iteration=train_state.iteration,
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

    def _report(self, begun: _Begun, train_state: TrainState, outcome: StepOutcome, agreement: Agreement) -> StepReport:
        parts, config = self.parts, self.config
        elapsed_s = time.perf_counter() - begun.start_time
        flops = self._flops_per_sequence * begun.global_batch_size
        tflops = flops / elapsed_s / self.runtime.state.world_size / 1e12
        return StepReport(
            iteration=train_state.iteration,
            consumed_samples=train_state.consumed_train_samples,
            global_batch_size=begun.global_batch_size,
            num_tokens=agreement.num_tokens,
            lm_loss=agreement.lm_loss,
            auxiliary=agreement.auxiliary,
            learning_rate=begun.learning_rate,
            next_learning_rate=parts.scheduler.learning_rate,
            decoupled_learning_rate=begun.decoupled_learning_rate,
            next_decoupled_learning_rate=parts.scheduler.decoupled_learning_rate,
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

    def _forward_backward(self, source: SampleSource, begun: _Begun) -> ScheduleResult:
        parts, config, pp = self.parts, self.config, self.runtime.state.pp
        per_microbatch = config.training.micro_batch_size * config.data_parallel_size
        microbatches = Microbatches(source, len(parts.chunks))
        chunks = [
            ModelChunk(
                self._forward(microbatches, chunk, begun.iteration),
                *(ddp_chunk.no_sync, weight_grad_queue, parts.late_grads if chunk is parts.chunks[-1] else None),
            )
            for chunk, ddp_chunk, weight_grad_queue in zip(parts.chunks, parts.ddp_chunks, parts.weight_grad_queues)
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
                loss_scale=begun.loss_scale,
                clock=self._action_clock(actions),
                timers=self.timers,
            )
            for weights in parts.weights:
                weights.come_home()
            return result

    def _forward(self, microbatches: Microbatches, model: Model, iteration: int) -> ChunkForward:
        def forward(microbatch: int, hidden: torch.Tensor | None) -> ChunkResult:
            with self.timers("batch-generator", log_level=2):
                batch = microbatches.take(microbatch)
                if model.config.has_dropout:
                    batch = replace(batch, dropout_samples=self._dropout_samples(iteration, microbatch))
            with self.timers("forward-compute", log_level=2):
                return self.forward_step(batch, model, hidden)

        return forward

    def _dropout_samples(self, iteration: int, microbatch: int) -> DropoutSamples:
        """Return the samples of this rank's micro-batch by their places in the iteration's global batch."""
        config, size = self.config, self.config.training.micro_batch_size
        first = (microbatch * config.data_parallel_size + self.runtime.state.dp.rank) * size
        device = self.runtime.device.torch_device
        return DropoutSamples.at(config.initialization.seed, iteration, first, size, device)

    def _outcome(
        self, agreement: Agreement, train_state: TrainState, source: SampleSource, global_batch_size: int
    ) -> StepOutcome:
        try:
            return self.parts.optimizer.finish_step(agreement.read_along)
        except TrainingError as error:
            ids = source.sample_ids(train_state.consumed_train_samples, min(global_batch_size, _NUM_NAMED_SAMPLES))
            named = ", ".join(map(str, ids.tolist()))
            more = global_batch_size - len(ids)
            named += f" and {more} more" if more else ""
            raise TrainingError(f"{error} (iteration {train_state.iteration + 1}, sample ids {named})") from error
