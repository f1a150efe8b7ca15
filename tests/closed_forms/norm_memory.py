"""What norms beside the one in front of each branch keep for the backward pass, in bytes.

These are the norms behind attention and feed-forward, and those of queries and keys. A fused norm keeps its input and
a number or two for each vector; one of plain operations keeps its input in float32, and what it is before its weight,
unless that weight is frozen.
"""

from __future__ import annotations

from megatron.core.transformer.decoder_config import DecoderConfig


def norm_numbers(config: DecoderConfig) -> int:
    """Return how many numbers a norm keeps of each vector: a scale, and a mean where it is subtracted."""
    return 2 if config.normalization == "LayerNorm" else 1


def reads_frozen(config: DecoderConfig, layer_number: int | None) -> bool:
    """Return whether a layer's first norm keeps nothing: its input is a frozen embedding, and wants no gradient."""
    is_first = layer_number == 0 and bool(config.lora_rank) and config.norm_placement != "post"
    return is_first and "linear_qkv" in config.adapted_parts


def before_weight(config: DecoderConfig, element: int) -> int:
    """Return the bytes that a norm of plain operations keeps of a number for the gradient of its weight."""
    return 0 if config.lora_rank else element


def kept_behind(config: DecoderConfig, rows: int, element: int, *, is_plain: bool = False) -> int:
    """Return what a layer's norms behind attention and feed-forward keep of ``rows`` of the residual stream.

    ``is_plain`` says that the norm is made of plain operations.
    """
    if config.norm_placement == "pre":
        return 0
    kept = (max(element, 4) + before_weight(config, element)) if is_plain else element
    return 2 * rows * (config.hidden_size * kept + norm_numbers(config) * max(element, 4))


def kept_by_head_norms(
    config: DecoderConfig, heads: int, groups: int, element: int, *, is_plain: bool, is_copied: bool
) -> int:
    """Return what a layer keeps of each token because queries and keys are normalized; 0 where they are not.

    The projection's output stays whole, as values are a part of it, unless ``is_copied`` says that an exchange has
    copied them, or they are normalized; a fused norm of keys needs it in any case, and has a copy of queries where
    several share a key.
    """
    if not config.qk_layernorm or config.mla.multi_latent_attention:
        return 0
    wide, queries, keys = max(element, 4), heads * config.kv_channels, groups * config.kv_channels
    if config.qk_layernorm_across_heads or is_plain:
        vectors = 2 if config.qk_layernorm_across_heads else heads + groups
        unchanged = 0 if is_copied or config.v_layernorm else (queries + keys) * element
        return unchanged + (queries + keys) * (wide + before_weight(config, element)) + vectors * wide
    unchanged = queries + keys * (2 if is_copied else 1) + queries * (heads > groups)
    return unchanged * element + (heads + groups) * norm_numbers(config) * wide
