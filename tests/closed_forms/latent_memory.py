"""What latent attention keeps for the backward pass, in bytes: narrow vectors, and heads padded to one width."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.transformer.decoder_config import DecoderConfig
from tests.closed_forms.kept_inputs import is_rounded
from tests.closed_forms.norm_memory import norm_numbers


def kept_by_latent_attention(
    config: DecoderConfig,
    tokens: int,
    rows: int,
    element: int,
    exchange: str,
    *,
    is_plain: bool = False,
    in_float8: bool = False,
) -> Mapping[str, int]:
    """Return by part what a layer keeps behind its first norm, that norm's output left out.

    ``tokens`` are those of the heads, ``rows`` those of the residual stream. ``exchange`` is that of context-parallel
    ranks, if there are several. ``is_plain`` says that norms are made of plain operations. What linear layers keep
    ``in_float8`` of their inputs is left out.
    """
    heads, wide = config.num_attention_heads // config.tensor_model_parallel_size, max(element, 4)
    width, values, modules = config.mla.latent_head_width, config.mla.v_head_dim, config.recomputed_modules
    has_core, is_copied = "core_attn" not in modules, exchange not in ("", "p2p")
    is_padded = values < width
    # Values that are not padded are a part of what keys and values come from.
    of_values = width if is_padded or is_copied else config.mla.qk_head_dim + values
    widened = tokens * heads * (2 * width + of_values) * element
    if is_copied and not has_core and not is_padded:
        widened = tokens * heads * (2 * width + config.mla.qk_head_dim + values) * element
    if "mla_up_proj" in modules and not (is_copied and has_core):
        widened = tokens * config.mla.qk_pos_emb_head_dim * element
    elif "mla_up_proj" in modules and exchange == "all_gather":
        # Keys and values are copied, queries are not.
        widened = tokens * (heads * 2 * width + config.mla.qk_pos_emb_head_dim) * element
    others = config.context_parallel_size - 1 if exchange == "all_gather" and has_core else 0
    is_kept = not (in_float8 and is_rounded(config, "linear_proj", tokens))
    outputs = width * has_core + values * (is_padded or is_copied or not has_core) * is_kept
    keeps_narrow = "mla_up_proj" in modules or not (in_float8 and is_rounded(config, "linear_kv_up_proj", rows))
    return {
        "narrow": rows * _narrow(config, element, is_plain=is_plain, keeps_inputs=keeps_narrow),
        "query, key, value": widened,
        "gathered keys and values": others * 2 * tokens * heads * width * element,
        "attention numbers": tokens * heads * wide * has_core,
        "attention output": outputs * tokens * heads * element,
    }


def _narrow(config: DecoderConfig, element: int, *, is_plain: bool, keeps_inputs: bool) -> int:
    """Return what is kept of a token's narrow vectors: that of queries, where they have their own, and the latent.

    ``keeps_inputs`` says that those from which heads are made are kept as they came.
    """
    of_queries, latent, rotary = config.mla.q_lora_rank or 0, config.mla.kv_lora_rank, config.mla.qk_pos_emb_head_dim
    if not config.qk_layernorm:
        return (of_queries + latent + rotary) * element * keeps_inputs
    wide, num_norms = max(element, 4), 1 + (of_queries > 0)
    numbers = num_norms * norm_numbers(config) * wide
    if is_plain:
        return (of_queries + latent) * (wide + (1 + keeps_inputs) * element) + numbers
    return ((1 + keeps_inputs) * (of_queries + latent) + rotary) * element + numbers
