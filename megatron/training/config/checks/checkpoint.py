"""Checks of what is saved, loaded and reported, and of the folders for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig


def _check_save(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save is not None:
        return
    if checkpoint.save_interval is not None:
        yield f"--save-interval {checkpoint.save_interval} has no effect without --save DIR; add it"
    if checkpoint.async_save:
        yield "--async-save has no effect without --save DIR; add it"
    for name, value in (("keep-last", checkpoint.keep_last), ("keep-every", checkpoint.keep_every)):
        if value is not None:
            yield f"--{name} {value} has no effect without --save DIR; add it"


def _check_load(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.load is not None:
        return
    if checkpoint.ckpt_step is not None:
        yield f"--ckpt-step {checkpoint.ckpt_step} has no effect without --load DIR; add it"
    for name, is_on in (
        ("--finetune", checkpoint.finetune),
        ("--exit-on-missing-checkpoint", checkpoint.exit_on_missing_checkpoint),
        ("--use-checkpoint-args", checkpoint.use_checkpoint_args),
        ("--use-checkpoint-opt-param-scheduler", config.scheduler.use_checkpoint_opt_param_scheduler),
    ):
        if is_on:
            yield f"{name} has no effect without --load DIR; add it"


def _check_folders(config: RunConfig) -> Iterator[str]:
    for name, folder in (
        ("--save", config.checkpoint.save),
        ("--load", config.checkpoint.load),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--data-cache-path", config.data.data_cache_path),
    ):
        if folder is not None and Path(folder).is_file():
            yield f"{name} {folder} is a file; give a folder"
    if config.logging.metrics_jsonl is not None and Path(config.logging.metrics_jsonl).is_dir():
        yield f"--metrics-jsonl {config.logging.metrics_jsonl} is a folder; give a file"


CHECKS = (
    Check(("save_interval", "keep_last", "keep_every"), _check_save),
    Check(("ckpt_step",), _check_load),
    Check((), _check_folders),
)
