"""Apertus: Llama's layers with xIELU in the MLP, QK norms per head, and Llama 3's RoPE scaling by default."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    RotaryDecoderFamily,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.rope import read_rope, with_default_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box

_UNSAID_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""RoPE scaling of files without one."""


class ApertusFamily(RotaryDecoderFamily):
    """Apertus (``ApertusForCausalLM``)."""

    model_type = "apertus"
    architecture = "ApertusForCausalLM"
    default_positions = 65536
    default_epsilon = 1e-5
    default_rotary_base = 12000000.0
    activation = ("hidden_act", "xielu", "xielu")
    mlp_names = ("up_proj", "down_proj")
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})
    norm_names = (("input_layernorm", "attention_layernorm"), ("pre_mlp_layernorm", "feedforward_layernorm"))

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields."""
        return read_rope(with_default_rope(settings, _UNSAID_ROPE), positions, self.default_rotary_base)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QK norms."""
        return {"qk_layernorm": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model, with an explicit type of unscaled RoPE."""
        settings = super().write_settings(config)
        scaling = settings["rope_scaling"] or {"rope_type": "default"}
        return settings | {"pad_token_id": None, "rope_scaling": scaling}

    def fc1_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of the up projection, and of xIELU's slopes and constants."""
        yield from super().fc1_links(config, ours, theirs)
        ours, theirs = f"{ours}mlp.activation.", f"{theirs}mlp.act_fn."
        for name in ("alpha_p", "alpha_n"):
            yield whole(f"{ours}{name}", f"{theirs}{name}", (1,))
        for name in ("beta", "eps"):
            yield TensorLink(f"{ours}{name}", Box((0,), (1,)), f"{theirs}{name}", Box((), ()))
