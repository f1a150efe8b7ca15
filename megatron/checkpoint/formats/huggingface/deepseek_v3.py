"""DeepSeek-V3: MLA, dense first layers, MoE with a shared expert, and multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    expert_fields,
    layer_frequency,
    shared_expert_links,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.rope import read_yarn
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_NORM_EPSILON = 1e-6
"""Epsilon of the norms of latent vectors, which transformers does not take from ``rms_norm_eps``."""


class SharedExpertFamily(RotaryDecoderFamily):
    """Base of architectures with DeepSeek-V3's experts: dense first layers, sigmoid scores, a shared expert, and MTP.

    ``expert_defaults`` are the defaults of the architecture's configuration class, None if files must have the value.
    Some may be absent there, with DeepSeek-V3's value. ``group_score_topk`` is the number
    of best experts by whose scores transformers ranks a group. ``experts_setting`` and ``shared_setting`` name the
    numbers of experts and of shared experts, and ``bias_name`` is the expert bias in the files. ``has_mtp`` states
    whether they may contain MTP modules.
    """

    expert_defaults: Mapping[str, Any]
    shared_name = "mlp.shared_experts"
    group_score_topk = 2
    experts_setting, shared_setting = "n_routed_experts", "n_shared_experts"
    bias_name = "mlp.gate.e_score_correction_bias"
    has_mtp = True

    def experts_of(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MoE and MTP; reject unsupported settings."""
        usual = self.expert_defaults
        width = settings.integer("moe_intermediate_size", usual["moe_intermediate_size"])
        experts = settings.integer(self.experts_setting, usual[self.experts_setting])
        fields = expert_fields(settings, experts, width, usual.get("num_experts_per_tok", 8))
        modules = further_layers(settings, f"layers.{settings.integer('num_hidden_layers')}.") if self.has_mtp else 0
        is_divided = fields["moe_router_topk"] > 1
        reason = "scores are always normalized to sum 1" if is_divided else "the score of a single expert is its weight"
        settings.require("norm_topk_prob", is_divided, usual.get("norm_topk_prob", True), reason)
        shared = settings.integer(self.shared_setting, usual.get(self.shared_setting, 1))
        groups, of_token = (settings.integer(name, usual[name]) for name in ("n_group", "topk_group"))
        return {
            **fields,
            **self.group_fields(settings, experts, fields["moe_router_topk"], groups, of_token),
            "moe_layer_freq": self.layers_with_experts(settings),
            "moe_shared_expert_intermediate_size": shared * width,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": settings.number("routed_scaling_factor", usual["routed_scaling_factor"]),
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            "mtp_num_layers": modules or None,
        }

    def group_fields(self, settings: Settings, experts: int, chosen: int, groups: int, of_token: int) -> dict[str, Any]:
        """Return the fields of group-limited routing, none if every token may use every group; reject other groups."""
        if groups == 1 or settings.problems:
            return {}
        ranked_by, size = self.group_score_topk, experts // groups
        if experts % groups or of_token > groups or size < ranked_by:
            settings.refuse(
                f"n_group {groups} must divide the {experts} experts into groups of {ranked_by} or more, and "
                f"topk_group {of_token} must be at most n_group"
            )
        elif of_token * size < chosen:
            settings.refuse(
                f"num_experts_per_tok is {chosen}, but topk_group {of_token} groups have only {size} experts each"
            )
        if of_token == groups:
            return {}
        return {
            "moe_router_num_groups": groups,
            "moe_router_group_topk": of_token,
            # By default a group is ranked by the number of experts that a token has on average in each of its groups.
            "moe_router_group_score_topk": None if max(chosen // of_token, 1) == ranked_by else ranked_by,
        }

    def layers_with_experts(self, settings: Settings) -> str:
        """Return the value of ``--moe-layer-freq``; reject a model whose layers are all dense."""
        layers = settings.integer("num_hidden_layers")
        dense = count_of(settings, "first_k_dense_replace", self.expert_defaults["first_k_dense_replace"])
        if dense >= layers:
            settings.refuse(
                f"first_k_dense_replace is {dense}: none of the {layers} layers has experts; use {layers - 1} or less"
            )
        return layer_frequency([layer >= dense for layer in range(min(layers, 100_000))])

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        moe = config.moe
        shared = moe.moe_shared_expert_intermediate_size or 0
        settings = super().write_settings(config) | {
            "first_k_dense_replace": sum(not has_experts for has_experts in config.moe_layers),
            "moe_intermediate_size": moe.moe_ffn_hidden_size,
            "n_group": moe.moe_router_num_groups or 1,
            self.experts_setting: moe.num_experts,
            self.shared_setting: shared // max(moe.moe_ffn_hidden_size, 1),
            "norm_topk_prob": moe.moe_router_topk > 1,
            "num_experts_per_tok": moe.moe_router_topk,
            "routed_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
            "topk_group": moe.moe_router_group_topk or 1,
        }
        return settings | ({"num_nextn_predict_layers": config.mtp.mtp_depth} if self.has_mtp else {})

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Yield every link."""
        yield from super().links(config)
        yield from self.mtp_links(config)

    def mtp_links(self, config: GPTConfig) -> Iterator[TensorLink]:
        """Yield the links of the MTP modules, which are layers after the last one with copies of both embeddings."""
        vocabulary, width = (config.vocab_size, config.hidden_size), config.hidden_size
        has_own = config.untie_embeddings_and_output_weights
        output_layer = "model.output_layer.weight" if has_own else "model.embedding.word_embeddings.weight"
        for depth in range(config.mtp.mtp_depth):
            ours, theirs = f"model.mtp.layers.{depth}.", f"{self.base_prefix}layers.{config.num_layers + depth}."
            embedding = whole("model.embedding.word_embeddings.weight", f"{theirs}embed_tokens.weight", vocabulary)
            yield replace(embedding, is_copy=True)
            yield whole(f"{ours}enorm.weight", f"{theirs}enorm.weight", (width,))
            yield whole(f"{ours}hnorm.weight", f"{theirs}hnorm.weight", (width,))
            yield whole(f"{ours}eh_proj.weight", f"{theirs}eh_proj.weight", (width, 2 * width))
            within = f"{ours}transformer_layer."
            yield from self.layer_links(config, within, theirs, config.layer_parts[-1])
            yield whole(f"{ours}final_layernorm.weight", f"{theirs}shared_head.norm.weight", (width,))
            yield replace(whole(output_layer, f"{theirs}shared_head.head.weight", vocabulary), is_copy=True)

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of router, experts, shared expert and the router's expert bias."""
        yield from super().expert_layer_links(config, ours, theirs)
        if config.moe.moe_router_enable_expert_bias:
            bias = f"{theirs}{self.bias_name}"
            yield whole(f"{ours}mlp.router.expert_bias", bias, (config.moe.num_experts or 0,))
        if config.moe.moe_shared_expert_intermediate_size is not None:
            yield from shared_expert_links(config, ours, theirs, self.shared_name)


_DENSE, _SPARSE = "dense", "sparse"


def typed_layers(settings: Settings, num_dense: int) -> str:
    """Return the value of ``--moe-layer-freq`` by ``mlp_layer_types``; by default the first ``num_dense`` are dense."""
    layers = min(settings.integer("num_hidden_layers"), 100_000)
    kinds = settings.values.get("mlp_layer_types")
    if kinds is None:
        kinds = [_DENSE if layer < num_dense else _SPARSE for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {_DENSE, _SPARSE}:
        settings.refuse(
            f"mlp_layer_types is {kinds!r:.40}; {_DENSE} or {_SPARSE} for each of the {layers} layers is expected"
        )
        return "1"
    if _SPARSE not in kinds:
        settings.refuse(f"none of the {layers} layers has experts; use mlp_layer_types with at least one {_SPARSE}")
    return layer_frequency([kind == _SPARSE for kind in kinds])


def written_layers(config: GPTConfig) -> dict[str, Any]:
    """Return the setting ``mlp_layer_types`` of a model."""
    return {"mlp_layer_types": [_SPARSE if has_experts else _DENSE for has_experts in config.moe_layers]}


class DeepseekV3Family(SharedExpertFamily):
    """DeepSeek-V3 (``DeepseekV3ForCausalLM``)."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    default_positions = 4096
    default_query_rank: int | None = 1536
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        }
    )
    latent_defaults: Mapping[str, Any] = MappingProxyType(
        {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    )

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        return read_yarn(settings, positions, self.default_rotary_base)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MLA, MoE and MTP; reject unsupported settings."""
        settings.require("rope_interleave", True, True, "only interleaved rotary embeddings are supported")
        settings.require("scoring_func", "sigmoid", "sigmoid", "scores are sigmoids")
        settings.require("topk_method", "noaux_tc", "noaux_tc", "groups are ranked by their best experts")
        settings.require("moe_layer_freq", 1, 1, "first_k_dense_replace determines which layers have experts")
        return {**self.experts_of(settings), **self.latent_fields(settings)}

    def latent_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MLA; reject unsupported settings."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        epsilon = settings.number(self.epsilon_name, self.default_epsilon)
        usual = self.latent_defaults
        query_rank = settings.values.get("q_lora_rank", usual["q_lora_rank"])
        return {
            "kv_channels": 0,
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": None if query_rank is None else settings.integer("q_lora_rank", usual["q_lora_rank"]),
            "kv_lora_rank": settings.integer("kv_lora_rank", usual["kv_lora_rank"]),
            "qk_head_dim": settings.integer("qk_nope_head_dim", usual["qk_nope_head_dim"]),
            "qk_pos_emb_head_dim": settings.integer("qk_rope_head_dim", 64),
            "v_head_dim": settings.integer("v_head_dim", usual["v_head_dim"]),
            "latent_norm_epsilon": None if epsilon == _NORM_EPSILON else _NORM_EPSILON,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        mla = config.mla
        settings = super().write_settings(config) | {
            "attention_bias": False,
            "kv_lora_rank": mla.kv_lora_rank,
            "q_lora_rank": mla.q_lora_rank,
            "qk_nope_head_dim": mla.qk_head_dim,
            "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "v_head_dim": mla.v_head_dim,
        }
        # transformers' head_dim is the RoPE dimension of a head, which is already in the settings.
        settings.pop("head_dim", None)
        return settings

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of MLA's query projections and of its key-value down and up projections."""
        mla = config.mla
        width, heads = config.hidden_size, config.num_attention_heads
        ours, theirs = f"{ours}self_attention.linear_", f"{theirs}self_attn."
        queries, rank = heads * mla.latent_query_width, mla.q_lora_rank
        if rank is None:
            yield whole(f"{ours}q_proj.weight", f"{theirs}q_proj.weight", (queries, width))
        else:
            yield whole(f"{ours}q_down_proj.weight", f"{theirs}q_a_proj.weight", (rank, width))
            yield whole(f"{ours}q_up_proj.weight", f"{theirs}q_b_proj.weight", (queries, rank))
        latent = (mla.kv_lora_rank + mla.qk_pos_emb_head_dim, width)
        yield whole(f"{ours}kv_down_proj.weight", f"{theirs}kv_a_proj_with_mqa.weight", latent)
        up = (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        yield whole(f"{ours}kv_up_proj.weight", f"{theirs}kv_b_proj.weight", up)

    def attention_norm_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of the norms of MLA's compressed vectors."""
        mla = config.mla
        ours, theirs = f"{ours}self_attention.", f"{theirs}self_attn."
        if mla.q_lora_rank is not None:
            yield whole(f"{ours}q_layernorm.weight", f"{theirs}q_a_layernorm.weight", (mla.q_lora_rank,))
        yield whole(f"{ours}kv_layernorm.weight", f"{theirs}kv_a_layernorm.weight", (mla.kv_lora_rank,))

    def check_heads(self, settings: Settings, width: int, heads: int, groups: int, head_dim: int) -> None:
        """Reject key-value groups (GQA), and a RoPE dimension that is odd."""
        if groups != heads:
            settings.refuse(f"num_key_value_heads is {groups}; MLA needs one per attention head ({heads})")
        rotary = settings.integer("qk_rope_head_dim", 64)
        if rotary % 2:
            settings.refuse(f"qk_rope_head_dim is {rotary}; rotary position embeddings need an even number")


def further_layers(settings: Settings, name_part: str, setting: str = "num_nextn_predict_layers") -> int:
    """Return the number of MTP modules, whose tensor names contain ``name_part``.

    transformers writes the number but not the modules.
    """
    names = settings.tensor_names
    stated = count_of(settings, setting, 0 if names is None else 1)
    if names is not None and not any(name_part in name for name in names()):
        return 0
    return stated


def count_of(settings: Settings, name: str, default: int) -> int:
    """Read an integer setting that may be 0."""
    value = settings.values.get(name, default)
    return 0 if type(value) is int and value == 0 else settings.integer(name, default)
