"""FLOPs of a training step: those that a model needs, and those that Megatron-LM counts for its TFLOP/s."""

from __future__ import annotations

import dataclasses
import functools

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.planner.plan import Plan


def megatron_step_flops(plan: Plan) -> float:
    """Return the operations of a step as Megatron counts them for its TFLOP/s: attention as if all looked at all."""
    return plan.global_batch_size * _megatron_flops(plan.model, plan.seq_length)


def step_flops(plan: Plan) -> float:
    """Return the operations of a step that a model needs, of attention those that are used."""
    return 3.0 * plan.global_batch_size * _forward_flops(plan.model, plan.seq_length)


# A search asks for the same models thousands of times.
@functools.lru_cache(maxsize=64)
def _forward_flops(model: GPTConfig, s: int) -> float:
    return model.forward_flops_per_sequence(s)


@functools.lru_cache(maxsize=64)
def _megatron_flops(model: GPTConfig, s: int) -> float:
    causal = dataclasses.replace(model, window_size=None, window_attn_skip_freq=None) if model.window_size else model
    of_scores = 2 * model.query_projection_size
    if model.multi_latent_attention:
        of_scores = model.num_attention_heads * (model.latent_query_width + model.v_head_dim)
    unused_half = 1.0 * s * s * of_scores * (model.num_layers + model.num_further_tokens)
    return 3.0 * (_forward_flops(causal, s) + unused_half)
