"""A toy run that is saved and loaded on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.checkpoint.load import LoadedCheckpoint, load_checkpoint
from megatron.checkpoint.save import CommonState
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.parallel_state import describe_parallel_state
from tests.harness.saved_checkpoint import save_checkpoint
from tests.unit.core.dist_checkpointing.toy import (
    empty_run,
    filled_run,
)

STATE = describe_parallel_state(0, 1)
CONFIG = {"model": {"num_layers": 4, "hidden_size": 5}, "optimizer": {"lr": 1e-4}}
SCHEDULER = {"num_steps": 160, "max_lr": 0.1}
TRACKER = "latest_checkpointed_iteration.txt"


def common(iteration: int, **changes: Any) -> CommonState:
    progress = TrainProgress(
        iteration=iteration,
        consumed_train_samples=16 * iteration,
        consumed_valid_samples=7,
        skipped_iterations=2,
        floating_point_operations_so_far=1.5e21,
    )
    return CommonState(**{"progress": progress, "config": CONFIG, "scheduler": SCHEDULER} | changes)


def save(
    directory: Path, iteration: int, lines: list[str], run: CheckpointState | None = None, **options: Any
) -> CheckpointState:
    run = filled_run(STATE) if run is None else run
    save_checkpoint(directory, run, common(iteration), STATE, CheckpointConfig(**options), lines.append)
    return run


def load(
    directory: Path, lines: list[str], config: dict[str, Any] = CONFIG, **options: Any
) -> tuple[CheckpointState, LoadedCheckpoint | None]:
    run = empty_run(STATE)
    loaded = load_checkpoint(directory, run, STATE, CheckpointConfig(**options), config, lines.append)
    return run, loaded


def flip_byte(folder: Path, position: int = -1) -> None:
    path = folder / "shard_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
