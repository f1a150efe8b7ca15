"""Kimi Linear: KDA in most layers, MLA without position embeddings in the others, and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    FULL,
    LINEAR,
    ExpertNames,
    linear_attention_fields,
    read_layer_types,
    written_linear_layers,
)
from megatron.checkpoint.formats.huggingface.deepseek_v3 import (
    DeepseekV3Family,
    count_of,
    typed_layers,
    written_layers,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, stacked_rows, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box
from megatron.core.transformer import KIMI_DELTA_ATTENTION, LayerParts

_FIXED = {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}


class KimiLinearFamily(DeepseekV3Family):
    """Kimi Linear (``KimiLinearForCausalLM``)."""

    model_type = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    default_positions = 1048576
    default_groups = 32
    default_epsilon = 1e-5
    has_mtp = False
    shared_name = "block_sparse_moe.shared_experts"
    bias_name = "block_sparse_moe.gate.e_score_correction_bias"
    latent_defaults: Mapping[str, Any] = MappingProxyType({**DeepseekV3Family.latent_defaults, "q_lora_rank": None})
    expert_names = ExpertNames(
        *("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    )
    other_names = (
        # transformers writes the dense layers under the name of the experts.
        *((".mlp.", ".block_sparse_moe."), (".block_sparse_moe.", ".mlp.")),
        *(
            (f".self_attn.{name}", f".self_attn.forget_gate.{name}")
            for name in ("f_a_proj", "f_b_proj", "A_log", "dt_bias")
        ),
    )
    stacked_in_memory: Mapping[str, Sequence[str]] = MappingProxyType(
        {".conv1d.": (".q_conv1d.", ".k_conv1d.", ".v_conv1d.")}
    )
    setting_names: Mapping[str, str] = MappingProxyType(
        {
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts": "n_routed_experts",
            "num_local_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        }
    )
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 1024,
            "n_routed_experts": 256,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
        }
    )

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return nothing: there are no position embeddings."""
        return {}

    def check_heads(self, settings: Settings, width: int, heads: int, groups: int, head_dim: int) -> None:
        """Reject key-value groups (GQA)."""
        if groups != heads:
            settings.refuse(f"num_key_value_heads is {groups}; MLA needs one per attention head ({heads})")

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of KDA, MLA and MoE; reject unsupported settings."""
        for name, value in _FIXED.items():
            settings.require(name, value, value, "transformers computes nothing else")
        settings.require("tie_word_embeddings", False, False, "transformers does not tie the output layer")
        settings.require("num_nextn_predict_layers", 0, 0, "MTP modules are not supported")
        shape = settings.inner("linear_attn_config") or Settings({}, settings.place, settings.problems)
        heads = shape.integer("num_heads", settings.integer("linear_num_heads", 32))
        width = shape.integer("head_dim", settings.integer("linear_head_dim", 128))
        usual = settings.integer("linear_conv_kernel_dim", 4)
        is_linear = read_layer_types(settings, _linear_layers(settings, shape), LINEAR)
        kda = {
            "linear_conv_kernel_dim": shape.integer("short_conv_kernel_size", usual),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        }
        return {
            **self.experts_of(settings),
            **self.latent_fields(settings),
            "position_embedding_type": "none",
            **(kda if any(is_linear) else {}),
            **linear_attention_fields(KIMI_DELTA_ATTENTION, is_linear),
        }

    def layers_with_experts(self, settings: Settings) -> str:
        """Return the value of ``--moe-layer-freq``; reject a model whose layers are all dense."""
        return typed_layers(settings, count_of(settings, "first_k_dense_replace", 1))

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        hybrid, settings, kinds = config.hybrid, super().write_settings(config), written_linear_layers(config)
        for name in ("rope_interleave", "rope_scaling", "rope_theta", "scoring_func", "topk_method"):
            del settings[name]
        linear = {
            "head_dim": hybrid.linear_key_head_dim,
            "num_heads": hybrid.linear_num_key_heads,
            "short_conv_kernel_size": hybrid.linear_conv_kernel_dim,
            **{name: [i + 1 for i, kind in enumerate(kinds) if kind == _LISTS[name]] for name in _LISTS},
        }
        # The default is a token that a smaller vocabulary does not have.
        own = {"linear_attn_config": linear, "pad_token_id": None, **written_layers(config)}
        return self.with_own_names(settings) | _FIXED | own

    def mixer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer's MLA or KDA; their projections and convolutions are separate tensors."""
        if parts.mixer != KIMI_DELTA_ATTENTION:
            yield from super().mixer_links(config, ours, theirs, parts)
            return
        hybrid, width, ours, theirs = config.hybrid, config.hidden_size, f"{ours}self_attention.", f"{theirs}self_attn."
        keys, values, rank = hybrid.linear_key_size, hybrid.linear_value_size, hybrid.linear_value_head_dim
        heads, convolution = hybrid.linear_num_value_heads, (1, hybrid.linear_conv_kernel_dim)
        counts = {"q": keys, "k": keys, "v": values}
        convolved = [(f"{theirs}{name}_conv1d.weight", count) for name, count in counts.items()]
        projected = [(f"{theirs}{name}_proj.weight", count) for name, count in (counts | {"b": heads}).items()]
        yield from stacked_rows(f"{ours}conv1d.weight", convolved, convolution)
        yield from stacked_rows(f"{ours}in_proj.weight", projected, (width,))
        rates = whole(f"{ours}A_log", f"{theirs}A_log", (heads,))
        yield replace(rates, foreign_box=Box((0, 0, 0, 0), (1, 1, heads, 1)), foreign_ones=(2, 1))
        yield whole(f"{ours}dt_bias", f"{theirs}dt_bias", (keys,))
        for name, count in (("f", keys), ("g", values)):
            yield whole(f"{ours}{name}_a_proj.weight", f"{theirs}{name}_a_proj.weight", (rank, width))
            yield whole(f"{ours}{name}_b_proj.weight", f"{theirs}{name}_b_proj.weight", (count, rank))
        yield whole(f"{ours}out_norm.weight", f"{theirs}o_norm.weight", (rank,))
        yield whole(f"{ours}out_proj.weight", f"{theirs}o_proj.weight", (width, values))


_LISTS = {"kda_layers": LINEAR, "full_attn_layers": FULL}


def _linear_layers(settings: Settings, shape: Settings) -> list[bool]:
    """Return whether each layer has KDA, according to the lists of layer numbers from 1 on, if there are both."""
    layers = min(settings.integer("num_hidden_layers"), 100_000)
    given = [shape.values.get(name) for name in _LISTS]
    if None in given:
        return [layer == 0 or layer % 4 != 0 for layer in range(layers)]
    kda, full = ([str(number) for number in (each if isinstance(each, list) else [each])] for each in given)
    if sorted(kda + full) != sorted(str(layer + 1) for layer in range(layers)):
        shape.refuse(f"kda_layers and full_attn_layers must contain each of the {layers} layers, from 1 on, once")
        return [True] * layers
    return [str(layer + 1) in kda for layer in range(layers)]
