"""What a run does about results that look wrong: how they are found, examined, and what follows."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultConfig(Config, role="run"):
    """Hold the watch on losses and gradients, the examination of bad steps, and the policy."""

    rerun_mode: str = flag("validate_results", choices=("validate_results", "report_stats", "disabled"))
    """What is computed twice: validate_results each step whose loss or gradient looks wrong, to tell data, weights and
    devices apart; report_stats every step, to report how much results vary; disabled nothing."""
    error_injection_rate: int = flag(0, bounds=NOT_NEGATIVE)
    """Spoil the result of one iteration in about this number, on a rank drawn by the seed, to see the examination work;
    0 for none."""
    error_injection_type: str = flag(
        "transient_error",
        choices=("correct_result", "transient_error", "persistent_error"),
        needs="error_injection_rate",
    )
    """What is injected: correct_result suspects a right result, transient_error spoils one computation of a rank,
    persistent_error all that the rank computes from then on."""
    result_rejected_tracker_filename: str | None = flag(None, metavar="FILE")
    """File that a line is appended to for each result that was examined, on the reporting rank."""
    spike_policy: str | None = flag(None, choices=("stop", "skip", "rewind"))
    """What follows a step whose loss or gradient norm is not finite or a spike: stop ends the run, skip leaves its
    samples out, rewind also goes back to the newest checkpoint that is known to train. By default what is not finite
    ends the run, and spikes are not looked for."""
    spike_window: int = flag(64, bounds=POSITIVE, needs="spike_policy")
    """Number of iterations before that a loss and a gradient norm are compared with; half of it must be there."""
    spike_threshold: float = flag(6.0, bounds=POSITIVE, needs="spike_policy")
    """Standard deviations above the mean of the window (of the logarithm of gradient norms) that make a spike."""
    spike_budget: int = flag(10, bounds=NOT_NEGATIVE, needs="spike_policy")
    """Steps that --spike-policy may leave out or rewind in the whole run; one more ends it."""
    iterations_to_skip: tuple[int, ...] = flag((), nargs="+", metavar="N")
    """Pass over the samples that come when this many iterations are done, as in Megatron: 7 is the one that the log
    calls 8."""
    check_for_spiky_loss: bool = False
    """Examine and report a loss ten times as large as the largest of the run's first hundred iterations."""
    check_for_large_grads: bool = False
    """Examine and report a gradient norm ten times as large as the largest of the run's first hundred iterations."""
    known_to_train_after: int = flag(2, bounds=POSITIVE, needs="save")
    """Finite iterations in a row after a checkpoint that make it known to train: retention keeps the newest such."""
    check_gradient_hash_across_dp_replicas_interval: int | None = flag(None, bounds=POSITIVE)
    """Compare the reduced gradients of the data-parallel copies, bit for bit, in each of this number of iterations, and
    end the run where they differ."""

    @property
    def watches(self) -> bool:
        """Return whether losses and gradient norms are compared with those before."""
        return self.spike_policy is not None or self.check_for_spiky_loss or self.check_for_large_grads
