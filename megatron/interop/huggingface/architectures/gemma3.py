"""Gemma 3 for text: Gemma 2 with normalized heads, five windows to one full layer, and a rotary base for each kind."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.architectures.gemma2 import Gemma2Family
from megatron.interop.huggingface.decoder_parts.layer_types import FULL, SLIDING
from megatron.interop.huggingface.decoder_parts.rope import read_frequencies, whole_base
from megatron.interop.huggingface.settings import Settings


class Gemma3Family(Gemma2Family):
    """Translate the language model of Gemma 3 (``Gemma3ForCausalLM``)."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    default_positions = 131072
    window_period = 6
    default_attention_cap = None
    default_logit_cap = None

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return what Gemma 2 has, the norms of the heads and the base of the layers with a window."""
        settings.require("attn_logit_softcapping", None, None, "transformers does not apply it in this family")
        fields = super().own_fields(settings) | {"qk_layernorm": True}
        if "window_size" in fields:
            base = settings.number("rope_local_base_freq", 10000.0)
            newer = _rope_of(settings, SLIDING)
            if newer is not None:
                newer.require("rope_type", "default", "default", "layers with a window have plain frequencies")
                base = newer.number("rope_theta", base)
            fields["rotary_base_local"] = whole_base(settings, base, "the rope_theta of layers with a window")
        return fields

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the fields of the rotary positions of layers without a window."""
        scaling, older = _rope_of(settings, FULL), settings.inner("rope_scaling")
        if older is not None:
            # If a folder has both, `rope_scaling` overrides `rope_parameters`.
            newer = {} if scaling is None else scaling.values
            scaling = Settings({**newer, **older.values}, older.place, settings.problems)
        return read_frequencies(settings, scaling, positions, settings.number("rope_theta", 1e6))

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        base = config.rotary_base if config.rotary_base_local is None else config.rotary_base_local
        return super().write_settings(config) | {"rope_local_base_freq": float(base)}


def _rope_of(settings: Settings, kind: str) -> Settings | None:
    """Return the newer form's object for one kind of layer, if there is one."""
    both = settings.inner("rope_parameters")
    return None if both is None else both.inner(kind)
