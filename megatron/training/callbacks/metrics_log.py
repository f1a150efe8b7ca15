"""The figures of iterations and evaluations go to the metrics file and the loggers."""

from __future__ import annotations

from megatron.training.callbacks.callback import Callback, TrainingRun, is_due
from megatron.training.loggers import StepReport


class MetricsLog(Callback):
    """Give the figures to the metrics writer of the run, which the reporting rank has."""

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        if run.metrics is None:
            return
        run.metrics.write_step(report)
        if is_due(run.config.logging.tensorboard_log_interval, report.iteration):
            run.metrics.step_scalars(report)

    def after_evaluation(self, run: TrainingRun, split: str, lm_loss: float) -> None:
        if run.metrics is None:
            return
        run.metrics.write({"iteration": run.train_state.iteration, "split": split, "lm_loss": lm_loss})
        run.metrics.evaluation_scalars(split, lm_loss, run.train_state)
