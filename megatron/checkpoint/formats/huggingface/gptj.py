"""GPT-J and CodeGen: attention and MLP in parallel with one LayerNorm, interleaved partial RoPE, biases of the MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from megatron.checkpoint.formats.huggingface.family import TensorLink, query_key_value_rows, rows
from megatron.checkpoint.formats.huggingface.gpt import GPT2Family
from megatron.checkpoint.formats.huggingface.rope import read_rotated_channels
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class GPTJFamily(GPT2Family):
    """GPT-J (``GPTJForCausalLM``), whose output layer has a bias too."""

    model_type = "gptj"
    architecture = "GPTJForCausalLM"
    default_sizes: ClassVar[Mapping[str, int]] = {
        "n_embd": 4096,
        "n_head": 16,
        "n_layer": 28,
        "n_positions": 2048,
        "vocab_size": 50400,
    }
    default_dropout = 0.0
    is_tied_by_default = False
    is_transposed = False
    linear_names = ("attn.out_proj", "mlp.fc_in", "mlp.fc_out")

    def own_fields(self, settings: Settings, config: GPTConfig) -> dict[str, Any]:
        """Return the fields of the layers, RoPE and biases; reject a tied output layer."""
        settings.require("tie_word_embeddings", False, False, "an output layer with a bias must have its own weight")
        return {
            "add_output_bias": True,
            "disable_proj_bias": True,
            "disable_qkv_bias": True,
            "position_embedding_type": "rope",
            "rotary_interleaved": True,
            "rotary_percent": read_rotated_channels(settings, "rotary_dim", 64, config.kv_channels),
            "shared_parallel_norm": True,
            "use_parallel_residual": True,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {"rotary_dim": config.rotary_dim}

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's QKV projections."""
        heads, groups = config.num_attention_heads, config.num_query_groups
        for part, start, their_start, count in query_key_value_rows(heads, groups, config.kv_channels):
            name, their_name = f"{ours}self_attention.linear_qkv.weight", f"{theirs}attn.{part}_proj.weight"
            yield rows(name, start, their_name, their_start, count, (config.hidden_size,))


_SHARES = 4
"""Cores over which CodeGen was trained: its fused projection has the queries, values and keys of each in turn."""
_ORDER = ("q", "v", "k")


class CodeGenFamily(GPTJFamily):
    """CodeGen (``CodeGenForCausalLM``), which differs from GPT-J in the order of its fused QKV rows."""

    model_type = "codegen"
    architecture = "CodeGenForCausalLM"

    def own_fields(self, settings: Settings, config: GPTConfig) -> dict[str, Any]:
        """Return the fields of GPT-J; reject a number of heads that the order of the rows cannot have."""
        if config.num_attention_heads % _SHARES:
            settings.refuse(f"n_head {config.num_attention_heads} is not divisible by {_SHARES}")
        return super().own_fields(settings, config)

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's fused QKV projection."""
        heads, groups, width = config.num_attention_heads, config.num_query_groups, config.hidden_size
        name, their_name = f"{ours}self_attention.linear_qkv.weight", f"{theirs}attn.qkv_proj.weight"
        for part, start, row, count in query_key_value_rows(heads, groups, config.kv_channels):
            share, within = divmod(row, width // _SHARES)
            their_start = (share * len(_ORDER) + _ORDER.index(part)) * (width // _SHARES) + within
            yield rows(name, start, their_name, their_start, count, (width,))
