"""GPT-2, GPT-Neo, and GPT-NeoX with Pythia.

GPT-2 has learned positions, LayerNorm, biases everywhere, and linear weights stored as ``[in, out]``. GPT-Neo has
unscaled attention scores, and a sliding window in every second layer. GPT-NeoX has parallel residuals and partial RoPE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from megatron.checkpoint.formats.huggingface.family import TensorLink, dtype_fields, query_key_value_rows, rows, whole
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope, write_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.config_base import from_fields, with_fields
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import format_layer_pattern

_GPT2_BUFFER = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias|causal_mask)")

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu_new": {"bias_gelu_fusion": True},
    "gelu_pytorch_tanh": {"bias_gelu_fusion": True},
    "gelu_fast": {"bias_gelu_fusion": True},
    "gelu": {"bias_gelu_fusion": False},
    "relu2": {"squared_relu": True},
    "relu": {"activation_func": "relu"},
}
"""Hugging Face names of activations without a gate."""
_WRITTEN_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "squared_relu": "relu2", "relu": "relu"}


def read_activation(settings: Settings, name: str, default: str) -> dict[str, Any]:
    """Return the GPTConfig fields of the activation in the setting ``name``."""
    activation = settings.text(name, default)
    if activation not in ACTIVATIONS:
        settings.refuse(f"{name} {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.get(activation, {})


def written_activation(config: GPTConfig, tanh_name: str = "gelu_new") -> str:
    """Return the transformers name of the activation; ``tanh_name`` is the family's name of GELU's tanh form.

    Unsupported activations are written as that form, so the folder then describes a different model, which
    `family_for` rejects.
    """
    name = _WRITTEN_ACTIVATIONS.get(config.activation, "gelu_new")
    return tanh_name if name == "gelu_new" else name


class GPT2Family:
    """GPT-2 (``GPT2LMHeadModel``), and base of the families with its names of settings and layers.

    ``default_sizes`` and ``default_dropout`` are defaults of the configuration class. ``linear_names`` are the names of
    the linear layers after the QKV projection, whose weights ``is_transposed`` in the files.
    """

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    base_prefix = "transformer."
    other_names: tuple[tuple[str, str], ...] = ()
    default_sizes: ClassVar[Mapping[str, int]] = {
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    default_dropout = 0.1
    default_activation = "gelu_new"
    is_tied_by_default = True
    is_transposed = True
    linear_names = ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration that the settings describe."""
        sizes = {name: settings.integer(name, size) for name, size in self.default_sizes.items()}
        width, heads = sizes["n_embd"], sizes["n_head"]
        if width % heads:
            settings.refuse(f"n_embd {width} is not divisible by n_head {heads}")
        config = from_fields(
            GPTConfig,
            num_layers=sizes["n_layer"],
            hidden_size=width,
            num_attention_heads=heads,
            ffn_hidden_size=settings.integer("n_inner", 4 * width),
            norm_epsilon=settings.number("layer_norm_epsilon", 1e-5),
            hidden_dropout=settings.number("resid_pdrop", self.default_dropout),
            attention_dropout=settings.number("attn_pdrop", self.default_dropout),
            init_method_std=settings.number("initializer_range", 0.02),
            vocab_size=sizes["vocab_size"],
            max_position_embeddings=sizes["n_positions"],
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", self.is_tied_by_default),
            **read_activation(settings, "activation_function", self.default_activation),
            **dtype_fields(settings),
        )
        return with_fields(config, **self.own_fields(settings, config))

    def own_fields(self, settings: Settings, config: GPTConfig) -> dict[str, Any]:
        """Return the fields that only this architecture's settings determine; reject unsupported settings."""
        settings.require(
            "scale_attn_weights", True, True, "attention scores are always divided by the square root of the head size"
        )
        settings.require(
            "scale_attn_by_inverse_layer_idx", False, False, "attention scores are scaled alike in every layer"
        )
        settings.require("add_cross_attention", False, False, "cross-attention is not supported")
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "activation_function": written_activation(config, self.default_activation),
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
        """Yield every link, in the order of the tensors in their model."""
        width, prefix = config.hidden_size, self.base_prefix
        embedding = "model.embedding.word_embeddings.weight"
        positions = "model.embedding.position_embeddings.weight"
        yield whole(embedding, f"{prefix}wte.weight", (config.vocab_size, width))
        if config.position_embedding_type == "learned_absolute":
            yield whole(positions, f"{prefix}wpe.weight", (config.max_position_embeddings, width))
        for layer in range(config.num_layers):
            yield from self._layer_links(config, f"model.decoder.layers.{layer}.", f"{prefix}h.{layer}.")
        yield from _norm_links("model.decoder.final_layernorm", f"{prefix}ln_f", (width,))
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "lm_head.weight", (config.vocab_size, width))
        if config.add_output_bias:
            yield whole("model.output_layer.bias", "lm_head.bias", (config.vocab_size,))

    def is_buffer(self, name: str) -> bool:
        return _GPT2_BUFFER.fullmatch(name) is not None

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's QKV projection, whose rows in the files are all queries, keys and values."""
        width = config.hidden_size
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

    def _layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        width, ffn = config.hidden_size, config.ffn_hidden_size
        yield from _norm_links(f"{ours}input_layernorm", f"{theirs}ln_1", (width,))
        yield from self.attention_links(config, ours, theirs)
        if not config.shared_parallel_norm:
            yield from _norm_links(f"{ours}pre_mlp_layernorm", f"{theirs}ln_2", (width,))
        for native, foreign, shape, has_bias in zip(
            ("self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
            self.linear_names,
            ((width, width), (ffn, width), (width, ffn)),
            (config.has_proj_bias, True, True),
            strict=True,
        ):
            names = f"{ours}{native}.weight", f"{theirs}{foreign}.weight"
            yield whole(*names, shape, is_transposed=self.is_transposed)
            if has_bias:
                yield whole(f"{ours}{native}.bias", f"{theirs}{foreign}.bias", shape[:1])


def _norm_links(native: str, foreign: str, shape: tuple[int, ...]) -> Iterator[TensorLink]:
    for kind in ("weight", "bias"):
        yield whole(f"{native}.{kind}", f"{foreign}.{kind}", shape)


_GPT_NEO_BUFFER = re.compile(r"(?:transformer\.)?h\.\d+\.attn\.attention\.(?:bias|masked_bias)")
_FULL, _WINDOW = "global", "local"
_DEFAULT_TYPES = [[[_FULL, _WINDOW], 12]]


class GPTNeoFamily:
    """GPT-Neo (``GPTNeoForCausalLM``), with biases everywhere except in the QKV projections."""

    model_type = "gpt_neo"
    architecture = "GPTNeoForCausalLM"
    base_prefix = "transformer."
    other_names: tuple[tuple[str, str], ...] = ()

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration that the settings describe."""
        width, heads = settings.integer("hidden_size", 2048), settings.integer("num_heads", 16)
        if width % heads:
            settings.refuse(f"hidden_size {width} is not divisible by num_heads {heads}")
        num_layers = settings.integer("num_layers", 24)
        dropout = settings.number("resid_dropout", 0.0)
        embed_dropout = settings.number("embed_dropout", 0.0)
        if embed_dropout != dropout:
            settings.refuse(
                f"embed_dropout {embed_dropout} and resid_dropout {dropout} differ; they must be equal "
                "(--hidden-dropout sets both)"
            )
        return from_fields(
            GPTConfig,
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
        """Yield every link, in the order of the tensors in their model."""
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
        return _GPT_NEO_BUFFER.fullmatch(name) is not None

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
    """Return the fields of sliding windows; ``attention_types`` is a list of [kinds of layers, repetitions].

    transformers derives ``attention_layers`` from it and also stores them, and reads them with precedence.
    """
    types = settings.values.get("attention_types", _DEFAULT_TYPES)
    try:
        kinds = [kind for part, times in types for _ in range(times) for kind in part]
    except (TypeError, ValueError):
        kinds = []
    settings.require("attention_layers", kinds, kinds, "attention_types gives other kinds of layers")
    if len(kinds) != num_layers or not set(kinds) <= {_FULL, _WINDOW}:
        settings.refuse(
            f"attention_types {types!r} does not describe {num_layers} layers of the kinds {_FULL} and {_WINDOW}"
        )
        return {}
    has_window = [kind == _WINDOW for kind in kinds]
    if not any(has_window):
        return {}
    pattern = None if all(has_window) else format_layer_pattern(has_window)
    return {"window_size": f"{settings.integer('window_size', 256) - 1},0", "window_attn_skip_freq": pattern}


def _both(native: str, foreign: str, shape: tuple[int, ...]) -> Iterator[TensorLink]:
    yield whole(f"{native}.weight", f"{foreign}.weight", shape)
    yield whole(f"{native}.bias", f"{foreign}.bias", shape[:1])


_GPT_NEOX_BUFFER = re.compile(
    r"(?:gpt_neox\.)?(?:layers\.\d+\.attention\.(?:bias|masked_bias)|"
    r"(?:layers\.\d+\.attention\.)?rotary_emb\.inv_freq)"
)


class GPTNeoXFamily:
    """GPT-NeoX (``GPTNeoXForCausalLM``), whose fused QKV rows have the native order: query, key, value per head."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    base_prefix = "gpt_neox."
    other_names: tuple[tuple[str, str], ...] = ()

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration that the settings describe."""
        width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        if width % heads:
            settings.refuse(f"hidden_size {width} is not divisible by num_attention_heads {heads}")
        if settings.integer("head_dim", width // heads) != width // heads:
            settings.refuse(
                f"head_dim is {settings.values['head_dim']}, but only {width // heads} (hidden_size / "
                "num_attention_heads) is supported: transformers uses head_dim for the rotary embedding and "
                "hidden_size / num_attention_heads for the head size"
            )
        settings.require("attention_bias", True, True, "every linear layer has a bias")
        positions = settings.integer("max_position_embeddings", 2048)
        return from_fields(
            GPTConfig,
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
        """Yield every link, in the order of the tensors in their model."""
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
        """Return whether the tensor is a causal mask or RoPE frequencies, which older files contain."""
        return _GPT_NEOX_BUFFER.fullmatch(name) is not None
