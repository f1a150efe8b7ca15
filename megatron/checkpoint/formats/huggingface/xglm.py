"""XGLM: sinusoidal positions, scaled embeddings, LayerNorm, biases everywhere, GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron.checkpoint.formats.huggingface.gpt import read_activation, written_activation
from megatron.checkpoint.formats.huggingface.named_decoder import NamedDecoderFamily, SettingField
from megatron.checkpoint.formats.huggingface.opt import OptFamily
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class XglmFamily(NamedDecoderFamily):
    """XGLM (``XGLMForCausalLM``)."""

    model_type = "xglm"
    architecture = "XGLMForCausalLM"
    base_prefix = "model."
    setting_fields = (
        SettingField("vocab_size", "vocab_size", 256008),
        SettingField("d_model", "hidden_size", 1024, alias="hidden_size"),
        SettingField("num_layers", "num_layers", 24, alias="num_hidden_layers"),
        SettingField("attention_heads", "num_attention_heads", 16, alias="num_attention_heads"),
        SettingField("ffn_dim", "ffn_hidden_size", 4096),
        SettingField("max_position_embeddings", "max_position_embeddings", 2048),
        SettingField("dropout", "hidden_dropout", 0.1),
        SettingField("attention_dropout", "attention_dropout", 0.1),
        SettingField("init_std", "init_method_std", 0.02),
        SettingField("scale_embedding", "scale_embeddings", True),
    )
    fixed_fields: ClassVar[Mapping[str, Any]] = {
        "position_embedding_type": "sinusoidal",
        "position_embedding_offset": 2,
        "norm_epsilon": 1e-5,
    }
    embeddings = (("word_embeddings", "embed_tokens"),)
    layers = "layers"
    layer_names = OptFamily.layer_names
    final_norm = "layer_norm"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the activation; reject cross-attention and further kinds of dropout."""
        settings.require("add_cross_attention", False, False, "cross-attention is not supported")
        settings.require_zero("activation_dropout", "activations have no dropout")
        settings.require_zero("layerdrop", "no layers are left out in training")
        padding = settings.values.get("pad_token_id", 1)
        if padding not in (None, 0, 1):
            settings.refuse(f"pad_token_id is {padding!r}; 0, 1 or null is expected, since its position would be empty")
        return read_activation(settings, "activation_function", "gelu")

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {"activation_function": written_activation(config)}
