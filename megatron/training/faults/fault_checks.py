"""Checks of the flags about faults, spikes and what follows them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig

_LEAST_WINDOW = 8


def _check_policy(config: RunConfig) -> Iterator[str]:
    policy, checkpoint = config.faults.spike_policy, config.checkpoint
    if policy is None:
        return
    if not config.ddp.check_for_nan_in_loss_and_grad:
        yield (
            f"--spike-policy {policy} says what follows a gradient that is not finite, and "
            "--no-check-for-nan-in-loss-and-grad that nothing does; keep one"
        )
    if policy == "rewind" and (checkpoint.save is None or checkpoint.save_interval is None):
        yield "--spike-policy rewind goes back to checkpoints of the run; add --save DIR and --save-interval N"
    if policy == "rewind" and (checkpoint.no_save_optim or checkpoint.no_save_rng):
        flag = "--no-save-optim" if checkpoint.no_save_optim else "--no-save-rng"
        yield f"--spike-policy rewind goes on from whole checkpoints; leave {flag} out"
    if 0 < config.faults.spike_window < _LEAST_WINDOW:
        yield f"--spike-window {config.faults.spike_window} is too short to know what is usual; give {_LEAST_WINDOW} up"


def _check_skipped(config: RunConfig) -> Iterator[str]:
    wrong = [number for number in config.faults.iterations_to_skip if number < 0]
    if wrong:
        yield f"--iterations-to-skip {' '.join(map(str, wrong))}: numbers of iterations are 0 or more"


def _check_injection(config: RunConfig) -> Iterator[str]:
    rate, mode = config.faults.error_injection_rate, config.faults.rerun_mode
    if rate and mode != "validate_results":
        yield (
            f"--error-injection-rate {rate} is to see results examined, and --rerun-mode {mode} examines none; give "
            "--rerun-mode validate_results"
        )


def _check_gradient_hash(config: RunConfig) -> Iterator[str]:
    interval = config.faults.check_gradient_hash_across_dp_replicas_interval
    if interval and config.ddp.shards_optimizer:
        yield (
            f"--check-gradient-hash-across-dp-replicas-interval {interval} compares copies of the reduced gradients, "
            "of which each rank has a shard of its own with --use-distributed-optimizer; leave one of them out, or use "
            "--check-weight-hash-across-dp-replicas-interval"
        )


CHECKS = (
    Check(
        (
            *("spike_policy", "spike_window", "check_for_nan_in_loss_and_grad", "save", "save_interval"),
            *("no_save_optim", "no_save_rng"),
        ),
        _check_policy,
    ),
    Check(("iterations_to_skip",), _check_skipped),
    Check(("error_injection_rate", "rerun_mode"), _check_injection),
    Check(
        (
            *("check_gradient_hash_across_dp_replicas_interval", "use_distributed_optimizer"),
            "data_parallel_sharding_strategy",
        ),
        _check_gradient_hash,
    ),
)
