"""Checks of which iterations and ranks are profiled, where the trace goes, and of texts generated on the way."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig

NO_PROFILE_FOLDER = (
    "--profile has no folder for the traces of torch's profiler; add --tensorboard-dir DIR or --save DIR"
)


def _check_steps(config: RunConfig) -> Iterator[str]:
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


CHECKS = (
    Check(("profile_step_start", "profile_step_end"), _check_steps),
    Check(("profile_ranks",), _check_ranks),
    Check(("tensorboard_dir", "save"), _check_folder),
    Check(("sample_interval", "eval_tasks"), _check_looks),
)
