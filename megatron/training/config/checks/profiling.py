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
    if interval is not None:
        if not config.logging.sample_prompts:
            yield f"--sample-interval {interval} has nothing to continue; add --sample-prompts TEXT"
        yield from _check_layout(config, f"--sample-interval {interval}")
    if tasks:
        if not config.validation.eval_interval and config.validation.eval_tasks_interval is None:
            yield "--eval-tasks with --eval-interval 0 would ask nothing; add --eval-tasks-interval N"
        yield from _check_layout(config, f"--eval-tasks {' '.join(tasks)}")


def _check_layout(config: RunConfig, flag: str) -> Iterator[str]:
    model = config.model
    for words, is_given in (
        (f"--context-parallel-size {model.context_parallel_size}", model.context_parallel_size > 1),
        ("--sequence-parallel", model.sequence_parallel),
        ("several model chunks on a pipeline rank", config.stage_layout.num_chunks > 1),
        (f"--fp8-format {model.fp8_format}", model.fp8_format is not None),
        (f"--cuda-graph-impl {config.training.cuda_graph_impl}", config.training.cuda_graph_impl != "none"),
    ):
        if is_given:
            yield f"{flag} does not go with {words}: single tokens are generated; leave one out"


CHECKS = (
    Check(("profile_step_start", "profile_step_end"), _check_steps),
    Check(("profile_ranks",), _check_ranks),
    Check(("tensorboard_dir", "save"), _check_folder),
    Check(("num_layers", "pipeline_model_parallel_layout"), _check_looks),
)
