"""BLOOM: ALiBi, LayerNorm also of the embeddings, biases everywhere, tanh GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.checkpoint.formats.huggingface.named_decoder import NamedDecoderFamily, SettingField
from megatron.checkpoint.formats.huggingface.settings import Settings


class BloomFamily(NamedDecoderFamily):
    """BLOOM (``BloomForCausalLM``), whose fused QKV rows have the native order."""

    model_type = "bloom"
    architecture = "BloomForCausalLM"
    setting_fields = (
        SettingField("vocab_size", "vocab_size", 250880),
        SettingField("hidden_size", "hidden_size", 64, alias="n_embed"),
        SettingField("n_layer", "num_layers", 2, alias="num_hidden_layers"),
        SettingField("n_head", "num_attention_heads", 8, alias="num_attention_heads"),
        SettingField("seq_length", "max_position_embeddings", 2048),
        SettingField("layer_norm_epsilon", "norm_epsilon", 1e-5),
        SettingField("initializer_range", "init_method_std", 0.02),
        SettingField("attention_dropout", "attention_dropout", 0.0),
        SettingField("hidden_dropout", "hidden_dropout", 0.0),
        SettingField(*("apply_residual_connection_post_layernorm",) * 2, False),
    )
    fixed_fields: ClassVar[Mapping[str, Any]] = {
        "position_embedding_type": "alibi",
        "add_embedding_norm": True,
        "embedding_dropout": 0.0,
    }
    embeddings = (("word_embeddings", "word_embeddings"), ("norm", "word_embeddings_layernorm"))
    layers = "h"
    layer_names = (
        ("input_layernorm", "input_layernorm"),
        ("self_attention.linear_qkv", "self_attention.query_key_value"),
        ("self_attention.linear_proj", "self_attention.dense"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
        ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
        ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    )
    final_norm = "ln_f"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return no fields; reject ``slow_but_exact``, which leaves biases out."""
        settings.require("slow_but_exact", False, False, "it leaves biases out")
        return {}
