"""Train one configuration for a few steps on this rank and report everything that must not depend on the layout."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.checkpoint.train_state import TrainState
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.device import Device
from megatron.core.sharding import held_of
from megatron.core.timers import Timers
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training.batch_source import BatchSource
from megatron.training.data_plan import dataset_config
from megatron.training.initialize import Runtime, make_runtime
from megatron.training.model_setup import ModelProvider, TrainingParts, build_training_parts
from megatron.training.training_step import ForwardStep, TrainingStep
from megatron.verification.fragments import Fragment, fragments_of
from megatron.verification.synthetic_samples import SyntheticDataset

NUM_STEPS = 3
CPU = Device("cpu")


@dataclass
class CellResult:
    """Hold what one rank saw: losses and norms of every step, gradients of the first, parameters after the last."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[Fragment] = field(default_factory=list)
    parameters: list[Fragment] = field(default_factory=list)


def run_cell(
    flags: Sequence[str],
    world_size: int,
    data: str,
    dtype: str,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    device: Device = CPU,
) -> CellResult:
    """Train the configuration for a few steps in ``dtype`` and return this rank's result.

    The process group is initialised already unless this process is alone. On CUDA, attention with dropout is unfused:
    a fused kernel drops other weights at every layout.

    Raises:
        ConfigurationError: the configuration is refused.
    """
    config = resolve_cell(flags, world_size, dtype)
    if device.is_cuda and config.model.attention_dropout > 0:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention_backend="unfused"))
    runtime = make_runtime(config, device)
    parts = build_training_parts(config, runtime, model_provider, log=lambda line: None)
    result = CellResult()

    def copy_first_gradients() -> None:
        if not result.gradients:
            result.gradients = gradient_fragments(parts, runtime.state.rank)

    step = TrainingStep(config, runtime, parts, forward_step, Timers(), copy_first_gradients)
    source = make_source(config, runtime, data)
    train_state = TrainState()
    with contextlib.closing(source):
        for _ in range(NUM_STEPS):
            report, _ = step.run(train_state, source, config.training.global_batch_size, None)
            assert report.grad_norm is not None
            result.losses.append(report.lm_loss)
            result.grad_norms.append(report.grad_norm)
    for chunk in parts.ddp_chunks:
        chunk.finish_param_gather()
        for parameter in chunk.parameters():
            for spec, values in held_of(parameter):
                result.parameters += fragments_of(spec, values, runtime.state.rank)
    return result


def gradient_fragments(parts: TrainingParts, rank: int) -> list[Fragment]:
    """Return what this rank holds of the reduced gradients: all of them, or those of its shards."""
    return [
        fragment
        for chunk in parts.ddp_chunks
        for part in chunk.parts
        for spec, gradient in part.described(part.gradient)
        for fragment in fragments_of(spec, gradient, rank)
    ]


def resolve_cell(flags: Sequence[str], world_size: int, dtype: str) -> RunConfig:
    """Return the configuration of a command line, in a number format that need not be one of the command line's.

    Raises:
        ConfigurationError: the configuration is refused.
    """
    config = resolve_arguments(flags, world_size).config
    tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size, params_dtype=dtype)
    optimizer = dataclasses.replace(config.optimizer, params_dtype=dtype)
    return dataclasses.replace(config, model=model, optimizer=optimizer)


def make_source(config: RunConfig, runtime: Runtime, data: str) -> BatchSource:
    """Return this rank's samples of a kind of ``cells.DATA``, read and sent as those of a training are."""
    tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
    dataset = SyntheticDataset(dataset_config(config, tokenizer), data == "uneven")
    return BatchSource(dataset, config, runtime, tokenizer.vocab_size, 0)
