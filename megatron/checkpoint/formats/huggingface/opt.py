"""OPT: learned positions from row 2 on, LayerNorm, biases everywhere, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.checkpoint.formats.huggingface.gpt import read_activation, written_activation
from megatron.checkpoint.formats.huggingface.named_decoder import NamedDecoderFamily, SettingField
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class OptFamily(NamedDecoderFamily):
    """OPT with norms before attention and feed-forward (``OPTForCausalLM``): all sizes but 350M."""

    model_type = "opt"
    architecture = "OPTForCausalLM"
    base_prefix = "model."
    setting_fields = (
        SettingField("vocab_size", "vocab_size", 50272),
        SettingField("hidden_size", "hidden_size", 768),
        SettingField("num_hidden_layers", "num_layers", 12),
        SettingField("num_attention_heads", "num_attention_heads", 12),
        SettingField("ffn_dim", "ffn_hidden_size", 3072),
        SettingField("max_position_embeddings", "max_position_embeddings", 2048),
        SettingField("dropout", "hidden_dropout", 0.1),
        SettingField("attention_dropout", "attention_dropout", 0.0),
        SettingField("init_std", "init_method_std", 0.02),
        SettingField("enable_bias", "add_bias_linear", True),
    )
    fixed_fields: ClassVar[Mapping[str, Any]] = {"position_embedding_offset": 2, "norm_epsilon": 1e-5}
    embeddings = (("word_embeddings", "decoder.embed_tokens"), ("position_embeddings", "decoder.embed_positions"))
    final_norm = "decoder.final_layer_norm"
    layers = "decoder.layers"
    layer_names = (
        ("self_attention.linear_qkv", "self_attn.{}_proj"),
        ("self_attention.linear_proj", "self_attn.out_proj"),
        ("input_layernorm", "self_attn_layer_norm"),
        ("mlp.linear_fc1", "fc1"),
        ("mlp.linear_fc2", "fc2"),
        ("pre_mlp_layernorm", "final_layer_norm"),
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of activation and norms; reject OPT-350M's projections and norms."""
        width = settings.integer("hidden_size", 768)
        settings.require("word_embed_proj_dim", width, width, "projections of embeddings are not supported")
        settings.require("do_layer_norm_before", True, True, "norms after the residual sum are not supported")
        settings.require("_remove_final_layer_norm", False, False, "a final norm is always there")
        settings.require_zero("layerdrop", "no layers are left out in training")
        has_parameters = settings.switch("layer_norm_elementwise_affine", True)
        return {
            "norm_parameters": "all" if has_parameters else "none",
            **read_activation(settings, "activation_function", "relu"),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "activation_function": written_activation(config),
            "layer_norm_elementwise_affine": config.norm_parameters == "all",
        }
