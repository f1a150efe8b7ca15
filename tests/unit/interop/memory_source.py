"""A source whose tensors lie in memory, and how it says what was read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.checkpoint_source import TensorInfo
from megatron.core.sharding import Box

COMMON: dict[str, Any] = {
    "progress": {"iteration": 7, "consumed_train_samples": 56},
    "config": {"model": {"num_layers": 2}},
    "layout": {"tensor_model_parallel_size": 1},
    "optimizer": {"num_steps": 7},
    "scheduler": {"num_samples": 56},
    "tokenizer": None,
}


class MemorySource:
    """Offer given tensors; ``reads`` lists what was asked for, ``is_closed`` whether it was closed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], common: Mapping[str, Any] | None = None) -> None:
        self.folder = Path("memory")
        self.common: Mapping[str, Any] = COMMON if common is None else common
        self.values = dict(tensors)
        self.reads: list[str] = []
        self.is_closed = False

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(values.shape), values.dtype) for name, values in self.values.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        self.reads.append(name)
        values = self.values[name]
        return (values if box is None else values[box.slices]).contiguous()

    def close(self) -> None:
        self.is_closed = True


def sample_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of several ranks and dtypes, a NaN and a negative zero among their values."""
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(11, 5, generator=generator).bfloat16()
    embedding[3, 1] = float("nan")
    moment = torch.randn(11, 5, generator=generator)
    moment[0, 0] = -0.0
    return {
        "model.embedding.weight": embedding,
        "model.norm.bias": torch.randn(5, generator=generator).bfloat16(),
        "optimizer.exp_avg.embedding.weight": moment,
        "optimizer.exp_avg.norm.bias": torch.randn(5, generator=generator),
        "model.scale": torch.tensor(2.5, dtype=torch.float64),
        "model.ids": torch.arange(3 * 4 * 2).view(3, 4, 2),
    }
