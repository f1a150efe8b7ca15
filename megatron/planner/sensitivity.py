"""How the fastest layout and its speed change with the GPU memory, the sequence length, the batch and the GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.planner.gpu import Gpu
from megatron.planner.search import Candidate

_MIB = 2**20
_MEMORY_FACTORS = (0.5, 0.75, 1.5)
_FACTORS = (0.5, 2.0)


@dataclass(frozen=True)
class Variation:
    """Hold a change of one quantity: the flags that follow those of the run, the number of GPUs, and their type."""

    name: str
    words: tuple[str, ...]
    world_size: int
    gpu: Gpu


@dataclass(frozen=True)
class Sensitivity:
    """Hold the fastest layout of a variation, or the reason why there is none."""

    variation: Variation
    best: Candidate | None
    reason: str = ""

    def to_text(self) -> str:
        """Return the speed and the layout, or the reason."""
        best = self.best
        if best is None:
            return f" {self.reason}"
        speed = best.tokens_per_second
        return (
            f"{1e3 * best.seconds:10.1f} {speed:10.0f} {speed / self.variation.world_size:13.1f} "
            f"{best.margin_bytes // _MIB:9}  {best.choice.describe()}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        changed = {"changed": self.variation.name, "world_size": self.variation.world_size}
        if self.best is None:
            return changed | {"reason": self.reason}
        return changed | {
            "choice": dataclasses.asdict(self.best.choice),
            "ms_per_step": 1e3 * self.best.seconds,
            "tokens_per_second": self.best.tokens_per_second,
            "margin_mib": self.best.margin_bytes / _MIB,
        }


def variations(config: RunConfig, gpu: Gpu) -> Iterator[Variation]:
    """Yield the run as it is, and changes of one quantity at a time."""
    world, length, batch = config.world_size, config.data.seq_length, config.training.global_batch_size
    yield Variation("as configured", (), world, gpu)
    for factor in _MEMORY_FACTORS:
        changed = dataclasses.replace(gpu, memory_bytes=int(factor * gpu.memory_bytes))
        yield Variation(f"GPU memory {changed.memory_bytes // _MIB} MiB", (), world, changed)
    for tokens in _scaled(length):
        positions = max(tokens, config.model.max_position_embeddings or 0)
        words = ("--seq-length", str(tokens), "--max-position-embeddings", str(positions))
        yield Variation(f"sequence length {tokens}", words, world, gpu)
    for samples in _scaled(batch):
        yield Variation(f"global batch size {samples}", ("--global-batch-size", str(samples)), world, gpu)
    for ranks in _scaled(world):
        yield Variation(f"GPUs {ranks}", (), ranks, gpu)


def _scaled(number: int) -> list[int]:
    """Return half and twice a number, if they are whole."""
    return [int(factor * number) for factor in _FACTORS if (factor * number).is_integer()]


def find_sensitivity(variation: Variation, best_of: Callable[[Variation], Candidate | None]) -> Sensitivity:
    """Return the fastest layout of a variation; ``best_of`` returns it, or None if no layout fits."""
    try:
        best = best_of(variation)
    except ConfigurationError as error:
        return Sensitivity(variation, None, f"not possible: {error.problems[0]}")
    return Sensitivity(variation, best, "" if best else "no layout fits")


def describe_sensitivities(several: Sequence[Sensitivity]) -> Iterator[str]:
    """Yield the lines of a table: the fastest layout of each variation, and its speed."""
    width = max(len(each.variation.name) for each in several)
    yield f"{'changed':{width}}    ms/step   tokens/s  tokens/s/GPU  MiB left  fastest layout"
    for each in several:
        yield f"{each.variation.name:{width}} {each.to_text()}"
