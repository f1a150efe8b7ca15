"""GPT-BigCode: GPT-2 with multi-query attention, and linear weights stored as ``[out, in]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.gpt import GPT2Family
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class GPTBigCodeFamily(GPT2Family):
    """SantaCoder and StarCoder (``GPTBigCodeForCausalLM``), whose fused QKV rows have the native order."""

    model_type = "gpt_bigcode"
    architecture = "GPTBigCodeForCausalLM"
    default_activation = "gelu_pytorch_tanh"
    is_transposed = False

    def own_fields(self, settings: Settings, config: GPTConfig) -> dict[str, Any]:
        """Return the fields of attention; reject what the layers do not have here."""
        settings.require("add_cross_attention", False, False, "cross-attention is not supported")
        is_shared = settings.switch("multi_query", True)
        return {
            "group_query_attention": is_shared,
            "num_query_groups": 1 if is_shared else config.num_attention_heads,
            "softmax_scale": None if settings.switch("scale_attn_weights", True) else 1.0,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "multi_query": config.num_query_groups == 1,
            "scale_attn_weights": config.score_scale != 1.0,
        }

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's fused QKV projection."""
        fused, ours = config.query_projection_size + 2 * config.kv_projection_size, f"{ours}self_attention.linear_qkv"
        yield whole(f"{ours}.weight", f"{theirs}attn.c_attn.weight", (fused, config.hidden_size))
        yield whole(f"{ours}.bias", f"{theirs}attn.c_attn.bias", (fused,))
