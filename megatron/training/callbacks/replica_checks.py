"""Checks that the data-parallel copies of weights and gradients are equal, bit for bit."""

from __future__ import annotations

from megatron.core.collectives import raise_on_all_ranks
from megatron.core.distributed import check_replicas_equal, compare_over_replicas
from megatron.core.errors import TrainingError
from megatron.training.callbacks.callback import Callback, TrainingRun, is_due
from megatron.training.loggers import StepReport


class ReplicaChecks(Callback):
    """Compare the copies at the intervals of ``--check-*-hash-across-dp-replicas-interval``.

    Raises:
        TrainingError: copies differ, on every rank alike; the message names the parameters.
    """

    def on_gradients(self, run: TrainingRun) -> None:
        iteration = run.train_state.iteration + 1
        if not is_due(run.config.faults.check_gradient_hash_across_dp_replicas_interval, iteration):
            return
        parts = [(part.spec, part.gradient) for chunk in run.parts.ddp_chunks for part in chunk.parts]
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
