"""The callbacks of a run, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config import RunConfig
from megatron.training import ModelAndOptimizer, ResumeState, Runtime
from megatron.training.callbacks.callback import Callback, Callbacks
from megatron.training.callbacks.data_history import DataHistory
from megatron.training.callbacks.exit_warning import ExitWarning
from megatron.training.callbacks.layer_statistics import AttentionLogits, LayerNorms
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.callbacks.metrics_log import MetricsLog
from megatron.training.callbacks.profiling import Profiling, ScheduleRecorder
from megatron.training.callbacks.progress_log import ProgressLog
from megatron.training.callbacks.replica_checks import ReplicaChecks
from megatron.training.callbacks.stragglers import Stragglers
from megatron.training.callbacks.timer_log import TimerLog
from megatron.training.callbacks.unused_memory import GarbageCollection, UnusedMemory
from megatron.training.fault_tolerance import AnomalyDetector


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
    """Return the callbacks that the flags ask for, and behind them the caller's ``own``.

    The order is that of log lines and collectives: change it on all ranks or on none.
    """
    logging, training, checkpoint = config.logging, config.training, config.checkpoint
    found: list[Callback | None] = [
        profiling,
        recorder,
        AttentionLogits(parts.chunks, runtime.device.torch_device) if logging.log_max_attention_logit else None,
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
        ExitWarning(checkpoint.exit_warning_seconds, checkpoint.async_save),
        GarbageCollection() if training.manual_gc else None,
        UnusedMemory() if training.empty_unused_memory_level >= 1 else None,
        *own,
    ]
    return Callbacks([callback for callback in found if callback is not None])
