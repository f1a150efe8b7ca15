"""StarCoder2: LayerNorm, RoPE, GQA, biases in every linear layer, and an MLP without a gate."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    window_fields,
    window_of_all_layers,
)
from megatron.checkpoint.formats.huggingface.family import dropout_fields
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Starcoder2Family(RotaryDecoderFamily):
    """StarCoder2 (``Starcoder2ForCausalLM``), with a sliding window in all layers or none."""

    model_type = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    default_positions = 4096
    default_groups = 2
    default_epsilon = 1e-5
    is_tied_by_default = True
    activation = ("hidden_act", "gelu_pytorch_tanh", "gelu")
    epsilon_name = "norm_epsilon"
    mlp_names = ("c_fc", "c_proj")

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms, biases, dropout, initialization and the sliding window."""
        has_window = settings.values.get("sliding_window") is not None
        return {
            "normalization": "LayerNorm",
            "add_bias_linear": settings.switch("use_bias", True),
            **dropout_fields(settings, "residual_dropout", "embedding_dropout", 0.0),
            "init_method_std": settings.number("initializer_range", 0.018042),
            **window_fields(settings, [has_window] * settings.integer("num_hidden_layers"), None),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "embedding_dropout": config.dropout_of_embeddings,
            "residual_dropout": config.hidden_dropout,
            "sliding_window": window_of_all_layers(config),
            "use_bias": config.add_bias_linear,
        }
