"""GPT-2: learned positions, LayerNorm, biases everywhere, linear weights stored as ``[in, out]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.family import dtype_fields
from megatron.interop.huggingface.settings import Settings
from megatron.interop.huggingface.tensor_link import TensorLink, query_key_value_rows, rows, whole

_BUFFER = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)")

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu_new": {"bias_gelu_fusion": True},
    "gelu_pytorch_tanh": {"bias_gelu_fusion": True},
    "gelu": {"bias_gelu_fusion": False},
    "relu2": {"squared_relu": True},
}
"""Their names of the activations of a feed-forward layer that is not gated."""
_WRITTEN_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "squared_relu": "relu2"}


def read_activation(settings: Settings, name: str, default: str) -> dict[str, Any]:
    """Return the fields of a GPTConfig that stand for the activation in the setting ``name``."""
    activation = settings.text(name, default)
    if activation not in ACTIVATIONS:
        settings.refuse(f"{name} {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(activation, {})


def written_activation(config: GPTConfig) -> str:
    """Return the transformers name of the activation.

    Unsupported activations become gelu_new, and the folder then describes another model.
    """
    return _WRITTEN_ACTIVATIONS.get(config.activation, "gelu_new")


class GPT2Family:
    """Translate GPT-2 (``GPT2LMHeadModel``)."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    base_prefix = "transformer."

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model that the settings describe."""
        width = settings.integer("n_embd", 768)
        heads = settings.integer("n_head", 12)
        if width % heads:
            settings.refuse(f"n_embd {width} is not divisible by n_head {heads}")
        settings.require("scale_attn_weights", True, True, "attention is scaled by the root of the head's width")
        settings.require("scale_attn_by_inverse_layer_idx", False, False, "attention is scaled alike in every layer")
        settings.require("add_cross_attention", False, False, "there is no encoder to attend to")
        return GPTConfig(
            num_layers=settings.integer("n_layer", 12),
            hidden_size=width,
            num_attention_heads=heads,
            ffn_hidden_size=settings.integer("n_inner", 4 * width),
            norm_epsilon=settings.number("layer_norm_epsilon", 1e-5),
            hidden_dropout=settings.number("resid_pdrop", 0.1),
            attention_dropout=settings.number("attn_pdrop", 0.1),
            init_method_std=settings.number("initializer_range", 0.02),
            vocab_size=settings.integer("vocab_size", 50257),
            max_position_embeddings=settings.integer("n_positions", 1024),
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", True),
            **read_activation(settings, "activation_function", "gelu_new"),
            **dtype_fields(settings),
        )

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "activation_function": written_activation(config),
            "attn_pdrop": config.attention_dropout,
            "embd_pdrop": config.hidden_dropout,
            "initializer_range": config.init_method_std,
            "layer_norm_epsilon": config.norm_epsilon,
            "n_embd": config.hidden_size,
            "n_head": config.num_attention_heads,
            "n_inner": None if config.ffn_hidden_size == 4 * config.hidden_size else config.ffn_hidden_size,
            "n_layer": config.num_layers,
            "n_positions": config.max_position_embeddings,
            "resid_pdrop": config.hidden_dropout,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "vocab_size": config.vocab_size,
        }

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Return every link, in the order of the tensors in their model."""
        width, prefix = config.hidden_size, self.base_prefix
        embedding = "model.embedding.word_embeddings.weight"
        positions = "model.embedding.position_embeddings.weight"
        yield whole(embedding, f"{prefix}wte.weight", (config.vocab_size, width))
        yield whole(positions, f"{prefix}wpe.weight", (config.max_position_embeddings, width))
        for layer in range(config.num_layers):
            yield from self._layer_links(config, f"model.decoder.layers.{layer}.", f"{prefix}h.{layer}.")
        yield from _both("model.decoder.final_layernorm", f"{prefix}ln_f", (width,))
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "lm_head.weight", (config.vocab_size, width))

    def is_buffer(self, name: str) -> bool:
        """Return whether this is a causal mask that older files hold."""
        return _BUFFER.fullmatch(name) is not None

    def _layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        width = config.hidden_size
        yield from _both(f"{ours}input_layernorm", f"{theirs}ln_1", (width,))
        fused = list(query_key_value_rows(config.num_attention_heads, config.num_query_groups, config.kv_channels))
        starts = {"q": 0, "k": width, "v": 2 * width}
        for kind, trailing in (("weight", (width,)), ("bias", ())):
            for part, native_start, part_start, count in fused:
                yield rows(
                    f"{ours}self_attention.linear_qkv.{kind}",
                    native_start,
                    f"{theirs}attn.c_attn.{kind}",
                    starts[part] + part_start,
                    count,
                    trailing,
                    is_transposed=True,
                )
        yield from _linear(f"{ours}self_attention.linear_proj", f"{theirs}attn.c_proj", (width, width))
        yield from _both(f"{ours}pre_mlp_layernorm", f"{theirs}ln_2", (width,))
        yield from _linear(f"{ours}mlp.linear_fc1", f"{theirs}mlp.c_fc", (config.ffn_hidden_size, width))
        yield from _linear(f"{ours}mlp.linear_fc2", f"{theirs}mlp.c_proj", (width, config.ffn_hidden_size))


def _both(native: str, foreign: str, shape: tuple[int, ...]) -> Iterator[TensorLink]:
    for kind in ("weight", "bias"):
        yield whole(f"{native}.{kind}", f"{foreign}.{kind}", shape)


def _linear(native: str, foreign: str, shape: tuple[int, int]) -> Iterator[TensorLink]:
    yield whole(f"{native}.weight", f"{foreign}.weight", shape, is_transposed=True)
    yield whole(f"{native}.bias", f"{foreign}.bias", shape[:1])
