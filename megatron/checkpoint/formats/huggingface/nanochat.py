"""nanochat: RMSNorm without weights, also after the embedding, QK norms, squared ReLU and softcapped logits.

Its RoPE rotates in the opposite direction, which equals ours if the two halves of each query and key are exchanged. It
normalizes queries and keys after RoPE. Without weights, the order makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    RotaryDecoderFamily,
    qkv_parameters,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, query_key_value_rows, rows
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class NanoChatFamily(RotaryDecoderFamily):
    """nanochat (``NanoChatForCausalLM``)."""

    model_type = "nanochat"
    architecture = "NanoChatForCausalLM"
    default_positions = 2048
    activation = ("hidden_act", "relu2", "squared_relu")
    mlp_names = ("fc1", "fc2")
    norm_names = ()
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and softcapping."""
        return {
            "norm_parameters": "none",
            "add_embedding_norm": True,
            "qk_layernorm": True,
            "final_logit_softcapping": settings.positive_or_none("final_logit_softcapping", 15.0),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {
            "final_logit_softcapping": config.final_logit_softcapping,
            "pad_token_id": None,
        }

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's QKV projections; the halves of queries and keys are exchanged."""
        half = config.kv_channels // 2
        fused = list(query_key_value_rows(config.num_attention_heads, config.num_query_groups, config.kv_channels))
        for kind, trailing in qkv_parameters(config):
            native = f"{ours}self_attention.linear_qkv.{kind}"
            for part, start, their_start, count in fused:
                foreign = f"{theirs}self_attn.{part}_proj.{kind}"
                if part == "v":
                    yield rows(native, start, foreign, their_start, count, trailing)
                    continue
                for row in range(0, count, half):
                    other = row + half if row // half % 2 == 0 else row - half
                    yield rows(native, start + row, foreign, their_start + other, half, trailing)
