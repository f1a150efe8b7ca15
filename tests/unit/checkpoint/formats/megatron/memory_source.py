"""A checkpoint in memory, of a small model with every kind of parameter, for the tests of what is written from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.checkpoint_source import TensorInfo
from megatron.checkpoint.formats.megatron.stage_parameters import StageDescriber
from megatron.core.config_base import config_to_dict
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.optimizer.optimizer_param_scheduler import ScheduleConfig
from megatron.core.sharding import Box

SMALL = GPTConfig(
    num_layers=4,
    hidden_size=24,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    ffn_hidden_size=40,
    vocab_size=61,
    make_vocab_size_divisible_by=8,
    max_position_embeddings=18,
    swiglu=True,
)


class MemorySource:
    """Offer random tensors of a model, and of its optimizer's state where ``has_optimizer``."""

    folder = Path("nowhere")

    def __init__(
        self, model: GPTConfig, *, has_optimizer: bool = True, distributed: bool = False, overlap: bool = False
    ) -> None:
        describer = StageDescriber(dataclasses.replace(model, tensor_model_parallel_size=1))
        parameters = describer.parameters(0, range(model.num_layers), has_embedding=True, has_loss=True)
        dtype = getattr(torch, model.params_dtype)
        generator = torch.Generator().manual_seed(7)
        self.values: dict[str, torch.Tensor] = {}
        for parameter in parameters:
            main = torch.randn(parameter.global_shape, generator=generator)
            self.values[f"model.{parameter.name}"] = main.to(dtype)
            if has_optimizer and parameter.is_trained:
                for kind in ("exp_avg", "exp_avg_sq"):
                    values = torch.randn(parameter.global_shape, generator=generator)
                    self.values[f"optimizer.{kind}.{parameter.name}"] = values
                if dtype is not torch.float32:
                    self.values[f"optimizer.main_param.{parameter.name}"] = main
        self.common: Mapping[str, Any] = _common(model, has_optimizer, distributed, overlap)
        self.tensors = {name: TensorInfo(tuple(v.shape), v.dtype) for name, v in self.values.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it."""
        values = self.values[name]
        return values if box is None else values[box.slices].contiguous()

    def close(self) -> None:
        """Do nothing: there is nothing open."""


def _common(model: GPTConfig, has_optimizer: bool, distributed: bool, overlap: bool) -> dict[str, Any]:
    schedule = ScheduleConfig(max_lr=3e-3, lr_warmup_steps=24, lr_decay_steps=80, lr_decay_style="cosine")
    scaler = {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2} if model.fp16 else {}
    return {
        "progress": {
            "iteration": 12,
            "consumed_train_samples": 96,
            "consumed_valid_samples": 8,
            "skipped_iterations": 1,
            "floating_point_operations_so_far": 1.5e9,
            "train_data": {"consumed_samples": 96, "phases": [{"weights": [0.1, 0.9]}]},
        },
        "config": {
            "model": config_to_dict(model),
            "training": {"micro_batch_size": 2, "global_batch_size": 8},
            "optimizer": {"lr": 3e-3, "params_dtype": model.params_dtype},
            "scheduler": {},
            "ddp": {
                "use_distributed_optimizer": distributed,
                "overlap_grad_reduce": overlap,
                "ddp_bucket_size": 2000 if overlap else None,
            },
            "data": {"seq_length": 18},
            "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 60},
            "validation": {},
            "checkpoint": {},
            "logging": {},
            "initialization": {"seed": 99},
        },
        "layout": {
            "tensor_model_parallel_size": model.tensor_model_parallel_size,
            "pipeline_model_parallel_size": model.pipeline_model_parallel_size,
            "context_parallel_size": 1,
            "data_parallel_size": 2,
            "world_size": 2 * model.parallel_sizes.world_size,
        },
        "optimizer": {"num_steps": 11, "grad_scaler": scaler} if has_optimizer else None,
        "scheduler": {"num_samples": 88, "schedule": config_to_dict(schedule)} if has_optimizer else None,
        "tokenizer": None,
    }
