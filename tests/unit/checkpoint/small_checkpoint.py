"""Small native checkpoints without a run, and a source whose tensors lie in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.checkpoint_source import TensorInfo
from megatron.checkpoint.formats.native import write_native
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import Box, spec_of
from tests.unit.core.inference.small_models import build

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


FLAGS = """
    --num-layers 4 --hidden-size 24 --num-attention-heads 4 --ffn-hidden-size 40 --seq-length 20
    --max-position-embeddings 20 --micro-batch-size 1 --global-batch-size 2 --train-iters 8 --lr 1e-3
    --tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 8 --mock-data
"""

SCHEDULE = {
    "max_lr": 1e-3,
    "min_lr": 0.0,
    "init_lr": 0.0,
    "lr_warmup_steps": 0,
    "lr_decay_steps": 16,
    "lr_decay_style": "linear",
    "wsd_decay_steps": None,
    "lr_wsd_decay_style": "exponential",
    "start_wd": 0.01,
    "end_wd": 0.01,
    "wd_incr_steps": 16,
    "wd_incr_style": "constant",
}


def small_common(*more: str, iteration: int = 3, has_optimizer: bool = True) -> dict[str, Any]:
    """Return the shared state of a run with the flags above and ``more``."""
    config = resolve_arguments([*FLAGS.split(), *" ".join(more).split()], 1).config.to_dict()
    config["model"]["vocab_size"] = 101
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return {
        "progress": dataclasses.asdict(TrainProgress(iteration=iteration, consumed_train_samples=2 * iteration)),
        "config": config,
        "layout": dict.fromkeys((*sizes, "data_parallel_size", "world_size"), 1),
        "optimizer": {"num_steps": iteration, "grad_scaler": {}} if has_optimizer else None,
        "scheduler": {"num_samples": 2 * iteration, "schedule": dict(SCHEDULE)} if has_optimizer else None,
        "tokenizer": None,
    }


def small_source(common: dict[str, Any]) -> MemorySource:
    """Return a model of this configuration with random weights, and moments where there is an optimizer."""
    model = build(RunConfig.from_dict(common["config"]).model, single_rank_group(), seed=17)
    tensors = {}
    for parameter in model.parameters():
        spec = spec_of(parameter)
        values = parameter.detach()[tuple(slice(size) for size in spec.global_shape)].clone()
        tensors[f"model.{spec.name}"] = values
        if common["optimizer"] is not None:
            tensors[f"optimizer.exp_avg.{spec.name}"] = torch.sin(values)
            tensors[f"optimizer.exp_avg_sq.{spec.name}"] = values.square()
    return MemorySource(tensors, common)


def write_small(directory: Path, common: dict[str, Any]) -> Path:
    """Write a run's folder with one checkpoint and return the iteration's folder."""
    return write_native(small_source(common), directory, common["progress"]["iteration"] or "release")
