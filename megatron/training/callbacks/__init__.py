"""Callbacks of the training loop: additional actions at its hooks. See `megatron.training.callbacks.callback`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.training.callbacks.callback import Callback, TrainingRun, is_due
    from megatron.training.callbacks.configured import MetricsLog, configured_callbacks
    from megatron.training.callbacks.live_line import LiveLine
    from megatron.training.callbacks.periodic_evals import open_engine, open_periodic_evaluations
    from megatron.training.callbacks.profiling import Profiling, ScheduleRecorder
    from megatron.training.callbacks.progress_log import open_progress
    from megatron.training.callbacks.stragglers import PartsClock, Stragglers

__getattr__ = lazy_exports(
    __name__,
    {
        "callback": "Callback TrainingRun is_due",
        "configured": "MetricsLog configured_callbacks",
        "live_line": "LiveLine",
        "periodic_evals": "open_engine open_periodic_evaluations",
        "profiling": "Profiling ScheduleRecorder",
        "progress_log": "open_progress",
        "stragglers": "PartsClock Stragglers",
    },
)
