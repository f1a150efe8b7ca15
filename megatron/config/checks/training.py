"""Checks of batch sizes and run length, profiled iterations, and the handling of faulty steps."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.checks.base import Check, divisors_of
from megatron.config.checks.parallelism import has_whole_copies
from megatron.config.run_config import RunConfig
from megatron.core.errors import choices
from megatron.core.parallel_sizes import MODEL_SIZE_NAMES

_MOST_SAMPLES = 2**63 - 1
_MOST_MICROBATCHES = 2**20
_MOST_BATCH_SIZES = 2**16
_BATCH = ("micro_batch_size", "global_batch_size", *MODEL_SIZE_NAMES)


def _slice(config: RunConfig) -> int:
    """Return the samples that all data-parallel ranks take in one micro-batch, or 0 where there is no
    such number."""
    if not has_whole_copies(config):
        return 0
    return max(config.training.micro_batch_size, 0) * config.data_parallel_size


def _check_global_batch(config: RunConfig) -> Iterator[str]:
    batch, micro, one = config.training.global_batch_size, config.training.micro_batch_size, _slice(config)
    if one and batch > 0 and batch % one != 0 and config.training.step_batch_size_schedule is None:
        below, above = batch // one * one, -(-batch // one) * one
        nearest = f"{below} or {above}" if below else f"{above}"
        yield (
            f"--global-batch-size {batch} is not divisible by --micro-batch-size {micro} x "
            f"data-parallel size {config.data_parallel_size} = {one}; nearest sizes that work: {nearest}"
        )


def _check_rampup(config: RunConfig) -> Iterator[str]:
    given, batch, one = config.training.rampup_batch_size, config.training.global_batch_size, _slice(config)
    if not given:
        return
    typed = "--rampup-batch-size " + " ".join(str(number) for number in given)
    if len(given) != 3:
        yield f"{typed}: three numbers are expected: first size, increment, samples"
        return
    start, increment, _ = given
    if min(given) <= 0:
        yield f"{typed}: a first size, an increment and a number of samples above 0 are expected"
        return
    if start > batch:
        yield f"{typed}: the first size is greater than --global-batch-size {batch}"
    elif (batch - start) % increment != 0:
        yield (
            f"{typed}: the way from {start} to --global-batch-size {batch} is {batch - start}, "
            f"which is not a multiple of the increment {increment}; increments that work: "
            f"{_increments(batch - start, max(one, 1))}"
        )
    if one and (start % one != 0 or increment % one != 0):
        yield (
            f"{typed}: first size and increment must be multiples of --micro-batch-size "
            f"{config.training.micro_batch_size} x data-parallel size {config.data_parallel_size} = {one}"
        )


def _increments(way: int, one: int) -> str:
    """Return the divisors of the way from the first to the full batch size that are whole slices, as text."""
    return choices(size for size in divisors_of(way) if size % one == 0)


def _check_steps(config: RunConfig) -> Iterator[str]:
    text, one = config.training.step_batch_size_schedule, _slice(config)
    if text is None or not one:
        return
    sizes = (*config.training.batch_size_steps[::2], config.training.global_batch_size)
    for size in sizes:
        if size % one != 0:
            nearest = max(round(size / one), 1) * one
            yield (
                f"--step-batch-size-schedule {text!r}: {size} is not divisible by --micro-batch-size "
                f"{config.training.micro_batch_size} x data-parallel size {config.data_parallel_size} = {one}; "
                f"nearest size that works: {nearest}"
            )


def _check_end(config: RunConfig) -> Iterator[str]:
    training = config.training
    if not (training.train_iters or training.train_samples or training.skip_train):
        yield "--train-iters is missing; give it, or --train-samples, or --skip-train"


def _check_length(config: RunConfig) -> Iterator[str]:
    training = config.training
    if 0 < training.train_samples < training.global_batch_size:
        yield (
            f"--train-samples {training.train_samples} is less than one --global-batch-size "
            f"{training.global_batch_size}; no iteration would be trained"
        )


def _check_run(config: RunConfig) -> Iterator[str]:
    training = config.training
    if training.train_iters * training.global_batch_size > _MOST_SAMPLES:
        yield (
            f"--train-iters {training.train_iters} x --global-batch-size {training.global_batch_size} are more samples "
            f"than {_MOST_SAMPLES}; lower one of them"
        )


def _check_microbatches(config: RunConfig) -> Iterator[str]:
    training = config.training
    if not has_whole_copies(config) or training.micro_batch_size < 1:
        return
    count = training.global_batch_size // (training.micro_batch_size * config.data_parallel_size)
    if count > _MOST_MICROBATCHES:
        yield (
            f"--global-batch-size {training.global_batch_size} makes {count} micro-batches of --micro-batch-size "
            f"{training.micro_batch_size} on each of {config.data_parallel_size} model copies; at most "
            f"{_MOST_MICROBATCHES} are taken: lower the first or raise the second"
        )


def _check_batch_sizes(config: RunConfig) -> Iterator[str]:
    given, batch = config.training.rampup_batch_size, config.training.global_batch_size
    if len(given) != 3 or min(given) <= 0:
        return  # Said by the check of the ramp-up.
    count = (batch - given[0]) // given[1]
    if count > _MOST_BATCH_SIZES:
        yield (
            f"--rampup-batch-size {given[0]} {given[1]} {given[2]} has {count} sizes up to --global-batch-size "
            f"{batch}; at most {_MOST_BATCH_SIZES} are taken: raise the increment"
        )


BATCH_CHECKS = (
    Check(("train_iters", "global_batch_size"), _check_run),
    Check(("global_batch_size", "micro_batch_size", *MODEL_SIZE_NAMES), _check_microbatches),
    Check(("rampup_batch_size", "global_batch_size"), _check_batch_sizes),
    Check(_BATCH, _check_global_batch),
    Check((*_BATCH, "rampup_batch_size"), _check_rampup),
    Check((*_BATCH, "step_batch_size_schedule"), _check_steps),
    Check(("train_iters", "train_samples", "global_batch_size", "micro_batch_size"), _check_length),
)
LENGTH_CHECKS = (Check(("train_iters", "train_samples"), _check_end),)
"""What a run needs, and a step of it does not."""


NO_PROFILE_FOLDER = (
    "--profile has no folder for the traces of torch's profiler; add --tensorboard-dir DIR or --save DIR"
)


def _check_profiled_steps(config: RunConfig) -> Iterator[str]:
    start, end = config.logging.profile_step_start, config.logging.profile_step_end
    if config.logging.profile and start >= end:
        yield (
            f"--profile-step-start {start} --profile-step-end {end}: iterations {start + 1} to {end} are none; "
            "give an end above the start"
        )


def _check_ranks(config: RunConfig) -> Iterator[str]:
    missing = [rank for rank in config.logging.profile_ranks if not 0 <= rank < config.world_size]
    if missing:
        yield (
            f"--profile-ranks {' '.join(map(str, missing))}: the run has the ranks 0 to {config.world_size - 1}; "
            "leave out the others"
        )


def _check_folder(config: RunConfig) -> Iterator[str]:
    if config.logging.profile and config.logging.use_pytorch_profiler and config.profile_folder is None:
        yield NO_PROFILE_FOLDER


def _check_looks(config: RunConfig) -> Iterator[str]:
    interval, tasks = config.logging.sample_interval, config.validation.eval_tasks
    if interval is not None and not config.logging.sample_prompts:
        yield f"--sample-interval {interval} has nothing to continue; add --sample-prompts TEXT"
    if tasks and not config.validation.eval_interval and config.validation.eval_tasks_interval is None:
        yield "--eval-tasks with --eval-interval 0 would ask nothing; add --eval-tasks-interval N"


PROFILING_CHECKS = (
    Check(("profile_step_start", "profile_step_end"), _check_profiled_steps),
    Check(("profile_ranks",), _check_ranks),
    Check(("tensorboard_dir", "save"), _check_folder),
    Check(("sample_interval", "eval_tasks"), _check_looks),
)


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


FAULT_CHECKS = (
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
