"""Bounds of single values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.core.config_base import field_specs
from megatron.core.parallel_sizes import MODEL_SIZE_NAMES
from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig

POSITIVE = frozenset(
    [
        *MODEL_SIZE_NAMES,
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "norm_epsilon",
        "recompute_num_layers",
        "make_vocab_size_divisible_by",
        "rotary_base",
        "rotary_seq_len_interpolation_factor",
        "rope_scaling_factor",
        "rope_scaling_low_freq_factor",
        "rope_scaling_high_freq_factor",
        "rope_scaling_original_max_position_embeddings",
        "micro_batch_size",
        "exit_interval",
        "check_weight_hash_across_dp_replicas_interval",
        "exit_duration_in_mins",
        "adam_eps",
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "ddp_bucket_size",
        "vocab_size",
        "save_interval",
        "keep_last",
        "keep_every",
        "log_interval",
        "tensorboard_log_interval",
        "tensorboard_queue_size",
        "distributed_timeout_minutes",
    ]
)
NOT_NEGATIVE = frozenset(
    [
        "ffn_hidden_size",
        "kv_channels",
        "global_batch_size",
        "train_iters",
        "train_samples",
        "manual_gc_interval",
        "init_method_std",
        "max_position_embeddings",
        "lr",
        "min_lr",
        "weight_decay",
        "clip_grad",
        "sgd_momentum",
        "eval_interval",
        "eval_iters",
        "num_workers",
        "seq_length",
        "vocab_extra_ids",
        "extra_vocab_size",
        "tiktoken_num_special_tokens",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_init",
        "start_weight_decay",
        "end_weight_decay",
        "ckpt_step",
        "seed",
        "local_rank",
    ]
)
FRACTION_BELOW_ONE = frozenset(
    ["hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "lr_warmup_fraction"]
)

_MAX_SEED = 2**32 - 1


def _check_bounds(config: RunConfig) -> Iterator[str]:
    """Report each value outside its bounds."""
    for part in dataclasses.fields(config):
        section = getattr(config, part.name)
        if part.name == "world_size":
            continue
        config_class: type = type(section)
        for spec in field_specs(config_class):
            value = getattr(section, spec.name)
            if not spec.options.cli or value is None or spec.is_sequence:
                continue
            if spec.name in POSITIVE and value <= 0:
                yield f"{spec.flags[0]} {value}: a value greater than 0 is expected"
            elif spec.name in NOT_NEGATIVE and value < 0:
                yield f"{spec.flags[0]} {value}: a value of 0 or more is expected"
            elif spec.name in FRACTION_BELOW_ONE and not 0 <= value < 1:
                yield f"{spec.flags[0]} {value}: a value from 0 to below 1 is expected"


def _check_seed(config: RunConfig) -> Iterator[str]:
    seed = config.initialization.seed
    if seed > _MAX_SEED:
        yield f"--seed {seed}: NumPy takes seeds up to {_MAX_SEED}"


def _check_memory_level(config: RunConfig) -> Iterator[str]:
    level = config.training.empty_unused_memory_level
    if level not in (0, 1, 2):
        yield f"--empty-unused-memory-level {level}: possible values are 0, 1, 2"


CHECKS = (
    Check((), _check_bounds),
    Check(("seed",), _check_seed),
    Check(("empty_unused_memory_level",), _check_memory_level),
)
