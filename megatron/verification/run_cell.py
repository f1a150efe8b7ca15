"""Train one configuration for a few steps on this rank and report all results that must not depend on the layout.

Each sample depends only on its number. Gradients and parameters are reported as fragments, from which global tensors
are assembled and compared element by element.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.checkpoint import TrainState
from megatron.config import RunConfig, resolve_arguments
from megatron.core.datasets import GPTDatasetConfig, GPTSample, make_sample
from megatron.core.device import Device
from megatron.core.sharding import Box, ParamSpec, held_of
from megatron.core.timers import Timers
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.training import (
    BatchSource,
    ForwardStep,
    ModelAndOptimizer,
    ModelProvider,
    Runtime,
    TrainingStep,
    build_model_and_optimizer,
    dataset_config,
    make_runtime,
)

_NUM_SAMPLES = 1 << 16
_DOCUMENT_ENDS = 0.15


class SyntheticDataset:
    """Samples of random tokens, divided into documents; training reads them in order.

    ``uneven`` samples have between one token and all tokens in the loss. Every third sample has only its first two, so
    that a context-parallel rank can have none.
    """

    def __init__(self, dataset_config: GPTDatasetConfig, uneven: bool) -> None:
        self._config = dataset_config
        self._uneven = uneven

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def source_of(self, index: int) -> str:
        """Describe the source of a sample; ``index`` is ignored."""
        return "random tokens"

    def __getitem__(self, index: int) -> GPTSample:
        config = self._config
        assert config.vocab_size is not None
        assert config.eod_token_id is not None
        generator = np.random.default_rng((config.random_seed, index))
        length = config.sequence_length
        text = generator.integers(0, config.vocab_size, length + 1)
        text[generator.random(length + 1) < _DOCUMENT_ENDS] = config.eod_token_id
        mask = np.ones(length, np.float32)
        if self._uneven:
            mask[2 if index % 3 == 0 else int(generator.integers(1, length + 1)) :] = 0.0
        return make_sample(text, length + 1, config, np.arange(length), mask)


Array = NDArray[np.float64]

_GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True, eq=False)
class Fragment:
    """One box of a global tensor on one rank."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    values: Array
    rank: int


@dataclass(frozen=True)
class Mismatch:
    """First element in which a rank's tensor differs from the reference, and the relative difference of the tensor."""

    name: str
    rank: int
    index: tuple[int, ...]
    actual: float
    expected: float
    relative_difference: float

    def describe(self) -> str:
        """Format one line."""
        return (
            f"{self.name}: rank {self.rank}, first differing element {list(self.index)}: {self.actual!r} instead of "
            f"{self.expected!r}; relative difference of the tensor {self.relative_difference:.3e}"
        )


def fragments_of(spec: ParamSpec, tensor: torch.Tensor, rank: int, name: str | None = None) -> list[Fragment]:
    """Split this rank's shard of a parameter or gradient into slices of the global tensor, without padding."""
    return [
        Fragment(
            name or spec.name,
            spec.global_shape,
            shard.global_box,
            tensor.detach()[shard.local_box.slices].to(torch.float64).cpu().numpy().copy(),
            rank,
        )
        for shard in spec.shards
    ]


def assemble(fragments: Iterable[Fragment]) -> dict[str, Array]:
    """Assemble the global tensors; elements that no rank has are NaN."""
    tensors: dict[str, Array] = {}
    for fragment in fragments:
        whole = tensors.setdefault(fragment.name, np.full(fragment.global_shape, np.nan))
        whole[fragment.box.slices] = fragment.values
    return tensors


def gradient_floor(reference: Mapping[str, Array]) -> float:
    """Return the size below which a gradient tensor's difference is not relative to its own size.

    The gradient of a key bias is zero in exact arithmetic, and in practice rounding error of the other gradients.
    """
    return _GRADIENT_FLOOR * max(float(np.abs(tensor).max()) for tensor in reference.values())


def compare(
    fragments: Iterable[Fragment], reference: Mapping[str, Array], tolerance: float, floor: float = 0.0
) -> tuple[list[Mismatch], float]:
    """Compare every rank's boxes, including replicas, with the reference; return mismatches and the worst difference.

    Two tensors agree if ``max |a - b| <= tolerance * max(max |b|, floor)``, taken per global tensor.
    """
    mismatches = []
    worst = 0.0
    seen: dict[str, int] = {}
    for fragment in fragments:
        expected_whole = reference.get(fragment.name)
        if expected_whole is None:
            mismatches.append(Mismatch(f"{fragment.name} (unknown)", fragment.rank, (), np.nan, np.nan, np.inf))
            continue
        expected = expected_whole[fragment.box.slices]
        seen[fragment.name] = seen.get(fragment.name, 0) + fragment.values.size
        scale = max(float(np.abs(expected_whole).max()), floor) or 1.0
        difference = np.abs(fragment.values - expected)
        # A NaN counts as an infinite difference.
        largest = float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0)) / scale
        worst = max(worst, largest)
        if largest > tolerance:
            mismatches.append(_first_difference(fragment, expected, tolerance * scale, largest))
    for name, tensor in reference.items():
        if seen.get(name, 0) < tensor.size:
            mismatches.append(Mismatch(f"{name} (held by no rank in part)", -1, (), np.nan, np.nan, np.inf))
            worst = np.inf
    return mismatches, worst


def _first_difference(fragment: Fragment, expected: Array, allowed: float, relative: float) -> Mismatch:
    off = ~(np.abs(fragment.values - expected) <= allowed)
    place = tuple(int(i) for i in np.argwhere(off)[0])
    index = tuple(start + i for start, i in zip(fragment.box.offset, place))
    return Mismatch(
        fragment.name, fragment.rank, index, float(fragment.values[place]), float(expected[place]), relative
    )


NUM_STEPS = 3
CPU = Device("cpu")


@dataclass
class CellResult:
    """Results of one rank: losses and norms of every step, gradients of the first, parameters after the last."""

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

    The process group must be initialized, unless the world size is 1. On CUDA, attention with dropout is unfused,
    because a fused kernel drops different weights in every layout.

    Raises:
        ConfigurationError: the configuration is rejected.
    """
    config = resolve_cell(flags, world_size, dtype)
    if device.is_cuda and config.model.attention_dropout > 0:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention_backend="unfused"))
    runtime = make_runtime(config, device)
    parts = build_model_and_optimizer(config, runtime, model_provider, log=lambda line: None)
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


def gradient_fragments(parts: ModelAndOptimizer, rank: int) -> list[Fragment]:
    """Return this rank's reduced gradients: all of them, or those of its shards."""
    return [
        fragment
        for chunk in parts.ddp_chunks
        for part in chunk.shards
        for spec, gradient in part.described(part.gradient)
        for fragment in fragments_of(spec, gradient, rank)
    ]


def resolve_cell(flags: Sequence[str], world_size: int, dtype: str) -> RunConfig:
    """Resolve a command line into a configuration with ``dtype``, which may be a dtype without a flag (float64).

    Raises:
        ConfigurationError: the configuration is rejected.
    """
    config = resolve_arguments(flags, world_size).config
    tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size, params_dtype=dtype)
    optimizer = dataclasses.replace(config.optimizer, params_dtype=dtype)
    return dataclasses.replace(config, model=model, optimizer=optimizer)


def make_source(config: RunConfig, runtime: Runtime, data: str) -> BatchSource:
    """Create this rank's source of samples of a kind in ``cells.DATA``, read and broadcast as in training."""
    tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
    dataset = SyntheticDataset(dataset_config(config, tokenizer), data == "uneven")
    return BatchSource(dataset, config, runtime, tokenizer.vocab_size, 0)
