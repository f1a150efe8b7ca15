"""GPT-Neo: learned positions, scores without a scale, and a window in every second layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.layer_pattern import format_layer_pattern
from megatron.interop.huggingface.architectures.gpt2 import read_activation, written_activation
from megatron.interop.huggingface.family import dtype_fields
from megatron.interop.huggingface.settings import Settings
from megatron.interop.huggingface.tensor_link import TensorLink, query_key_value_rows, rows, whole

_BUFFER = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.attention\.(?:bias|masked_bias)")
_FULL, _WINDOW = "global", "local"
_DEFAULT_TYPES = [[[_FULL, _WINDOW], 12]]


class GPTNeoFamily:
    """Translate GPT-Neo (``GPTNeoForCausalLM``): biases everywhere but for queries, keys and values."""

    model_type = "gpt_neo"
    architecture = "GPTNeoForCausalLM"
    base_prefix = "transformer."

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model that the settings describe."""
        width, heads = settings.integer("hidden_size", 2048), settings.integer("num_heads", 16)
        if width % heads:
            settings.refuse(f"hidden_size {width} is not divisible by num_heads {heads}")
        num_layers = settings.integer("num_layers", 24)
        dropout = settings.number("resid_dropout", 0.0)
        embed_dropout = settings.number("embed_dropout", 0.0)
        if embed_dropout != dropout:
            settings.refuse(f"embed_dropout {embed_dropout} is not resid_dropout {dropout}; one dropout is of both")
        return GPTConfig(
            num_layers=num_layers,
            hidden_size=width,
            num_attention_heads=heads,
            ffn_hidden_size=settings.integer("intermediate_size", 4 * width),
            norm_epsilon=settings.number("layer_norm_epsilon", 1e-5),
            disable_qkv_bias=True,
            query_pre_attn_scalar=1,
            hidden_dropout=dropout,
            attention_dropout=settings.number("attention_dropout", 0.0),
            init_method_std=settings.number("initializer_range", 0.02),
            vocab_size=settings.integer("vocab_size", 50257),
            max_position_embeddings=settings.integer("max_position_embeddings", 2048),
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", True),
            **_read_windows(settings, num_layers),
            **read_activation(settings, "activation_function", "gelu_new"),
            **dtype_fields(settings),
        )

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        windows = config.layer_windows
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "activation_function": written_activation(config),
            "attention_dropout": config.attention_dropout,
            "attention_types": [[[_FULL if window is None else _WINDOW], 1] for window in windows],
            "embed_dropout": config.hidden_dropout,
            "hidden_size": config.hidden_size,
            "initializer_range": config.init_method_std,
            "intermediate_size": config.ffn_hidden_size,
            "layer_norm_epsilon": config.norm_epsilon,
            "max_position_embeddings": config.max_position_embeddings,
            "num_heads": config.num_attention_heads,
            "num_layers": config.num_layers,
            "resid_dropout": config.hidden_dropout,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "vocab_size": config.vocab_size,
            "window_size": next((window for window in windows if window is not None), 256),
        }

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Return every link, in the order of the tensors in their model."""
        width, prefix = config.hidden_size, self.base_prefix
        vocabulary, positions = (config.vocab_size, width), (config.max_position_embeddings, width)
        yield whole("model.embedding.word_embeddings.weight", f"{prefix}wte.weight", vocabulary)
        yield whole("model.embedding.position_embeddings.weight", f"{prefix}wpe.weight", positions)
        for layer in range(config.num_layers):
            yield from self._layer_links(config, f"model.decoder.layers.{layer}.", f"{prefix}h.{layer}.")
        yield from _both("model.decoder.final_layernorm", f"{prefix}ln_f", (width,))
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "lm_head.weight", vocabulary)

    def is_buffer(self, name: str) -> bool:
        """Return whether this is a causal mask that older files hold."""
        return _BUFFER.fullmatch(name) is not None

    def _layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        width, ffn = config.hidden_size, config.ffn_hidden_size
        yield from _both(f"{ours}input_layernorm", f"{theirs}ln_1", (width,))
        fused = f"{ours}self_attention.linear_qkv.weight"
        for part, start, their_start, count in query_key_value_rows(
            config.num_attention_heads, config.num_query_groups, config.kv_channels
        ):
            yield rows(fused, start, f"{theirs}attn.attention.{part}_proj.weight", their_start, count, (width,))
        yield from _both(f"{ours}self_attention.linear_proj", f"{theirs}attn.attention.out_proj", (width, width))
        yield from _both(f"{ours}pre_mlp_layernorm", f"{theirs}ln_2", (width,))
        yield from _both(f"{ours}mlp.linear_fc1", f"{theirs}mlp.c_fc", (ffn, width))
        yield from _both(f"{ours}mlp.linear_fc2", f"{theirs}mlp.c_proj", (width, ffn))


def _read_windows(settings: Settings, num_layers: int) -> dict[str, Any]:
    """Return the fields of the windows; ``attention_types`` is a list of [kinds of layers, how often they follow]."""
    types = settings.values.get("attention_types", _DEFAULT_TYPES)
    try:
        kinds = [kind for part, times in types for _ in range(times) for kind in part]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or not set(kinds) <= {_FULL, _WINDOW}:
        settings.refuse(f"attention_types {types!r} does not make {_FULL} or {_WINDOW} of {num_layers} layers")
        return {}
    has_window = [kind == _WINDOW for kind in kinds]
    if not any(has_window):
        return {}
    pattern = None if all(has_window) else format_layer_pattern(has_window)
    return {"window_size": f"{settings.integer('window_size', 256) - 1},0", "window_attn_skip_freq": pattern}


def _both(native: str, foreign: str, shape: tuple[int, ...]) -> Iterator[TensorLink]:
    yield whole(f"{native}.weight", f"{foreign}.weight", shape)
    yield whole(f"{native}.bias", f"{foreign}.bias", shape[:1])
