"""GPT-NeoX and Pythia: parallel residuals, partly rotated heads, LayerNorm, biases everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.architectures.gpt2 import read_activation, written_activation
from megatron.interop.huggingface.decoder_parts.rope import read_partial_rope, write_rope
from megatron.interop.huggingface.family import dtype_fields
from megatron.interop.huggingface.settings import Settings
from megatron.interop.huggingface.tensor_link import TensorLink, whole

_BUFFER = re.compile(
    r"(?:gpt_neox\.)?(?:layers\.\d+\.attention\.(?:bias|masked_bias)|"
    r"(?:layers\.\d+\.attention\.)?rotary_emb\.inv_freq)"
)


class GPTNeoXFamily:
    """Translate GPT-NeoX (``GPTNeoXForCausalLM``); its fused rows are ours: query, key and value of head by head."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    base_prefix = "gpt_neox."

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model that the settings describe."""
        width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        if width % heads:
            settings.refuse(f"hidden_size {width} is not divisible by num_attention_heads {heads}")
        if settings.integer("head_dim", width // heads) != width // heads:
            settings.refuse(
                f"head_dim is {settings.values['head_dim']}, supported is {width // heads}, hidden_size / "
                "num_attention_heads: transformers rotates by the one and divides heads by the other"
            )
        settings.require("attention_bias", True, True, "every linear layer has a bias")
        positions = settings.integer("max_position_embeddings", 2048)
        return GPTConfig(
            num_layers=settings.integer("num_hidden_layers"),
            hidden_size=width,
            num_attention_heads=heads,
            ffn_hidden_size=settings.integer("intermediate_size"),
            norm_epsilon=settings.number("layer_norm_eps", 1e-5),
            use_parallel_residual=settings.switch("use_parallel_residual", True),
            hidden_dropout=settings.number("hidden_dropout", 0.0),
            attention_dropout=settings.number("attention_dropout", 0.0),
            init_method_std=settings.number("initializer_range", 0.02),
            vocab_size=settings.integer("vocab_size"),
            max_position_embeddings=positions,
            position_embedding_type="rope",
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", False),
            **read_partial_rope(settings, positions, "rotary_emb_base", "rotary_pct", 0.25),
            **read_activation(settings, "hidden_act", "gelu"),
            **dtype_fields(settings),
        )

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        rope = write_rope(config)
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "attention_bias": True,
            "attention_dropout": config.attention_dropout,
            "hidden_act": written_activation(config),
            "hidden_dropout": config.hidden_dropout,
            "hidden_size": config.hidden_size,
            "initializer_range": config.init_method_std,
            "intermediate_size": config.ffn_hidden_size,
            "layer_norm_eps": config.norm_epsilon,
            "max_position_embeddings": config.max_position_embeddings,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_layers,
            "rope_scaling": rope["rope_scaling"],
            "rotary_emb_base": rope["rope_theta"],
            "rotary_pct": config.rotary_percent,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "use_parallel_residual": config.use_parallel_residual,
            "vocab_size": config.vocab_size,
        }

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Return every link, in the order of the tensors in their model."""
        width, ffn, prefix = config.hidden_size, config.ffn_hidden_size, self.base_prefix
        vocabulary = (config.vocab_size, width)
        yield whole("model.embedding.word_embeddings.weight", f"{prefix}embed_in.weight", vocabulary)
        for layer in range(config.num_layers):
            ours, theirs = f"model.decoder.layers.{layer}.", f"{prefix}layers.{layer}."
            yield from _both(f"{ours}input_layernorm", f"{theirs}input_layernorm", (width,))
            yield from _both(f"{ours}pre_mlp_layernorm", f"{theirs}post_attention_layernorm", (width,))
            qkv = (3 * width, width)
            yield from _both(f"{ours}self_attention.linear_qkv", f"{theirs}attention.query_key_value", qkv)
            yield from _both(f"{ours}self_attention.linear_proj", f"{theirs}attention.dense", (width, width))
            yield from _both(f"{ours}mlp.linear_fc1", f"{theirs}mlp.dense_h_to_4h", (ffn, width))
            yield from _both(f"{ours}mlp.linear_fc2", f"{theirs}mlp.dense_4h_to_h", (width, ffn))
        yield from _both("model.decoder.final_layernorm", f"{prefix}final_layer_norm", (width,))
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "embed_out.weight", vocabulary)

    def is_buffer(self, name: str) -> bool:
        """Return whether this is a causal mask or rotary frequencies, which older files hold."""
        return _BUFFER.fullmatch(name) is not None


def _both(native: str, foreign: str, shape: tuple[int, ...]) -> Iterator[TensorLink]:
    yield whole(f"{native}.weight", f"{foreign}.weight", shape)
    yield whole(f"{native}.bias", f"{foreign}.bias", shape[:1])
