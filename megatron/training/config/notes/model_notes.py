"""What a run says of its model: which attention it takes, what has no effect there, and how experts are chosen."""

from __future__ import annotations

from megatron.training.config.notes.float8_speed import float8_notes
from megatron.training.config.run_config import RunConfig


def model_notes(config: RunConfig) -> list[str]:
    """Return the lines."""
    return [
        *_attention_notes(config),
        *_level_notes(config),
        *_window_notes(config),
        *_routing_notes(config),
        *float8_notes(config),
    ]


def _attention_notes(config: RunConfig) -> list[str]:
    model = config.model
    if model.attention_backend != "flash":
        return []
    if config.data.reset_attention_mask:
        return ["flash-attn is not used with packed documents: --reset-attention-mask takes torch's own attention"]
    if model.context_parallel_size > 1 and (rings := {"p2p", "a2a+p2p"} & {*model.cp_comm_type}):
        name = max(rings)
        return [f"flash-attn is not used with --cp-comm-type {name}: blocks that are merged take torch's own attention"]
    return []


def _level_notes(config: RunConfig) -> list[str]:
    sizes = config.model.hierarchical_context_parallel_sizes
    if not sizes or "a2a+p2p" in config.model.cp_comm_type:
        return []
    given = " ".join(map(str, sizes))
    return [f"--hierarchical-context-parallel-sizes {given} has no effect without --cp-comm-type a2a+p2p"]


def _window_notes(config: RunConfig) -> list[str]:
    model = config.model
    try:
        is_idle = model.window_size is not None and not any(model.layer_windows)
    except ValueError:
        return []  # The checks say what is wrong.
    if not is_idle:
        return []
    pattern = model.window_attn_skip_freq
    return [f"--window-size {model.window_size} has no effect: --window-attn-skip-freq {pattern} gives it to no layer"]


def _routing_notes(config: RunConfig) -> list[str]:
    if not config.model.routes_at_random:
        return []
    return [
        "--moe-router-force-load-balancing chooses experts by random numbers, so that their load is even: the model "
        "does not learn its routing, and what is trained so is for measurements only"
    ]
