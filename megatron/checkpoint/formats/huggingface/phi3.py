"""Phi-3: Llama's layers with fused projections, partial RoPE, LongRoPE, and a sliding window in all layers or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    window_fields,
    window_of_all_layers,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, dropout_fields, query_key_value_rows, rows, whole
from megatron.checkpoint.formats.huggingface.rope import long_rope_growth, read_partial_rope, rope_object
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_LONG_ROPE = ("longrope", "su", "yarn")
"""Names of LongRoPE in published folders, also of its first release."""
_ORIGINAL = "original_max_position_embeddings"


class Phi3Family(RotaryDecoderFamily):
    """Phi-3 (``Phi3ForCausalLM``)."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    default_positions = 4096
    default_epsilon = 1e-5

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the sliding window and hidden dropout."""
        has_window = settings.values.get("sliding_window") is not None
        windows = window_fields(settings, [has_window] * settings.integer("num_hidden_layers"), None)
        return windows | dropout_fields(settings, "resid_pdrop", "embd_pdrop", 0.0)

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with LongRoPE under all of its names; reject other scaling."""
        scaling = rope_object(settings)
        kind = None if scaling is None else scaling.values.get("rope_type", scaling.values.get("type", "default"))
        if scaling is not None and kind in _LONG_ROPE:
            original = settings.integer(_ORIGINAL, self.default_positions)
            longer = {**scaling.values, "rope_type": "longrope"}
            settings = settings.replaced({"rope_scaling": longer, _ORIGINAL: original})
        elif kind not in (None, "default"):
            settings.refuse(f"rope_type {kind!r} is not supported in {self.model_type}; use default or longrope")
            return {}
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 1.0)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings, original = super().write_settings(config), config.longrope_length
        if original is not None:
            scaling, growth = settings["rope_scaling"], config.max_position_embeddings / original
            # transformers 4 accepts these three keys only.
            if config.longrope_attention_factor == long_rope_growth(growth, original):
                scaling = {"type": "longrope"} | {name: scaling[name] for name in ("short_factor", "long_factor")}
            settings["rope_scaling"] = scaling
        return settings | {
            "embd_pdrop": config.dropout_of_embeddings,
            _ORIGINAL: config.max_position_embeddings if original is None else original,
            "pad_token_id": None,
            "partial_rotary_factor": config.rotary_percent,
            "resid_pdrop": config.hidden_dropout,
            "sliding_window": window_of_all_layers(config),
        }

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of the fused QKV projection: all queries, keys and values."""
        width, queries, keys = config.hidden_size, config.query_projection_size, config.kv_projection_size
        starts = {"q": 0, "k": queries, "v": queries + keys}
        native, foreign = f"{ours}self_attention.linear_qkv.weight", f"{theirs}self_attn.qkv_proj.weight"
        fused = query_key_value_rows(config.num_attention_heads, config.num_query_groups, config.kv_channels)
        for part, native_start, start, count in fused:
            yield rows(native, native_start, foreign, starts[part] + start, count, (width,))

    def fc1_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the link of gate and up, which are one tensor."""
        gated = (2 * config.ffn_hidden_size, config.hidden_size)
        yield whole(f"{ours}mlp.linear_fc1.weight", f"{theirs}mlp.gate_up_proj.weight", gated)
