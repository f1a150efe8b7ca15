"""A GPT with its optimizer state, as a run holds it: what the measurements save and load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
# The workload and its training flags are those of the step benchmark.
sys.path[:0] = [str(_ROOT), str(_ROOT / "benchmarks" / "step")]

import torch  # noqa: E402
from ours import WorkloadDataset, configure  # noqa: E402
from workload import Workload, add_workload_arguments, workload_of  # noqa: E402

from megatron.checkpoint.save import CommonState  # noqa: E402
from megatron.checkpoint.train_state import TrainProgress, TrainState  # noqa: E402
from megatron.config.run_config import CheckpointConfig, RunConfig  # noqa: E402
from megatron.core.dist_checkpointing.planner import CheckpointState  # noqa: E402
from megatron.core.timers import Timers  # noqa: E402
from megatron.training.batch_source import BatchSource  # noqa: E402
from megatron.training.checkpointing import CheckpointSaver, open_saver  # noqa: E402
from megatron.training.initialize import LaunchEnvironment, Runtime, initialize_runtime  # noqa: E402
from megatron.training.model_setup import ModelAndOptimizer, build_model_and_optimizer  # noqa: E402
from megatron.training.training_step import TrainingStep  # noqa: E402
from pretrain_gpt import forward_step, provide_model  # noqa: E402


@dataclass(frozen=True, eq=False)
class TrainedState:
    """Hold a model and optimizer whose every tensor has values, and what trains and saves them."""

    workload: Workload
    config: RunConfig
    runtime: Runtime
    parts: ModelAndOptimizer

    @property
    def tensors(self) -> CheckpointState:
        """Return what a checkpoint holds."""
        return CheckpointState(
            models=self.parts.chunks, optimizer=self.parts.optimizer, rng=self.runtime.rng.state_dict()
        )

    def flat(self) -> dict[str, torch.Tensor]:
        """Return the same tensors under flat names, for other programs to save."""
        named = {f"model.{name}": p.detach() for m in self.parts.chunks for name, p in m.named_parameters()}
        return named | {name: tensor for name, (_, tensor) in self.parts.optimizer.sharded_state().items()}

    def saver(self, folder: Path, **options: Any) -> CheckpointSaver:
        """Return what saves into a folder."""
        saver = open_saver(CheckpointConfig(save=str(folder), **options), self.runtime, lambda line: None)
        assert saver is not None
        return saver

    def save(self, saver: CheckpointSaver, iteration: int) -> None:
        """Save, or begin to."""
        saver.save(self.tensors, CommonState(progress=TrainProgress(iteration=iteration), config=self.config.to_dict()))

    def steps(self, count: int) -> Callable[[], None]:
        """Return what runs one training step, ``count`` times at most."""
        dataset = WorkloadDataset(self.workload, count * self.workload.micro_batch_size)
        source = BatchSource(dataset, self.config, self.runtime, self.workload.vocab_size, 0)
        timers = Timers(0, synchronize=self.runtime.device.synchronize)
        step, state = TrainingStep(self.config, self.runtime, self.parts, forward_step, timers), TrainState()

        def run() -> None:
            step.run(state, source, self.workload.micro_batch_size, None)

        return run


def build_state(workload: Workload, num_steps: int = 1) -> TrainedState:
    """Build the model, and give each tensor of its optimizer values without training."""
    config = configure(workload, num_steps, 1, 0)
    runtime = initialize_runtime(config, LaunchEnvironment())
    parts = build_model_and_optimizer(config, runtime, provide_model, lambda line: None)
    for _, tensor in parts.optimizer.sharded_state().values():
        if not tensor.any():
            tensor.normal_(std=1e-4).abs_()
    return TrainedState(workload, config, runtime, parts)


def parse_arguments(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Workload]:
    """Add the workload's options and those that every measurement has, and parse."""
    add_workload_arguments(parser)
    parser.add_argument("--folder", type=Path, required=True, help="empty folder on the disk to measure")
    parser.add_argument("--output", type=Path, required=True, help="file for the figures, as JSON")
    options = parser.parse_args()
    return options, workload_of(options)
