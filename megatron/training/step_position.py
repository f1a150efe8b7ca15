"""Find the training samples that a step read, from the run's checkpoints and its metrics file.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint import TrainProgress, candidate_folders, iteration_folder, saved_iterations
from megatron.config import RunConfig
from megatron.core.dist_checkpointing import read_index_file
from megatron.core.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class SavedRun:
    """Configuration and progress of a run as recorded in a checkpoint."""

    folder: Path
    config: RunConfig
    progress: TrainProgress


@dataclass(frozen=True)
class StepPosition:
    """Samples that a step trains on, by their numbers in the run, and the run itself.

    ``recorded_hash`` is the step's hash in the metrics file, or None if the file does not have the step.
    """

    step: int
    first_sample: int
    num_samples: int
    run: SavedRun
    recorded_hash: str | None


def read_saved_run(folder: Path) -> SavedRun:
    """Read the configuration and the progress of a checkpoint.

    Raises:
        CheckpointError: there is no readable checkpoint.
    """
    index = read_index_file(folder)
    try:
        common = index["common"]
        return SavedRun(folder, RunConfig.from_dict(common["config"]), TrainProgress(**common["progress"]))
    except (KeyError, TypeError, ConfigurationError) as error:
        raise CheckpointError(f"{folder} does not record the run that wrote it ({error})") from error


def find_step(directory: Path, step: int, ckpt_step: int | None, metrics_file: Path | None) -> StepPosition:
    """Find the samples of a step from the checkpoints around it.

    The configuration and the record of the data come from the oldest checkpoint at or after the step, or from the
    newest checkpoint if the step is still to come. If the metrics file has the step, its record of the samples is used.

    Raises:
        CheckpointError: there is no checkpoint, or the checkpoints do not determine the samples.
        ConfigurationError: the run has no such step.
    """
    run = _run_of_step(directory, step, ckpt_step)
    if not 1 <= step <= run.config.train_iters:
        raise ConfigurationError(f"--step {step}: the run has steps 1 to {run.config.train_iters}")
    path = _metrics_path(directory, run, metrics_file)
    recorded = None if path is None else _recorded_step(path, step)
    if recorded is not None:
        size = int(recorded["global_batch_size"])
        return StepPosition(step, int(recorded["consumed_samples"]) - size, size, run, recorded["sample_ids_hash"])
    first = _first_sample(directory, run, step)
    return StepPosition(step, first, run.config.training.batch_sizes.global_batch_size_at(first), run, None)


def _run_of_step(directory: Path, step: int, ckpt_step: int | None) -> SavedRun:
    if ckpt_step is None:
        for iteration in saved_iterations(directory):
            if iteration >= step:
                return read_saved_run(iteration_folder(directory, iteration))
    folders = candidate_folders(directory, ckpt_step)
    if not folders:
        raise CheckpointError(f"{directory} contains no checkpoint")
    return read_saved_run(folders[0])


def _first_sample(directory: Path, run: SavedRun, step: int) -> int:
    """Count the samples before a step, from the last checkpoint before it or from the beginning of the run."""
    iteration, consumed = 0, 0
    earlier = [saved for saved in saved_iterations(directory) if saved < step]
    if earlier:
        before = read_saved_run(iteration_folder(directory, earlier[-1])).progress
        iteration, consumed = before.iteration, before.consumed_train_samples
    batch_sizes, end = run.config.training.batch_sizes, run.progress
    if end.iteration >= step:
        counted = batch_sizes.samples_of_iterations(end.iteration - iteration, consumed)
        if counted != end.consumed_train_samples:
            raise CheckpointError(
                f"the batch size was changed between iterations {iteration} and {end.iteration}: the checkpoints do "
                f"not record which samples step {step} used; pass the run's metrics file with --metrics-jsonl"
            )
    return batch_sizes.samples_of_iterations(step - 1 - iteration, consumed)


def _metrics_path(directory: Path, run: SavedRun, given: Path | None) -> Path | None:
    if given is not None and not given.is_file():
        raise ConfigurationError(f"--metrics-jsonl {given}: there is no such file")
    beside = directory / "metrics.jsonl"
    configured = run.config.logging.metrics_jsonl
    for path in (given, beside, None if configured is None else Path(configured)):
        if path is not None and path.is_file():
            return path
    return None


def _recorded_step(path: Path, step: int) -> Mapping[str, Any] | None:
    """Return the line of a step, or None if there is none."""
    found = None
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):  # the run was killed while it wrote its last line
                continue
            if isinstance(values, dict) and values.get("iteration") == step and "sample_ids_hash" in values:
                found = values
    return found
