"""MPT: ALiBi, LayerNorm without biases, exact GELU, clipped queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.checkpoint.formats.huggingface.decoder_layers import STACKED_QKV
from megatron.checkpoint.formats.huggingface.named_decoder import NamedDecoderFamily, SettingField
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class MptFamily(NamedDecoderFamily):
    """MPT (``MptForCausalLM``), whose files have all queries, all keys and all values in one tensor."""

    model_type = "mpt"
    architecture = "MptForCausalLM"
    setting_fields = (
        SettingField("vocab_size", "vocab_size", 50368),
        SettingField("d_model", "hidden_size", 2048, alias="hidden_size"),
        SettingField("n_layers", "num_layers", 24, alias="num_hidden_layers"),
        SettingField("n_heads", "num_attention_heads", 16, alias="num_attention_heads"),
        SettingField("max_seq_len", "max_position_embeddings", 2048),
        SettingField("layer_norm_epsilon", "norm_epsilon", 1e-5),
        SettingField("initializer_range", "init_method_std", 0.02),
    )
    fixed_fields: ClassVar[Mapping[str, Any]] = {
        "position_embedding_type": "alibi",
        "norm_parameters": "weight",
        "add_bias_linear": False,
        "bias_gelu_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    embeddings = (("word_embeddings", "wte"),)
    layers = "blocks"
    layer_names = (
        ("input_layernorm", "norm_1"),
        (STACKED_QKV, "attn.Wqkv"),
        ("self_attention.linear_proj", "attn.out_proj"),
        ("pre_mlp_layernorm", "norm_2"),
        ("mlp.linear_fc1", "ffn.up_proj"),
        ("mlp.linear_fc2", "ffn.down_proj"),
    )
    final_norm = "norm_f"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of attention; reject what MPT's own code computes differently from transformers."""
        settings.require("expansion_ratio", 4, 4, "transformers ignores it")
        settings.require("no_bias", True, True, "transformers ignores it")
        settings.require("logit_scale", None, None, "transformers ignores it")
        if settings.number("embedding_fraction", 1.0) != 1.0:
            settings.refuse("embedding_fraction is not 1; transformers ignores it")
        norm = settings.text("norm_type", "layernorm")
        if norm not in ("layernorm", "low_precision_layernorm"):
            settings.refuse(f"norm_type is {norm!r}, but transformers ignores it and uses layernorm")
        for name in ("emb_pdrop", "resid_pdrop"):
            settings.require_zero(name, "transformers ignores it")
        attention = settings.inner("attn_config") or Settings({}, settings.place, settings.problems)
        attention.require("attn_type", *("multihead_attention",) * 2, "every head has keys and values of its own")
        attention.require("alibi", True, True, "transformers ignores it")
        attention.require("alibi_bias_max", 8, 8, "transformers ignores it")
        for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
            attention.require(name, False, False, "transformers ignores it")
        attention.require_zero("attn_pdrop", "the embeddings would have dropout too")
        return {
            "clip_qkv": attention.number("clip_qkv", 0.0) or None,
            "softmax_scale": attention.positive_or_none("softmax_scale", None),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        scale = None if config.score_scale == config.kv_channels**-0.5 else config.score_scale
        return super().write_settings(config) | {"attn_config": {"clip_qkv": config.clip_qkv, "softmax_scale": scale}}
