"""Trainings in this process: a few steps of a configuration on a device, with its losses and times."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

import pretrain_gpt
from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.models.model import Model
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.sharding import held_of
from megatron.core.timers import Timers
from megatron.planner.explanation import with_known_vocabulary
from megatron.training.batch_source import BatchSource
from megatron.training.initialize import Runtime, make_runtime
from megatron.training.model_setup import ModelAndOptimizer, build_model_and_optimizer
from megatron.training.training_step import TrainingStep
from megatron.verification.run_cell import make_source


@dataclass
class Training:
    """Hold a model that is ready to be trained, and what its steps gave.

    ``step_ms`` are times from one step's beginning to its end on the device, ``loads`` the fewest tokens that an expert
    had in each step, where there are experts.
    """

    config: RunConfig
    runtime: Runtime
    parts: ModelAndOptimizer
    step: TrainingStep
    source: BatchSource
    state: TrainState = field(default_factory=TrainState)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def run(self, num_steps: int, is_time: Callable[[], bool] = lambda: True) -> None:
        """Train some steps, or fewer if time is up."""
        for _ in range(num_steps):
            self.runtime.device.synchronize()
            begun = time.perf_counter()
            report, _ = self.step.run(self.state, self.source, self.config.training.global_batch_size, None)
            self.runtime.device.synchronize()
            self.step_ms.append(1e3 * (time.perf_counter() - begun))
            self.losses.append(report.lm_loss)
            assert report.grad_norm is not None
            self.grad_norms.append(report.grad_norm)
            if not is_time():
                return


@contextlib.contextmanager
def training(flags: Sequence[str], device: Device, *, draws_on_device: bool = False) -> Iterator[Training]:
    """Build a training of one process; its samples are random tokens, which the flags may cut into documents.

    With ``draws_on_device`` initial values are not the project's own, which the host draws in 17 ns per value.

    Raises:
        ConfigurationError: the flags are rejected.
    """
    config = with_known_vocabulary(resolve_arguments(flags, 1).config)
    runtime = make_runtime(config, device)
    provider = _provide_drawn_on_device if draws_on_device else pretrain_gpt.provide_model
    parts = build_model_and_optimizer(config, runtime, provider, log=lambda line: None)
    step = TrainingStep(config, runtime, parts, pretrain_gpt.forward_step, Timers())
    with contextlib.closing(make_source(config, runtime, "plain")) as source:
        yield Training(config, runtime, parts, step, source)


def _provide_drawn_on_device(config: RunConfig, runtime: Runtime, contents: StageContents) -> Model:
    seedless = dataclasses.replace(config.initialization, seed=cast(int, None))
    model = pretrain_gpt.provide_model(dataclasses.replace(config, initialization=seedless), runtime, contents)
    generator = torch.Generator(runtime.device.torch_device).manual_seed(config.initialization.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            for spec, held in held_of(parameter):
                if spec.init_std or spec.init_bound:
                    held.normal_(spec.init_mean, spec.init_std or spec.init_bound, generator=generator)
                else:
                    held.fill_(spec.init_mean)
    return model


def train(flags: Sequence[str], device: Device, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of some steps with the project's own initial values."""
    with training(flags, device) as run:
        run.run(num_steps)
        return run.losses, run.grad_norms


def largest_difference(actual: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two lists of numbers; infinite if one is shorter or not finite."""
    if len(actual) != len(expected) or not actual:
        return float("inf")
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(actual, expected)]
    return max(each if each - each == 0.0 else float("inf") for each in differences)
