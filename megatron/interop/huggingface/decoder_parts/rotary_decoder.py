"""What Llama and its relatives share: RMSNorm, rotary positions, grouped queries and a gated feed-forward layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.decoder_parts.experts import ExpertNames, expert_links
from megatron.interop.huggingface.decoder_parts.rope import read_rope, write_rope
from megatron.interop.huggingface.family import dtype_fields
from megatron.interop.huggingface.settings import Settings
from megatron.interop.huggingface.tensor_link import TensorLink, query_key_value_rows, rows, whole

_BUFFER = re.compile(r"(?:model\.)?(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class RotaryDecoderFamily:
    """Translate what the families have in common; each says itself what else its settings may hold.

    ``has_qkv_bias`` tells whether the projections to queries, keys and values have biases. The defaults are those of
    the family's configuration class, which its files may leave out; without a default for the groups there is one for
    each head, and without one for a head's width the heads share the model's. ``norm_names`` are our norms of a layer
    and theirs. ``expert_names`` is None where files stack the experts as a model in memory does.
    """

    model_type: str
    architecture: str
    base_prefix = "model."
    has_qkv_bias = False
    default_positions: int
    default_groups: int | None = None
    default_head_dim: int | None = None
    default_epsilon = 1e-6
    default_rotary_base = 10000.0
    is_tied_by_default = False
    activation = ("hidden_act", "silu", "swiglu")
    """The setting of the gate's activation, its only value, and the switch that this is here."""
    expert_names: ExpertNames | None = ExpertNames()
    norm_names: tuple[tuple[str, str], ...] = (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    )

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model that the settings describe."""
        width = settings.integer("hidden_size")
        heads = settings.integer("num_attention_heads")
        # A null, unlike absence, stands for what follows from the other sizes.
        usual_groups = heads if "num_key_value_heads" in settings.values else self.default_groups or heads
        usual_width = None if "head_dim" in settings.values else self.default_head_dim
        groups = settings.integer("num_key_value_heads", usual_groups)
        head_dim = settings.integer("head_dim", usual_width or max(width // heads, 1))
        if not settings.problems:
            self.check_heads(settings, width, heads, groups, head_dim)
        setting, activation, switch = self.activation
        settings.require(setting, activation, activation, "the feed-forward layer is gated by it")
        positions = settings.integer("max_position_embeddings", self.default_positions)
        config = GPTConfig(
            num_layers=settings.integer("num_hidden_layers"),
            hidden_size=width,
            num_attention_heads=heads,
            num_query_groups=groups,
            group_query_attention=groups != heads,
            ffn_hidden_size=settings.integer("intermediate_size"),
            kv_channels=head_dim,
            normalization="RMSNorm",
            norm_epsilon=settings.number("rms_norm_eps", self.default_epsilon),
            swiglu=switch == "swiglu",
            geglu=switch == "geglu",
            add_bias_linear=False,
            add_qkv_bias=self.has_qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=settings.number("attention_dropout", 0.0),
            init_method_std=settings.number("initializer_range", 0.02),
            vocab_size=settings.integer("vocab_size"),
            max_position_embeddings=positions,
            position_embedding_type="rope",
            untie_embeddings_and_output_weights=not settings.switch("tie_word_embeddings", self.is_tied_by_default),
            **self.read_rope(settings, positions),
            **dtype_fields(settings),
        )
        return dataclasses.replace(config, **self.own_fields(settings))

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the fields of the rotary positions."""
        return read_rope(settings, positions, self.default_rotary_base)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return what only this family's settings decide of a model, and note what is not supported of it."""
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "attention_dropout": config.attention_dropout,
            self.activation[0]: self.activation[1],
            "hidden_size": config.hidden_size,
            "initializer_range": config.init_method_std,
            "intermediate_size": config.ffn_hidden_size,
            "max_position_embeddings": config.max_position_embeddings,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": config.num_layers,
            "num_key_value_heads": config.num_query_groups,
            "rms_norm_eps": config.norm_epsilon,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            "vocab_size": config.vocab_size,
        }
        if self.default_head_dim or config.kv_channels * config.num_attention_heads != config.hidden_size:
            settings["head_dim"] = config.kv_channels
        return settings | write_rope(config)

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Return every link, in the order of the tensors in their model."""
        width, prefix = config.hidden_size, self.base_prefix
        yield whole(
            "model.embedding.word_embeddings.weight", f"{prefix}embed_tokens.weight", (config.vocab_size, width)
        )
        for layer in range(config.num_layers):
            ours, theirs = f"model.decoder.layers.{layer}.", f"{prefix}layers.{layer}."
            yield from self.layer_links(config, ours, theirs, has_experts=config.moe_layers[layer])
        yield whole("model.decoder.final_layernorm.weight", f"{prefix}norm.weight", (width,))
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "lm_head.weight", (config.vocab_size, width))

    def is_buffer(self, name: str) -> bool:
        """Return whether these are rotary frequencies, which older files hold."""
        return _BUFFER.fullmatch(name) is not None

    def projection_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Return the links of a dense layer's projections to queries, keys and values, and to gate and up."""
        width, ffn = config.hidden_size, config.ffn_hidden_size
        yield from self.attention_links(config, ours, theirs)
        gated = f"{ours}mlp.linear_fc1.weight"
        yield rows(gated, 0, f"{theirs}mlp.gate_proj.weight", 0, ffn, (width,))
        yield rows(gated, ffn, f"{theirs}mlp.up_proj.weight", 0, ffn, (width,))

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Return the links of a layer's projections to queries, keys and values."""
        width = config.hidden_size
        fused = list(query_key_value_rows(config.num_attention_heads, config.num_query_groups, config.kv_channels))
        for name in ("q", "k", "v"):
            for kind, trailing in (("weight", (width,)), ("bias", ()))[: 2 if self.has_qkv_bias else 1]:
                for part, native_start, foreign_start, count in fused:
                    if part == name:
                        native = f"{ours}self_attention.linear_qkv.{kind}"
                        foreign = f"{theirs}self_attn.{name}_proj.{kind}"
                        yield rows(native, native_start, foreign, foreign_start, count, trailing)

    def attention_norm_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Return the links of the norms within a layer's attention."""
        across = config.qk_layernorm_across_heads
        for name, rows_of_all in (("q", config.query_projection_size), ("k", config.kv_projection_size)):
            native, foreign = f"{ours}self_attention.{name}_layernorm.weight", f"{theirs}self_attn.{name}_norm.weight"
            yield whole(native, foreign, (rows_of_all if across else config.kv_channels,))

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Return the links of a layer's router and experts."""
        assert self.expert_names is not None, "a family that stacks experts has links of its own"
        yield from expert_links(config, self.expert_names, ours, theirs)

    def layer_links(self, config: GPTConfig, ours: str, theirs: str, *, has_experts: bool) -> Iterator[TensorLink]:
        """Return the links of a layer, by what its tensors' names begin with."""
        width, ffn = config.hidden_size, config.ffn_hidden_size
        yield from (self.attention_links if has_experts else self.projection_links)(config, ours, theirs)
        projection = (width, config.context_size)
        yield whole(f"{ours}self_attention.linear_proj.weight", f"{theirs}self_attn.o_proj.weight", projection)
        if config.qk_layernorm:
            yield from self.attention_norm_links(config, ours, theirs)
        if has_experts:
            yield from self.expert_layer_links(config, ours, theirs)
        else:
            yield whole(f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", (width, ffn))
        for name, their_name in self.norm_names:
            yield whole(f"{ours}{name}.weight", f"{theirs}{their_name}.weight", (width,))

    def check_heads(self, settings: Settings, width: int, heads: int, groups: int, head_dim: int) -> None:
        """Note what is wrong with the numbers and the width of heads."""
        if heads % groups:
            settings.refuse(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
        if settings.values.get("head_dim", self.default_head_dim) is None and width % heads:
            settings.refuse(f"hidden_size {width} is not divisible by num_attention_heads {heads}; give head_dim")
        elif head_dim % 2:
            settings.refuse(f"heads are {head_dim} channels wide; rotary positions need an even number")
