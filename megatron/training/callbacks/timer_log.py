"""The times of the parts of an iteration, over all ranks."""

from __future__ import annotations

from megatron.core.timers import format_report
from megatron.training.callbacks.callback import Callback, TrainingRun
from megatron.training.loggers import IntervalAverage, StepReport


class TimerLog(Callback):
    """Gather the timers of all ranks for each log line, and print them; the ranks wait for each other."""

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        logging = run.config.logging
        times = run.timers.gather(run.runtime.state, normalizer=average.num_iterations)
        if run.metrics is not None and logging.log_timers_to_tensorboard:
            names = dict.fromkeys(name for of_rank in times for name in of_rank)
            longest = {f"{name}-time": max(of_rank.get(name, 0.0) for of_rank in times) / 1000.0 for name in names}
            run.metrics.scalars(longest, report.iteration)
        run.log(format_report(times, logging.timing_log_option))
