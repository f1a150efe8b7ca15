"""Train with a callback of your own: ``megatron train --script FILE --callbacks weight-norm``.

The norm of the weights is then in the log line, the metrics file and TensorBoard.
"""

from dataclasses import replace

from megatron.training import pretrain, register_callback
from megatron.training.callbacks import Callback, TrainingRun
from megatron.training.loggers import StepReport


class WeightNorm(Callback):
    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        norm = run.parts.optimizer.params_norm()  # a collective: every rank calls it
        return replace(report, auxiliary={**report.auxiliary, "weight norm": norm})


register_callback("weight-norm", WeightNorm)

if __name__ == "__main__":
    pretrain()
