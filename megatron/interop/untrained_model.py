"""What a checkpoint of a model says beside its tensors where no run has begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config_base import config_to_dict
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.parallel_sizes import ONE_RANK


def untrained_common(config: GPTConfig, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``common`` of a model at iteration 0; ``tokenizer`` holds the flags that build its tokenizer."""
    length = config.max_position_embeddings
    return {
        "progress": {
            "iteration": 0,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "skipped_iterations": 0,
            "floating_point_operations_so_far": 0,
        },
        "config": {
            "model": config_to_dict(config),
            "training": {"micro_batch_size": 1},
            "optimizer": {},
            "scheduler": {},
            "ddp": {},
            "data": {"seq_length": length},
            "tokenizer": dict(tokenizer),
            "validation": {},
            "checkpoint": {},
            "logging": {},
            "initialization": {},
            "world_size": 1,
        },
        "layout": ONE_RANK.record(),
        "optimizer": None,
        "scheduler": None,
        "tokenizer": None,
    }
