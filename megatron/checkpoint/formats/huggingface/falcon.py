"""Falcon: LayerNorm, RoPE, GELU, and attention and MLP in parallel with one or two norms, or in sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    named_layer_links,
    norm_links,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_LINEAR_NAMES = (
    ("self_attention.linear_qkv", "self_attention.query_key_value"),
    ("self_attention.linear_proj", "self_attention.dense"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
)


class FalconFamily(RotaryDecoderFamily):
    """Falcon with RoPE (``FalconForCausalLM``), whose fused QKV rows have the native order."""

    model_type = "falcon"
    architecture = "FalconForCausalLM"
    base_prefix = "transformer."
    default_positions = 2048
    default_epsilon = 1e-5
    is_tied_by_default = True
    activation = ("activation", "gelu", "gelu")
    epsilon_name = "layer_norm_epsilon"

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration that the settings describe."""
        width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        settings.require("n_embed", width, width, "it is another name of hidden_size")
        settings.require("alibi", False, False, "its slopes depend on the head dimension")
        settings.require("hidden_dropout", 0.0, 0.0, "one dropout for the sum of attention and MLP is not supported")
        groups = settings.integer("num_kv_heads", heads)
        if not settings.switch("new_decoder_architecture", False):
            groups = 1 if settings.switch("multi_query", True) else heads
        sizes = {
            "head_dim": None,
            "intermediate_size": settings.integer("ffn_hidden_size", 4 * width),
            "num_key_value_heads": groups,
        }
        return super().read_config(settings.replaced(sizes))

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and biases."""
        is_new, is_parallel = settings.switch("new_decoder_architecture", False), settings.switch("parallel_attn", True)
        num_norms = settings.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
        if is_new:
            settings.require("parallel_attn", True, True, "new_decoder_architecture is true")
        if num_norms > 1 + is_new:
            settings.refuse(f"num_ln_in_parallel_attn is {num_norms}; with this architecture use {1 + is_new} or less")
        if not is_parallel:
            settings.require("attention_dropout", 0.0, 0.0, "without parallel_attn it drops the output too")
        return {
            "normalization": "LayerNorm",
            "add_bias_linear": settings.switch("bias", False),
            "bias_gelu_fusion": False,
            "use_parallel_residual": is_parallel,
            "shared_parallel_norm": is_parallel and num_norms == 1,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings, groups = super().write_settings(config), config.num_query_groups
        is_parallel, heads = config.use_parallel_residual, config.num_attention_heads
        is_new = is_parallel and (not config.shared_parallel_norm or groups not in (1, heads))
        settings["ffn_hidden_size"] = settings.pop("intermediate_size")
        return settings | {
            "alibi": False,
            "bias": config.add_bias_linear,
            "hidden_dropout": 0.0,
            "multi_query": groups == 1,
            "new_decoder_architecture": is_new,
            "num_kv_heads": groups,
            "num_ln_in_parallel_attn": 1 if config.shared_parallel_norm or not is_parallel else 2,
            "parallel_attn": is_parallel,
        }

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Yield every link, in the order of the tensors in their model."""
        vocabulary, prefix = (config.vocab_size, config.hidden_size), self.base_prefix
        yield whole("model.embedding.word_embeddings.weight", f"{prefix}word_embeddings.weight", vocabulary)
        has_two = config.use_parallel_residual and not config.shared_parallel_norm
        first, second = ("ln_attn", "ln_mlp") if has_two else ("input_layernorm", "post_attention_layernorm")
        names = [*_LINEAR_NAMES, ("input_layernorm", first), ("pre_mlp_layernorm", second)]
        for layer in range(config.num_layers):
            ours, theirs = f"model.decoder.layers.{layer}.", f"{prefix}h.{layer}."
            yield from named_layer_links(config, ours, theirs, names[: -1 if config.shared_parallel_norm else None])
        yield from norm_links(config, "model.decoder.final_layernorm", f"{prefix}ln_f")
        if config.untie_embeddings_and_output_weights:
            yield whole("model.output_layer.weight", "lm_head.weight", vocabulary)
