"""Callbacks of a run in the order of their calls, and the definitions of the small ones."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from megatron.config import RunConfig
from megatron.core.collectives import raise_on_all_ranks
from megatron.core.distributed import check_replicas_equal, compare_over_replicas
from megatron.core.errors import ConfigurationError, TrainingError
from megatron.core.registry import find_registered
from megatron.core.timers import format_report
from megatron.training import ModelAndOptimizer, ResumeState, Runtime
from megatron.training.callbacks.callback import Callback, Callbacks, TrainingRun, is_due
from megatron.training.callbacks.exit_warning import ExitWarning
from megatron.training.callbacks.layer_statistics import AttentionLogits, ClippedLogits, LayerNorms
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.callbacks.profiling import Profiling, ScheduleRecorder
from megatron.training.callbacks.progress_log import ProgressLog
from megatron.training.callbacks.stragglers import Stragglers
from megatron.training.fault_tolerance import AnomalyDetector
from megatron.training.loggers import IntervalAverage, StepReport


class DataHistory(Callback):
    """Record in ``run.train_state`` which samples were read."""

    def before_save(self, run: TrainingRun) -> None:
        run.record_data_read()


class MetricsLog(Callback):
    """Output of the metrics to the run's metrics writer, which only the reporting rank has."""

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        if run.metrics is None:
            return
        run.metrics.write_step(report, is_logged=run.log_interval.is_due(report.iteration))
        if is_due(run.config.logging.tensorboard_log_interval, report.iteration):
            run.metrics.step_scalars(report)

    def after_evaluation(self, run: TrainingRun, split: str, lm_loss: float) -> None:
        if run.metrics is None:
            return
        run.metrics.write({"iteration": run.train_state.iteration, "split": split, "lm_loss": lm_loss})
        run.metrics.evaluation_scalars(split, lm_loss, run.train_state)


class TimerLog(Callback):
    """Output of the timers of all ranks for each log line; gathering makes the ranks wait for each other."""

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        logging = run.config.logging
        times = run.timers.gather(run.runtime.state, normalizer=average.num_iterations)
        if run.metrics is not None and logging.log_timers_to_tensorboard:
            names = dict.fromkeys(name for of_rank in times for name in of_rank)
            longest = {f"{name}-time": max(of_rank.get(name, 0.0) for of_rank in times) / 1000.0 for name in names}
            run.metrics.scalars(longest, report.iteration)
        run.log(format_report(times, logging.timing_log_option))


class GarbageCollection(Callback):
    """Garbage collection every ``--manual-gc-interval`` iterations, instead of Python's automatic collection."""

    def on_begin(self, run: TrainingRun) -> None:
        gc.disable()
        gc.collect()

    def after_iteration(self, run: TrainingRun) -> None:
        if is_due(run.config.training.manual_gc_interval, run.train_state.iteration):
            gc.collect()


class UnusedMemory(Callback):
    """Release of unused device memory after each iteration."""

    def after_iteration(self, run: TrainingRun) -> None:
        run.runtime.device.empty_cache()


class ReplicaChecks(Callback):
    """Comparison of replicas at the intervals of ``--check-*-hash-across-dp-replicas-interval``.

    Raises:
        TrainingError: replicas differ (every rank raises it); the message names the parameters.
    """

    def on_gradients(self, run: TrainingRun) -> None:
        iteration = run.train_state.iteration + 1
        if not is_due(run.config.faults.check_gradient_hash_across_dp_replicas_interval, iteration):
            return
        parts = [(shard.spec, shard.gradient) for chunk in run.parts.ddp_chunks for shard in chunk.shards]
        difference = compare_over_replicas(parts, run.runtime.state, "gradients")
        error = TrainingError(f"at iteration {iteration}: {difference}") if difference else None
        raise_on_all_ranks(error, run.runtime.state.world)

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        if is_due(run.config.training.check_weight_hash_across_dp_replicas_interval, report.iteration):
            self._compare_weights(run)

    def _compare_weights(self, run: TrainingRun) -> None:
        for chunk in run.parts.ddp_chunks:
            chunk.finish_param_gather()
        parameters = [parameter for chunk in run.parts.chunks for parameter in chunk.parameters()]
        error = None
        try:
            check_replicas_equal(parameters, run.runtime.state)
        except TrainingError as failure:
            error = TrainingError(f"at iteration {run.train_state.iteration}: {failure}")
        raise_on_all_ranks(error, run.runtime.state.world)


def registered_callbacks(names: Sequence[str]) -> list[Callback]:
    """Create the registered callbacks of ``--callbacks``.

    Raises:
        ConfigurationError: a registered function returns something else.
    """
    made = []
    for name in names:
        callback = find_registered("callback", name).value()
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callback {name} is {type(callback).__name__}, not a subclass of megatron.training.callbacks.Callback"
            )
        made.append(callback)
    return made


def configured_callbacks(
    config: RunConfig,
    runtime: Runtime,
    parts: ModelAndOptimizer,
    *,
    profiling: Profiling,
    recorder: ScheduleRecorder,
    live: LiveLine,
    stragglers: Stragglers | None = None,
    guard: AnomalyDetector | None = None,
    progress: ProgressLog | None = None,
    evaluations: Sequence[Callback] = (),
    continuation: ResumeState | None = None,
    own: Sequence[Callback] = (),
) -> Callbacks:
    """Create the callbacks that the flags request, followed by the caller's ``own``.

    The order determines the order of log lines and collectives, so it must be the same on all ranks.
    """
    logging, training, checkpoint = config.logging, config.training, config.checkpoint
    logits: AttentionLogits | None = None
    if parts.qk_clip is not None:
        logits = ClippedLogits(parts.qk_clip, runtime.device.torch_device)
    elif logging.log_max_attention_logit:
        logits = AttentionLogits(parts.chunks, runtime.device.torch_device)
    registered = registered_callbacks(logging.callbacks)
    found: list[Callback | None] = [
        profiling,
        recorder,
        logits,
        TimerLog() if logging.timing_log_level > 0 else None,
        stragglers,
        DataHistory(),
        guard,
        live,
        MetricsLog(),
        ReplicaChecks(),
        LayerNorms(),
        progress,
        *evaluations,
        continuation,
        ExitWarning(checkpoint.preemption_grace_seconds, checkpoint.async_save),
        GarbageCollection() if training.manual_gc else None,
        UnusedMemory() if training.empty_unused_memory_level >= 1 else None,
        *registered,
        *own,
    ]
    if training.overlap_step_results:
        reject_evaluations([*registered, *own])
    return Callbacks([callback for callback in found if callback is not None])


def reject_evaluations(callbacks: Sequence[Callback]) -> None:
    """Reject callbacks that evaluate after an iteration, for --overlap-step-results.

    Raises:
        ConfigurationError: a callback overrides ``evaluate``.
    """
    for callback in callbacks:
        if type(callback).evaluate is not Callback.evaluate:
            raise ConfigurationError(
                f"--overlap-step-results: {type(callback).__name__}.evaluate must run before the next iteration is "
                "launched; omit --overlap-step-results"
            )
