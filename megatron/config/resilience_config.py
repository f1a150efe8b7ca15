"""Resilience configuration: how faulty steps are detected and replayed, and how dead ranks are replaced."""

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
        return self.spike_policy is not None or self.check_for_spiky_loss or self.check_for_large_grads


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartConfig(Config, role="run"):
    """Hold what is done about ranks that die: nothing, or a replacement of theirs in new process groups."""

    inprocess_restart: bool = False
    """Replace a rank that dies by a new process, and go on in new process groups: the other ranks keep theirs."""
    inprocess_max_iterations: int | None = flag(None, bounds=POSITIVE, needs="inprocess_restart")
    """End the run at the next failure after this many restarts; by default they are not limited."""
    inprocess_monitor_thread_interval: float = flag(1.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds between two looks of a rank at whether the others restart."""
    inprocess_barrier_timeout: float = flag(120.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds that ranks wait for the others before they train, at the start and at each restart."""
    inprocess_hard_timeout: float = flag(90.0, bounds=POSITIVE, needs="inprocess_restart")
    """Seconds that a rank may take to leave the step of a failed run; then it is replaced as well."""
    inprocess_empty_cuda_cache: bool = flag(False, needs="inprocess_restart")
    """Give unused CUDA memory back at each restart."""
    non_persistent_save_interval: int | None = flag(None, bounds=POSITIVE, needs="inprocess_restart")
    """Copy what a checkpoint holds into the machines' memory every so many iterations, for restarts: two copies of all
    that a rank holds."""
    non_persistent_local_ckpt_dir: str = flag("/dev/shm", metavar="DIR", needs="non_persistent_save_interval")
    """Folder of each machine that its copies are kept in, in a folder that goes when the launcher ends."""
    replication: bool = flag(False, needs="non_persistent_save_interval")
    """Send each copy to another rank, which keeps it too: the machine of a rank may then be lost."""
    replication_jump: int | None = flag(None, bounds=POSITIVE, needs="replication")
    """Ranks between a rank and the one that keeps its copy too; by default those of a machine, or 1 where there is
    one."""
