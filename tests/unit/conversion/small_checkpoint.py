"""Native checkpoints of a small model that was never trained, written without a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.formats.native import write_native
from megatron.checkpoint.train_state import TrainProgress
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import spec_of
from tests.unit.core.inference.small_models import build
from tests.unit.interop.memory_source import MemorySource

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
