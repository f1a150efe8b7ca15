"""One training step: forward and backward over the micro-batches, reduction, update, and what all ranks agree on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_reduce
from megatron.core.datasets.batch import Batch
from megatron.core.datasets.data_samplers import sample_ids_hash
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.errors import TrainingError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.optimizer import StepOutcome
from megatron.core.pipeline_parallel.executor import MicrobatchLoss, ModelChunk, ScheduleResult, run_schedule
from megatron.core.pipeline_parallel.schedules import without_pipelining
from megatron.core.timers import Timers
from megatron.training.config.run_config import RunConfig
from megatron.training.data_setup import BatchSource
from megatron.training.flops import training_flops_per_sequence
from megatron.training.initialize import Runtime
from megatron.training.model_setup import TrainingParts
from megatron.training.reporting import StepReport
from megatron.training.signals import ExitRequest
from megatron.training.train_state import TrainState

ForwardStep = Callable[[Batch, GPTModel], MicrobatchLoss]
"""Run the model on one micro-batch and return its loss sum and token count."""

_NUM_NAMED_SAMPLES = 16


@dataclass(frozen=True)
class Agreement:
    """Hold what all ranks have summed over the world after a step."""

    loss_sum: float
    num_tokens: float
    signal_received: bool
    time_is_up: bool

    @property
    def lm_loss(self) -> float:
        """Return the mean loss over the tokens of the global batch."""
        return self.loss_sum / max(self.num_tokens, 1.0)


def agree(result: ScheduleResult, exit_request: ExitRequest | None, runtime: Runtime) -> Agreement:
    """Sum losses and reasons to exit over all ranks, in one collective, so that every rank decides alike.

    Of the ranks that computed the same loss only the first tensor-parallel rank counts.
    """
    counts = runtime.state.tp.is_first and runtime.state.is_last_stage
    signal_received = exit_request is not None and exit_request.signal_received
    time_is_up = exit_request is not None and exit_request.time_is_up
    values = torch.zeros(4, dtype=torch.float64, device=runtime.device.torch_device)
    if counts:
        values[0], values[1] = result.loss_sum, result.num_tokens
    values[2], values[3] = float(signal_received), float(time_is_up)
    all_reduce(values, runtime.state.world)
    loss_sum, num_tokens, signals, times = values.tolist()
    return Agreement(loss_sum, num_tokens, signals > 0, times > 0)


class TrainingStep:
    """Run iterations of a model on a source of micro-batches."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        parts: TrainingParts,
        forward_step: ForwardStep,
        timers: Timers,
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.parts = parts
        self.forward_step = forward_step
        self.timers = timers
        self._flops_per_sequence = training_flops_per_sequence(config.model, config.data.seq_length)
        self._peak_tflops = runtime.device.peak_tflops(config.model.params_dtype)

    def run(
        self, train_state: TrainState, source: BatchSource, global_batch_size: int, exit_request: ExitRequest
    ) -> tuple[StepReport, Agreement]:
        """Train one iteration and advance ``train_state``.

        Raises:
            TrainingError: a gradient is not finite and no loss scaling can help; no weight has been changed.
        """
        start_time = time.perf_counter()
        parts, config = self.parts, self.config
        num_microbatches = global_batch_size // (config.training.micro_batch_size * config.data_parallel_size)
        sample_ids = source.sample_ids(train_state.consumed_train_samples, global_batch_size)
        learning_rate = parts.scheduler.learning_rate
        loss_scale = parts.optimizer.loss_scale

        parts.model.zero_grad_buffer()
        result = self._forward_backward(source, num_microbatches, loss_scale)
        with self.timers("all-grads-sync", log_level=1):
            num_tokens = result.num_tokens if config.training.calculate_per_token_loss else None
            finalize_model_grads([parts.model], self.runtime.state, num_tokens)
        with self.timers("optimizer", log_level=1):
            outcome = self._update(train_state.iteration + 1, sample_ids.tolist())
        agreement = agree(result, exit_request, self.runtime)

        if outcome.success:
            parts.scheduler.step(global_batch_size)
        train_state.iteration += 1
        train_state.consumed_train_samples += global_batch_size
        train_state.skipped_iterations += not outcome.success
        flops = self._flops_per_sequence * global_batch_size
        train_state.floating_point_operations_so_far += flops
        elapsed_s = time.perf_counter() - start_time
        tflops = flops / elapsed_s / self.runtime.state.world_size / 1e12
        report = StepReport(
            iteration=train_state.iteration,
            consumed_samples=train_state.consumed_train_samples,
            global_batch_size=global_batch_size,
            num_tokens=agreement.num_tokens,
            lm_loss=agreement.lm_loss,
            learning_rate=learning_rate,
            next_learning_rate=parts.scheduler.learning_rate,
            loss_scale=loss_scale,
            grad_norm=outcome.grad_norm,
            num_zeros=outcome.num_zeros,
            params_norm=parts.optimizer.params_norm() if config.logging.log_params_norm else None,
            is_skipped=not outcome.success,
            step_time_s=elapsed_s,
            tokens_per_second=global_batch_size * config.data.seq_length / elapsed_s,
            tflops_per_device=tflops,
            mfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            sample_ids_hash=sample_ids_hash(sample_ids),
        )
        return report, agreement

    def _forward_backward(self, source: BatchSource, num_microbatches: int, loss_scale: float) -> ScheduleResult:
        module = self.parts.module

        def forward(microbatch: int, hidden: torch.Tensor | None) -> MicrobatchLoss:
            with self.timers("batch-generator", log_level=2):
                batch = source.next()
            with self.timers("forward-compute", log_level=2):
                return self.forward_step(batch, module)

        module.train()
        with self.timers("forward-backward", log_level=1):
            return run_schedule(
                without_pipelining(1, 0, num_microbatches),
                [ModelChunk(forward, self._no_sync)],
                device=self.runtime.device.torch_device,
                calculate_per_token_loss=self.config.training.calculate_per_token_loss,
                loss_scale=loss_scale,
            )

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.parts.model.no_sync() if self.runtime.state.dp_cp.size > 1 else nullcontext()

    def _update(self, iteration: int, sample_ids: list[int]) -> StepOutcome:
        try:
            return self.parts.optimizer.step()
        except TrainingError as error:
            named = ", ".join(map(str, sample_ids[:_NUM_NAMED_SAMPLES]))
            more = "" if len(sample_ids) <= _NUM_NAMED_SAMPLES else f" and {len(sample_ids) - _NUM_NAMED_SAMPLES} more"
            raise TrainingError(f"{error} (iteration {iteration}, sample ids {named}{more})") from error
