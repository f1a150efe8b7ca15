"""Which models are taken, how their settings are read and written, which tensor is which, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpoint.formats.huggingface.families import FAMILIES, family_for, hugging_face_config, read_model
from megatron.checkpoint.formats.huggingface.family import model_features, shapes_of
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.config_base import with_fields
from megatron.core.errors import CheckpointError, ConfigurationError, InputError
from tests.unit.checkpoint.formats.huggingface.family_settings import (
    APERTUS,
    ARCEE,
    BAMBA,
    BLOOM,
    CODEGEN,
    COHERE,
    COHERE2,
    DEEPSEEK,
    DEEPSEEK_V2,
    DEEPSEEK_V32,
    DOTS1,
    ERNIE,
    ERNIE_MOE,
    EXAONE4,
    EXAONE_MOE,
    FALCON,
    FALCON_H1,
    FLEX_OLMO,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_E2B,
    GEMMA4_EXPERTS,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    GPT2,
    GPT_BIGCODE,
    GPT_OSS,
    GPTJ,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    HELIUM,
    HUNYUAN,
    HUNYUAN_MOE,
    JAIS2,
    KIMI_LINEAR,
    LLAMA,
    LLAMA31_SCALING,
    LONGROPE,
    MINIMAX_M2,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    MPT,
    NANOCHAT,
    NEMOTRON,
    NEMOTRON_H,
    NEO,
    NEOX,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    OPT,
    PERSIMMON,
    PHI,
    PHI3,
    PHIMOE,
    QWEN,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    SEED_OSS,
    SMOLLM3,
    SOLAR_OPEN,
    STABLELM,
    STARCODER2,
    XGLM,
    YARN,
    config_of,
)


def test_gpt2_settings_are_those_of_our_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, GPT2 | {"activation_function": "gelu_new", "vocab_size": 50257})
    assert (config.hidden_size, config.ffn_hidden_size, config.num_query_groups, config.kv_channels) == (48, 192, 6, 8)
    assert (config.activation, config.position_embedding_type, config.normalization) == (
        "gelu_tanh",
        "learned_absolute",
        "LayerNorm",
    )
    assert (config.vocab_size, config.max_position_embeddings, config.params_dtype) == (50257, 1024, "float32")
    assert not config.untie_embeddings_and_output_weights
    assert config_of(tmp_path, GPT2 | {"activation_function": "gelu"}).activation == "gelu"


def test_gpt_neo_has_windows_unscaled_scores_and_no_biases_of_queries(tmp_path: Path) -> None:
    config = config_of(tmp_path, NEO)
    assert config.layer_windows == (None, 256, None)
    assert (config.score_scalar, config.has_qkv_bias, config.add_bias_linear) == (1, False, True)
    assert config.activation == "gelu_tanh"
    for values, problem in (
        ({"num_layers": 4}, "does not describe 4 layers of the kinds global"),
        ({"attention_types": [[["global", "axial"], 1], [["global"], 1]]}, "does not describe 3"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            config_of(tmp_path, NEO | values)


def test_llama_31_settings_in_both_forms(tmp_path: Path) -> None:
    older = config_of(tmp_path, LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA31_SCALING})
    parameters = LLAMA31_SCALING | {"rope_theta": 500000.0}
    assert config_of(tmp_path, LLAMA | {"rope_parameters": parameters}) == older
    assert older.rotary_base == 500000
    assert (older.use_rope_scaling, older.rope_scaling_factor) == (True, 8.0)
    assert older.rope_scaling_original_max_position_embeddings == 8192
    assert (older.params_dtype, older.bf16) == ("bfloat16", True)
    assert older.untie_embeddings_and_output_weights
    assert (older.add_bias_linear, older.has_qkv_bias, older.swiglu) == (False, False, True)


def test_qwen_has_biases_on_queries_keys_and_values_only(tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN | {"tie_word_embeddings": True, "rope_theta": 1000000.0})
    assert (config.add_bias_linear, config.has_qkv_bias) == (False, True)
    assert (config.rotary_base, config.untie_embeddings_and_output_weights) == (1000000, False)


def test_qwen3_normalizes_queries_and_keys_and_its_heads_have_a_width_of_their_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN3)
    assert (config.qk_layernorm, config.has_qkv_bias, config.kv_channels) == (True, False, 128)
    assert config_of(tmp_path, QWEN3 | {"head_dim": 16}).kv_channels == 16


def test_a_sliding_window_that_no_layer_uses_is_taken(tmp_path: Path) -> None:
    unused = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
    late = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}
    full = {"layer_types": ["full_attention"] * 3}
    assert config_of(tmp_path, QWEN | unused) == config_of(tmp_path, QWEN | late) == config_of(tmp_path, QWEN | full)


def test_neox_rotates_a_quarter_of_a_head_beside_parallel_residuals(tmp_path: Path) -> None:
    config = config_of(tmp_path, NEOX)
    assert (config.rotary_dim, config.use_parallel_residual, config.activation) == (2, True, "gelu")
    newer = {"rope_parameters": {"rope_theta": 5000, "partial_rotary_factor": 0.5, "rope_type": "default"}}
    older = {"rotary_emb_base": 5000, "rotary_pct": 0.5}
    assert config_of(tmp_path, NEOX | newer) == config_of(tmp_path, NEOX | older)


def test_windows_of_all_layers_and_of_the_later_ones(tmp_path: Path) -> None:
    assert config_of(tmp_path, MISTRAL).layer_windows == (4096,) * 3
    assert config_of(tmp_path, MISTRAL | {"sliding_window": None}).layer_windows == (None,) * 3
    used = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    config = config_of(tmp_path, QWEN | used)
    assert config.layer_windows == (None, 64, 64)
    assert (config.window_size, config.window_attn_skip_freq) == ("63,0", "[0, 1, 1]")
    alternating = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert config_of(tmp_path, QWEN | used | alternating).window_attn_skip_freq == "2"


def test_smollm3_has_layers_without_positions_and_windows_in_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, SMOLLM3)
    assert config.layers_without_rotary == (False, False, False, True, False)
    assert (config.no_rope_freq, config.rotary_base, config.untie_embeddings_and_output_weights) == (
        "4",
        2000000,
        False,
    )
    assert config_of(tmp_path, SMOLLM3 | {"no_rope_layers": [1] * 7}).no_rope_freq is None
    used = {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [0, 1, 1, 1, 0]}
    assert config_of(tmp_path, SMOLLM3 | used).layer_windows == (9, None, None, None, 9)
    for values in ([1, 1, 1, 1], [1, 1, 1, 1, 2], "4"):
        with pytest.raises(ConfigurationError, match="a list of 1 and 0 for each of the 5 layers is expected"):
            config_of(tmp_path, SMOLLM3 | {"no_rope_layers": values})


def test_a_null_stands_for_what_the_other_sizes_give(tmp_path: Path) -> None:
    """Where it is left out, the configuration class has a number of its own."""
    nulls = {"num_key_value_heads": None, "head_dim": None}
    config = config_of(tmp_path, MISTRAL | nulls)
    assert (config.num_query_groups, config.kv_channels) == (6, 8)
    absent = {name: value for name, value in (MISTRAL | {"num_attention_heads": 8}).items() if name not in nulls}
    assert config_of(tmp_path, absent).num_query_groups == 8


HALF_ROTATED = {"num_attention_heads": 3, "num_key_value_heads": 3, "partial_rotary_factor": 0.5}
MODELS = [
    GPT2 | {"n_inner": 100, "tie_word_embeddings": False, "activation_function": "relu2"},
    LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA31_SCALING, "head_dim": 16},
    LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True},
    LLAMA | {"attention_bias": True},
    LLAMA | {"mlp_bias": True},
    LLAMA | {"attention_bias": True, "mlp_bias": True},
    QWEN,
    QWEN3,
    QWEN3 | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    SMOLLM3,
    SMOLLM3 | {"no_rope_layers": [1, 1, 0, 0, 1, 1], "use_sliding_window": True, "sliding_window": 30},
    MISTRAL | {"rope_scaling": YARN | {"beta_fast": 8.0}},
    MIXTRAL | {"sliding_window": 100, "num_experts_per_tok": 3},
    QWEN3_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2},
    QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 9},
    DEEPSEEK,
    DEEPSEEK | {"num_nextn_predict_layers": 2, "q_lora_rank": None, "rope_scaling": YARN},
    DEEPSEEK | {"n_group": 1, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    OLMOE,
    OLMOE | {"norm_topk_prob": True, "attention_bias": True},
    OLMO2 | {"attention_bias": True},
    OLMO3 | {"rope_scaling": YARN, "attention_bias": True},
    GPT_OSS,
    GPT_OSS | {"rope_scaling": YARN | {"attention_factor": 1.7}, "tie_word_embeddings": True},
    GPT_OSS | {"rope_scaling": {"rope_type": "default"}, "layer_types": ["full_attention"] * 3, "swiglu_limit": 3.5},
    MISTRAL | {"rope_scaling": YARN | {"truncate": False, "attention_factor": 0.3}},
    GEMMA2 | {"attn_logit_softcapping": None, "attention_bias": True},
    GEMMA3 | {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    PHI3 | {"partial_rotary_factor": 0.5, "sliding_window": 100, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    PHI3 | HALF_ROTATED | {"rope_scaling": LONGROPE | {"type": "su"}, "original_max_position_embeddings": 128},
    PHI3 | HALF_ROTATED | {"rope_scaling": LONGROPE | {"attention_factor": 1.25}, "sliding_window": 100},
    LLAMA | {"rope_scaling": LONGROPE | {"factor": 4.0, "original_max_position_embeddings": 64}},
    NEOX | {"rotary_pct": 0.5, "use_parallel_residual": False},
    GPTJ,
    GPTJ | {"n_embd": 88, "n_head": 2, "rotary_dim": 30, "n_inner": 100, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    GPT_BIGCODE | {"scale_attn_weights": False, "activation_function": "gelu", "tie_word_embeddings": False},
    PERSIMMON | {"partial_rotary_factor": 0.75},
    PERSIMMON | {"rope_scaling": YARN, "tie_word_embeddings": True},
    GEMMA,
    QWEN2_MOE,
    QWEN2_MOE | {"qkv_bias": False, "use_sliding_window": True, "decoder_sparse_step": 2, "norm_topk_prob": True},
    GLM4,
    GLM4 | {"attention_bias": False, "partial_rotary_factor": 0.34, "rope_scaling": YARN},
    ARCEE | {"mlp_bias": True},
    STARCODER2 | {"sliding_window": 100, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    STARCODER2 | {"use_bias": False, "tie_word_embeddings": False},
    EXAONE4 | {"sliding_window_pattern": 2},
    EXAONE4 | {"sliding_window": None, "rope_scaling": LLAMA31_SCALING},
    HELIUM | {"mlp_bias": True},
    HELIUM | {"attention_bias": True, "mlp_bias": True},
    SEED_OSS | {"attention_out_bias": True, "attention_bias": False, "residual_dropout": 0.2},
    SEED_OSS | {"mlp_bias": True},
    ERNIE,
    ERNIE_MOE | {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_end_index": 3},
    ERNIE_MOE | {"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    STABLELM,
    GLM4_MOE | {"attention_bias": True, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 2},
    GLM4_MOE | {"use_qk_norm": True, "partial_rotary_factor": 0.34, "routed_scaling_factor": 2.5},
    FLEX_OLMO,
    FLEX_OLMO | {"norm_topk_prob": True, "rope_scaling": YARN},
    STABLELM | {"use_parallel_residual": True},
    GRANITE | {"attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 49.0},
    GRANITE | {"attention_bias": True, "mlp_bias": True, "embedding_multiplier": 12.0},
    GRANITE_MOE | {"num_experts_per_tok": 3, "logits_scaling": 6.0},
    COHERE | {"attention_bias": True},
    COHERE | {"use_qk_norm": True},
    STABLELM | {"qk_layernorm": True, "use_parallel_residual": True},
    COHERE2,
    COHERE2 | {"layer_types": ["full_attention"] * 5},
    OLMO | {"clip_qkv": 8.0},
    PHI | {"partial_rotary_factor": 0.34, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    PHI | {"qk_layernorm": True, "resid_pdrop": 0.1},
    FALCON,
    FALCON | {"bias": True, "new_decoder_architecture": True},
    FALCON | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    FALCON | {"parallel_attn": False, "multi_query": False},
    NANOCHAT | {"attention_bias": True},
    DEEPSEEK_V2 | {"routed_scaling_factor": 16.0, "q_lora_rank": None, "rope_scaling": YARN},
    DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "rms_norm_eps": 1e-5},
    DEEPSEEK | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 6, "q_lora_rank": None},
    DEEPSEEK_V32,
    DEEPSEEK_V32 | {"index_n_heads": 8, "index_head_dim": 96, "rope_scaling": YARN, "n_group": 1, "topk_group": 1},
    GLM_MOE_DSA,
    GLM_MOE_DSA | {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1},
    GLM_MOE_DSA | {"indexer_types": None, "index_topk_pattern": "FSS", "num_nextn_predict_layers": 1},
    MINISTRAL | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    MINISTRAL3,
    MINISTRAL3 | {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.3}, "rope_theta": 5000.0, "sliding_window": 100},
    SOLAR_OPEN | {"attention_bias": True, "n_group": 8, "topk_group": 3},
    GLM4_MOE_LITE,
    EXAONE_MOE | {"mlp_layer_types": ["sparse", "dense", "sparse"], "sliding_window_pattern": 2},
    EXAONE_MOE | {"sliding_window": 9, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2},
    QWEN3_NEXT,
    QWEN3_NEXT | {"layer_types": ["full_attention", "linear_attention"] * 2 + ["full_attention"], "head_dim": 16},
    QWEN3_NEXT | {"full_attention_interval": 6, "norm_topk_prob": False, "mlp_only_layers": [1], "rope_scaling": YARN},
    QWEN3_NEXT | {"full_attention_interval": 1, "partial_rotary_factor": 0.5, "attention_bias": True},
    BAMBA
    | {
        "mlp_bias": True,
        "mamba_d_conv": 2,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "z_loss_coefficient": 0.01,
    },
    BAMBA | {"attn_layer_indices": [0, 1, 2], "rope_parameters": {"partial_rotary_factor": 0.25} | YARN},
    BAMBA | {"time_step_limit": [0.01, 2], "attention_bias": True, "mlp_bias": True, "mamba_n_groups": 4},
    GRANITE_HYBRID | {"logits_scaling": 6.0, "time_step_limit": [0.0, {"__float__": "Infinity"}]},
    GRANITE_HYBRID | {"num_local_experts": 0, "position_embedding_type": "rope", "time_step_limit": [0.1, math.inf]},
    GRANITE_HYBRID | {"num_local_experts": 0, "attention_bias": True, "layer_types": ["full_attention"] * 3},
    NEMOTRON_H | {"use_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3, "time_step_min": 0.02},
    NEMOTRON_H | {"layers_block_type": ["attention", "moe", "mamba"], "routed_scaling_factor": 2.5, "head_dim": 16},
    NEMOTRON_H | {"hybrid_override_pattern": "*-*-"},
    NEMOTRON_H | {"hybrid_override_pattern": "ME*E", "moe_latent_size": 20},
    FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mlp_multipliers": [0.7, 0.3]},
    FALCON_H1 | {"mamba_rms_norm": True, "mamba_d_ssm": None, "key_multiplier": 0.39, "attention_in_multiplier": 0.9},
    FALCON_H1 | {"ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.3, 0.5, 0.36], "ssm_out_multiplier": 0.2},
    BLOOM | {"apply_residual_connection_post_layernorm": True, "seq_length": 64},
    MPT | {"max_seq_len": 64, "attn_config": {"clip_qkv": 8.0, "softmax_scale": 0.3}},
    OPT | {"activation_function": "gelu", "dropout": 0.0},
    OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
    XGLM | {"scale_embedding": False, "activation_function": "relu", "ffn_dim": 88},
    APERTUS,
    APERTUS | {"rope_scaling": LLAMA31_SCALING | {"rope_theta": 12000000.0}, "tie_word_embeddings": True},
    APERTUS | {"attention_bias": True},
    HUNYUAN,
    HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "head_dim": 16},
    HUNYUAN_MOE | {"moe_topk": [3, 3, 3], "rope_scaling": YARN, "attention_bias": True},
    MINIMAX_M2,
    MINIMAX_M2 | {"rotary_dim": 8, "num_experts_per_tok": 3},
    PHIMOE | {"attention_bias": True, "lm_head_bias": True},
    PHIMOE | {"router_jitter_noise": 0.0, "sliding_window": 100, "num_local_experts": 4},
    DOTS1 | {"first_k_dense_replace": 1, "max_window_layers": 1, "attention_bias": True},
    DOTS1 | {"n_group": 4, "topk_group": 2, "sliding_window": None, "attention_bias": True},
    NEMOTRON | {"attention_bias": True, "mlp_bias": True, "rope_scaling": YARN},
    NEMOTRON | {"attention_bias": True, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    JAIS2,
    JAIS2 | {"attention_bias": False, "rope_scaling": LLAMA31_SCALING, "tie_word_embeddings": True},
    QWEN3_5 | {"mtp_num_hidden_layers": 0, "tie_word_embeddings": True},
    QWEN3_5 | {"full_attention_interval": 2, "partial_rotary_factor": 0.5},
    KIMI_LINEAR | {"rms_norm_eps": 1e-6, "mlp_layer_types": ["dense", "sparse"] * 2 + ["dense"]},
    KIMI_LINEAR | {"first_k_dense_replace": 2, "q_lora_rank": 24, "qk_rope_head_dim": 3, "num_shared_experts": 2},
    KIMI_LINEAR
    | {"num_expert_group": 4, "topk_group": 4, "moe_renormalize": True, "layer_types": ["full_attention"] * 5},
    GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0},
    GEMMA4
    | {
        "per_layer_config": {
            "5": {"head_dim": 16, "num_key_value_heads": 1},
            "6": {"head_dim": 16, "num_key_value_heads": 1},
        }
    },
    GEMMA4 | GEMMA4_EXPERTS,
    GEMMA4_E2B,
    GEMMA4_E2B | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_double_wide_mlp": False},
    GEMMA4 | {"layer_types": ["full_attention"] * 7, "attention_k_eq_v": True, "attention_bias": True},
    KIMI_LINEAR
    | {"linear_attn_config": {"head_dim": 16, "num_heads": 3, "kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}},
]


@pytest.mark.parametrize("values", MODELS, ids=lambda values: values["model_type"])
def test_a_model_finds_its_family_and_settings_again(tmp_path: Path, values: dict[str, Any]) -> None:
    config = config_of(tmp_path, values)
    family = family_for(config)
    assert family.architecture == values["architectures"][0]
    written = Settings(json.loads(json.dumps(family.write_settings(config))), "written")
    again, read = read_model(written)
    assert again is family
    assert model_features(read) == model_features(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"qk_layernorm": True, "add_qkv_bias": True}, "qk_layernorm True"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p True"),
        ({"rotary_percent": 0.5, "add_qkv_bias": True}, "rotary_dim 4"),
        ({"rotary_interleaved": True, "qk_layernorm": True}, "rotary_interleaved True"),
        ({"swiglu": False}, "activation 'gelu_tanh'"),
        ({"swiglu": False, "quick_geglu": True}, "activation 'quick_geglu'"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset 1.0"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value 7.0"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm True"),
    ],
)
def test_a_model_of_no_family_is_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    config = dataclasses.replace(config_of(tmp_path, LLAMA), **changes)
    with pytest.raises(ConfigurationError, match="no supported Hugging Face architecture") as caught:
        family_for(config)
    assert named in str(caught.value)


def test_a_model_with_sinkhorn_routing_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, MIXTRAL)
    family_for(config)
    with pytest.raises(ConfigurationError, match="routes_by_sinkhorn True"):
        family_for(with_fields(config, moe_router_load_balancing_type=("sinkhorn",)))


FAMILY_SETTINGS = [
    GPT2,
    NEO,
    LLAMA,
    QWEN,
    QWEN3,
    MISTRAL,
    MIXTRAL,
    QWEN3_MOE,
    DEEPSEEK,
    OLMOE,
    NEOX,
    GPTJ,
    CODEGEN,
    GPT_BIGCODE,
    GPT_BIGCODE | {"multi_query": False},
    PERSIMMON,
    OLMO2,
    OLMO3,
    GPT_OSS,
    SMOLLM3,
    PHI3,
    GEMMA2,
    GEMMA3,
    GEMMA,
    QWEN2_MOE,
    SEED_OSS,
    GLM4,
    ARCEE,
    STARCODER2,
    EXAONE4,
    HELIUM,
    ERNIE,
    ERNIE_MOE,
    STABLELM,
    GLM4_MOE | {"num_nextn_predict_layers": 1},
    FLEX_OLMO,
    GRANITE,
    GRANITE_MOE,
    COHERE | {"use_qk_norm": True},
    COHERE2,
    OLMO,
    PHI,
    FALCON | {"new_decoder_architecture": True},
    NANOCHAT,
    DEEPSEEK_V2,
    QWEN3_NEXT,
    BAMBA | {"mamba_proj_bias": True},
    GRANITE_HYBRID,
    NEMOTRON_H | {"hybrid_override_pattern": "M-*E"},
    FALCON_H1 | {"mamba_rms_norm": True},
    BLOOM,
    MPT,
    OPT,
    XGLM,
    MINISTRAL,
    MINISTRAL3,
    SOLAR_OPEN,
    GLM4_MOE_LITE | {"num_nextn_predict_layers": 1},
    DEEPSEEK_V32 | {"num_nextn_predict_layers": 1, "index_n_heads": 3, "index_head_dim": 66},
    GLM_MOE_DSA | {"num_nextn_predict_layers": 1, "index_n_heads": 3},
    EXAONE_MOE,
    APERTUS,
    HUNYUAN,
    HUNYUAN_MOE,
    MINIMAX_M2,
    PHIMOE | {"attention_bias": True, "lm_head_bias": True},
    DOTS1 | {"attention_bias": True},
    NEMOTRON | {"attention_bias": True},
    QWEN3_5,
    QWEN3_5_MOE,
    KIMI_LINEAR,
    GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    GEMMA4 | GEMMA4_EXPERTS,
    JAIS2,
    GEMMA4_E2B,
]


@pytest.mark.parametrize(
    ("values", "dropout", "of_embeddings"),
    [
        (PHI | {"resid_pdrop": 0.1}, 0.1, 0.0),
        (PHI3 | {"embd_pdrop": 0.2}, 0.0, 0.2),
        (GPT2 | {"embd_pdrop": 0.0}, 0.1, 0.0),
        (GPTJ | {"embd_pdrop": 0.1}, 0.0, 0.1),
        (GPT_BIGCODE | {"resid_pdrop": 0.0}, 0.0, 0.1),
        (NEO | {"embed_dropout": 0.3}, 0.0, 0.3),
        (STARCODER2 | {"residual_dropout": 0.1, "embedding_dropout": 0.1}, 0.1, 0.1),
        (BLOOM | {"hidden_dropout": 0.1}, 0.1, 0.0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_layers_and_embeddings_have_dropout_of_their_own(
    tmp_path: Path, values: dict[str, Any], dropout: float, of_embeddings: float
) -> None:
    config = config_of(tmp_path, values)
    assert (config.hidden_dropout, config.dropout_of_embeddings) == (dropout, of_embeddings)
    (family,) = (family for family in FAMILIES if family.model_type == values["model_type"])
    _, again = read_model(Settings(family.write_settings(config), "written"))
    assert (again.hidden_dropout, again.dropout_of_embeddings) == (dropout, of_embeddings)


@pytest.mark.parametrize("values", FAMILY_SETTINGS, ids=lambda values: values["model_type"])
def test_links_cover_every_element_of_both_sides_once(tmp_path: Path, values: dict[str, Any]) -> None:
    config = config_of(tmp_path, values)
    (family,) = (family for family in FAMILIES if family.model_type == values["model_type"])
    links = list(family.links(config))
    for places in (
        [(link.native, link.native_box, link.native_box.slices) for link in links],
        [(link.foreign, link.foreign_box, link.foreign_slices(link.native_box)) for link in links],
    ):
        shapes = shapes_of((name, box) for name, box, _ in places)
        counts = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
        for name, _, slices in places:
            counts[name][slices] += 1
        assert [name for name, count in counts.items() if not (count == 1).all()] == []


def test_one_expert_a_token_is_weighed_by_its_own_score(tmp_path: Path) -> None:
    alone = DEEPSEEK | {"num_experts_per_tok": 1, "n_group": 1, "norm_topk_prob": False}
    config = config_of(tmp_path, alone)
    assert config.moe.moe_router_topk == 1
    written = family_for(config).write_settings(config)
    assert (written["model_type"], written["norm_topk_prob"]) == ("deepseek_v3", False)


PUBLISHED_LATENT = {
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
PUBLISHED = {
    236: PUBLISHED_LATENT
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "norm_topk_prob": False,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-06,
        "rope_scaling": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "vocab_size": 102400,
    },
    16: PUBLISHED_LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "vocab_size": 163840,
    },
}
"""Settings of DeepSeek-V2 and Moonlight as published, by their billions of parameters."""


@pytest.mark.parametrize("billions", PUBLISHED)
def test_published_models_with_mla_have_their_number_of_parameters(tmp_path: Path, billions: int) -> None:
    config = config_of(tmp_path, PUBLISHED[billions])
    family = family_for(config)
    assert [family.architecture] == PUBLISHED[billions]["architectures"]
    shapes = shapes_of((link.foreign, link.foreign_box) for link in family.links(config))
    assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e9) == billions


def test_groups_of_deepseek_are_ranked_by_one_or_two_experts_whatever_a_token_uses(tmp_path: Path) -> None:
    by_default = config_of(tmp_path, DEEPSEEK)
    assert (by_default.moe.moe_router_group_score_topk, by_default.moe.group_score_topk) == (None, 2)
    assert config_of(tmp_path, DEEPSEEK | {"num_experts_per_tok": 6}).moe.moe_router_group_score_topk == 2
    limited = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    assert config_of(tmp_path, DEEPSEEK_V2 | limited).moe.moe_router_group_score_topk == 1
    for every_group in (DEEPSEEK | {"topk_group": 4}, DEEPSEEK_V2 | limited | {"topk_group": 8}):
        assert config_of(tmp_path, every_group).moe.moe_router_num_groups is None


def test_queries_of_ministral_3_grow_with_the_position_as_its_configuration_class_says(tmp_path: Path) -> None:
    config = config_of(tmp_path, MINISTRAL3)
    assert config.attention_temperature == (0.1, 16384)
    assert (config.rotary_base, config.rope.rotary_scaling_factor, config.rotary_amplitude) == (1000000, 16.0, 1.0)
    same = config_of(tmp_path, MINISTRAL3 | {"rope_scaling": YARN | {"llama_4_scaling_beta": 0}})
    assert family_for(same).model_type == "llama"


def test_norms_of_latent_vectors_keep_their_epsilon(tmp_path: Path) -> None:
    """Kimi-K2 and Moonlight state an epsilon, and transformers gives it to the norms of hidden states only."""
    config = config_of(tmp_path, DEEPSEEK | {"model_type": "kimi_k2", "rms_norm_eps": 1e-5})
    assert (config.norm_epsilon, config.epsilon_of_latent_norms) == (1e-5, 1e-6)
    other = with_fields(config, latent_norm_epsilon=1e-5)
    with pytest.raises(ConfigurationError, match=r"cannot represent epsilon_of_latent_norms 1e-05$"):
        family_for(other)


def test_scores_that_grow_beside_plain_positions_have_no_folder(tmp_path: Path) -> None:
    """transformers makes them grow with YaRN alone."""
    plain = config_of(tmp_path, DEEPSEEK)
    assert plain.rope.rope_type == "rope"
    assert family_for(with_fields(plain, rotary_scaling_factor=4.0)).model_type == "deepseek_v3"
    grown = with_fields(plain, rotary_scaling_factor=4.0, mscale_all_dim=1.0)
    with pytest.raises(ConfigurationError, match=r"DeepseekV3ForCausalLM, cannot represent mscale_all_dim 1\.0$"):
        family_for(grown)


def test_mixtral_always_says_how_wide_a_head_is(tmp_path: Path) -> None:
    """transformers does not load one without it, where YaRN stretches positions."""
    config = config_of(tmp_path, MIXTRAL)
    assert family_for(config).write_settings(config)["head_dim"] == config.kv_channels


@pytest.mark.parametrize("base", [LLAMA, NEOX, GEMMA3], ids=["llama", "neox", "gemma3"])
def test_the_older_description_of_positions_counts_beside_the_newer(tmp_path: Path, base: dict[str, Any]) -> None:
    newer = {"rope_type": "linear", "factor": 8.0}
    newer = {"full_attention": newer, "sliding_attention": {"rope_type": "default"}} if base is GEMMA3 else newer
    older = {"rope_type": "linear", "factor": 2.0}
    assert config_of(tmp_path, base | {"rope_parameters": newer}).rotary_seq_len_interpolation_factor == 8.0
    both = base | {"rope_parameters": newer, "rope_scaling": older}
    assert config_of(tmp_path, both).rotary_seq_len_interpolation_factor == 2.0
    assert (
        config_of(tmp_path, base | {"rope_parameters": newer, "rope_scaling": None}).rotary_seq_len_interpolation_factor
        == 8.0
    )


def test_heads_of_neox_are_as_wide_as_they_are_said_to_be(tmp_path: Path) -> None:
    assert config_of(tmp_path, NEOX | {"head_dim": 8}) == config_of(tmp_path, NEOX)


REFUSED = [
    (PHI, {"embd_pdrop": 1.0}, "embd_pdrop is 1.0; a number below 1 is expected"),
    (DEEPSEEK, {"attention_bias": True}, "attention_bias is true"),
    (DEEPSEEK_V2, {"mlp_bias": True}, "mlp_bias is true"),
    (KIMI_LINEAR, {"attention_bias": True}, "attention_bias is true"),
    (FALCON_H1, {"attention_bias": True}, "attention_bias is true"),
    (LLAMA, {"attention_bias": 1}, "attention_bias is 1; true or false is expected"),
    (LLAMA, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    (LLAMA, {"rope_scaling": YARN | {"truncate": 0}}, "truncate is 0; true or false is expected"),
    (LLAMA, {"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor is 0; a number greater than 0"),
    (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor is 1.5"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    (LLAMA, {"rope_scaling": LLAMA31_SCALING | {"factor": None}}, "factor is missing"),
    (LLAMA, {"rope_theta": 0.5}, "rope_theta is 0.5; 1 or more is expected"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    (LLAMA, {"num_key_value_heads": 4}, "num_attention_heads 6 is not divisible by num_key_value_heads 4"),
    (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    (LLAMA, {"hidden_size": "48"}, "hidden_size is '48'"),
    (LLAMA, {"head_dim": 7}, "head_dim is 7; rotary"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config is set"),
    (LLAMA, {"auto_map": {"AutoModel": "x.py"}}, "auto_map is set"),
    (
        QWEN,
        {"layer_types": ["full_attention", "sliding_attention", "x"]},
        ("layer_types contains x; supported values are full_"),
    ),
    (QWEN, {"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries, but the model has 3 layers"),
    (QWEN, {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is false"),
    (NEOX, {"attention_bias": False}, "attention_bias is false"),
    (NEOX, {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    (NEOX, {"rotary_pct": 1.5}, "rotary_pct is 1.5"),
    (NEOX, {"head_dim": 16}, "head_dim is 16, but only 8 (hidden_size / num_attention_heads) is supported"),
    (MISTRAL, {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "as a Ministral"),
    (
        QWEN3,
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic' is not supported",
    ),
    (NEOX, {"num_attention_heads": 7}, "hidden_size 48 is not divisible by num_attention_heads 7"),
    (GPTJ, {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    (GPTJ, {"rotary_dim": 5}, "rotary_dim is 5; an even number up to the head size, 8, is expected"),
    (GPTJ, {"rotary_dim": 10}, "rotary_dim is 10; an even number up to the head size, 8"),
    (CODEGEN, {"n_head": 6}, "n_head 6 is not divisible by 4"),
    (GPT_BIGCODE, {"add_cross_attention": True}, "add_cross_attention is true"),
    (PERSIMMON, {"num_key_value_heads": 2}, "num_key_value_heads is 2, but only 6 is supported"),
    (PERSIMMON, {"head_dim": 16}, "head_dim is 16, but only 8 is supported"),
    (PERSIMMON, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    (PERSIMMON, {"hidden_dropout": 0.1}, "hidden_dropout is 0.1"),
    (DEEPSEEK_V32, {"index_head_dim": 32}, "index_head_dim is 32; it contains the 64 channels of qk_rope_head_dim"),
    (DEEPSEEK_V32, {"layer_types": ["full_attention"] * 3}, "every layer has an indexer"),
    (DEEPSEEK_V32, {"q_lora_rank": None}, "q_lora_rank is missing"),
    (DEEPSEEK_V32, {"mlp_bias": True}, "mlp_bias is true"),
    (DEEPSEEK_V32, {"index_topk": 0}, "index_topk is 0"),
    (GLM_MOE_DSA, {"indexer_types": ["shared", "full", "full"]}, "the first of indexer_types is shared; full is"),
    (GLM_MOE_DSA, {"indexer_types": ["full"] * 2}, "full or shared for each of the 3 layers is expected"),
    (GLM_MOE_DSA, {"indexer_types": None, "index_topk_freq": "2"}, "index_topk_freq '2' and index_skip_topk_offset 2"),
    (
        PHI3,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type 'linear' is not supported in phi3",
    ),
    (PHI3, {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "long_factor is missing"),
    (PHI3, {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 3}}, "a list of 4 numbers greater than 0 is expected"),
    (PHI3, {"rope_scaling": LONGROPE | {"short_factor": [1.0, 0, 1, 1]}}, "a list of 4 numbers greater than 0"),
    (PHI3, {"rope_scaling": LONGROPE | {"attention_factor": 0}}, "attention_factor is 0"),
    (OLMO3, {"rope_scaling": LONGROPE}, "rope_type 'longrope' is not supported"),
    (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
    (GEMMA2, {"hidden_activation": "gelu"}, 'hidden_activation is "gelu"'),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    (GEMMA3, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
    (GEMMA3, {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, 'rope_type is "linear"'),
    (GEMMA3, {"rope_local_base_freq": 0.5}, "rope_theta of sliding-window layers is 0.5"),
    (GEMMA4, {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2: none of the first 5 layers has the window"),
    (GEMMA4, {"num_kv_shared_layers": 7}, "num_kv_shared_layers is 7: all of the 7 layers would share"),
    (GEMMA4, {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1; a whole number from 0"),
    (GEMMA4_E2B, {"vocab_size_per_layer_input": 98}, "vocab_size_per_layer_input is 98, but only vocab_size"),
    (GEMMA4_E2B | GEMMA4_EXPERTS, {}, "use_double_wide_mlp is true, but layers with experts"),
    (GEMMA4, {"hidden_size_per_layer_input": None}, "vocab_size_per_layer_input is 262144, but only vocab_size"),
    (GEMMA4, {"use_bidirectional_attention": "all"}, 'use_bidirectional_attention is "all"'),
    (GEMMA4, {"enable_moe_block": True, "moe_intermediate_size": 20, "top_k_experts": 2}, "num_experts is missing"),
    (GEMMA4, {"global_head_dim": 15}, "attention with 6 heads of 15 channels in 2 groups"),
    (GEMMA4, {"per_layer_config": {"1": {"head_dim": 8}}}, "different shapes of attention in layers with a window"),
    (GEMMA4, {"per_layer_config": {"1": {"intermediate_size": 8}}}, "intermediate_size: only head_dim and num_key_va"),
    (GEMMA4, {"rope_parameters": {"full_attention": {}}}, "rope_parameters must have the objects full_attention and"),
    (
        GEMMA4,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.1},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        "2 to all of the 16 channels of a head must rotate",
    ),
    (MISTRAL, {"sliding_window": 0}, "sliding_window is 0"),
    (MISTRAL, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    (GPT2, {"activation_function": "tanh"}, "activation_function 'tanh'"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention is true"),
    (GPT2, {"n_head": 7}, "n_embd 48 is not divisible by n_head 7"),
    (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but only 0 is supported"),
    (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but the model has 4 experts"),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0"),
    (QWEN3_MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, but the model has 6 experts"),
    (QWEN3_MOE, {"mlp_only_layers": 2}, "mlp_only_layers is 2; a list of layer numbers"),
    (
        QWEN3_MOE,
        {"mlp_only_layers": [0, 1, 2]},
        "decoder_sparse_step 1 and mlp_only_layers leave no layer with experts",
    ),
    (GEMMA, {"hidden_act": "silu"}, 'hidden_act is "silu"'),
    (GEMMA, {"hidden_activation": "gelu"}, 'hidden_activation is "gelu"'),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    (QWEN2_MOE, {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is false"),
    (QWEN2_MOE, {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers is '2'"),
    (QWEN2_MOE, {"use_sliding_window": True, "sliding_window": None}, "sliding_window is None"),
    (
        QWEN3_NEXT,
        {"layer_types": ["sliding_attention"] * 5},
        "layer_types contains sliding_attention; supported values are full_attention and linear_attention",
    ),
    (QWEN3_NEXT, {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but the model has 5 layers"),
    (QWEN3_NEXT, {"linear_num_key_heads": 4}, "linear_num_value_heads 6 is not divisible by linear_num_key_heads 4"),
    (QWEN3_5, {"attn_output_gate": False}, "attn_output_gate is false, but only true is supported"),
    (QWEN3_5, {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but the model has 5 layers"),
    (QWEN3_5_MOE, {"norm_topk_prob": False}, "norm_topk_prob is false, but only true is supported"),
    (QWEN3_5_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers is [1], but only [] is supported"),
    (KIMI_LINEAR, {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    (KIMI_LINEAR, {"num_key_value_heads": 2}, "num_key_value_heads is 2; MLA needs one per attention head (6"),
    (KIMI_LINEAR, {"moe_renormalize": False}, "norm_topk_prob is false, but only true is supported"),
    (KIMI_LINEAR, {"num_local_experts": 8}, "num_local_experts is 8, but another name of this setting has 12"),
    (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope is false, but only true is supported"),
    (KIMI_LINEAR, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, but only 0 is supported"),
    (
        KIMI_LINEAR,
        {"mlp_layer_types": ["dense"] * 5},
        "none of the 5 layers has experts; use mlp_layer_types with at least one sparse",
    ),
    (KIMI_LINEAR, {"mlp_layer_types": ["moe"] * 5}, "dense or sparse for each of the 5 layers is expected"),
    (
        KIMI_LINEAR,
        {"linear_attn_config": {"kda_layers": [0, 1, 2, 3], "full_attn_layers": [4]}},
        "kda_layers and full_attn_layers must contain each of the 5 layers, from 1 on, once",
    ),
    (BAMBA, {"mamba_d_head": 8}, "mamba_n_heads 8 x mamba_d_head 8 is not the width 96 of Mamba-2"),
    (BAMBA, {"mamba_n_groups": 3}, "mamba_n_heads 8 is not divisible by mamba_n_groups 3"),
    (BAMBA, {"time_step_limit": [0.1]}, "time_step_limit is [0.1]; two numbers"),
    (BAMBA, {"time_step_limit": [1.0, 0.1]}, "time_step_limit is [1.0, 0.1]; two numbers"),
    (BAMBA, {"attn_layer_indices": ["1"]}, "attn_layer_indices is ['1']; a list of layer numbers"),
    (BAMBA, {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, but only 0.5 is supported"),
    (GRANITE_HYBRID, {"layer_types": ["mamba"] * 2}, "layer_types has 2 entries, but the model has 3 layers"),
    (GRANITE_HYBRID, {"layer_types": ["moe"] * 3}, "layer_types contains moe; supported values are linear_attention"),
    (NEMOTRON_H, {"mlp_bias": True}, "mlp_bias is true"),
    (NEMOTRON_H, {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    (NEMOTRON_H, {"mlp_hidden_act": "silu"}, 'mlp_hidden_act is "silu"'),
    (NEMOTRON_H, {"hybrid_override_pattern": "MX"}, "layers_block_type contains MX; supported values are linear_att"),
    (NEMOTRON_H, {"n_groups": 3}, "mamba_num_heads 8 is not divisible by n_groups 3"),
    (FALCON_H1, {"projectors_bias": True}, "projectors_bias is true"),
    (FALCON_H1, {"mlp_multipliers": [1.0]}, "mlp_multipliers is [1.0]; a list of 2 numbers greater than 0"),
    (FALCON_H1, {"ssm_multipliers": [1.0, 1.0, 0, 1.0, 1.0]}, "a list of 5 numbers greater than 0"),
    (FALCON_H1, {"mamba_d_ssm": 100}, "mamba_n_heads 8 x mamba_d_head 12 is not the width 100 of Mamba-2"),
    (GLM4, {"partial_rotary_factor": 0}, "partial_rotary_factor is 0.0"),
    (GLM4, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    (ARCEE, {"hidden_act": "silu"}, 'hidden_act is "silu"'),
    (STARCODER2, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    (EXAONE4, {"layer_types": ["full_attention"] * 3}, "sliding_window is set, but no layer uses it"),
    (EXAONE4, {"sliding_window_pattern": "LLG"}, "sliding_window_pattern is 'LLG'"),
    (EXAONE4, {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window is None"),
    (GRANITE, {"logits_scaling": 0}, "logits_scaling is 0; a number greater than 0"),
    (COHERE2, {"head_dim": 16}, "hidden_size 48 must be num_attention_heads 6 times head_dim 16"),
    (COHERE2, {"sliding_window": None}, "sliding_window is None"),
    (OLMO, {"clip_qkv": 0}, "clip_qkv is 0"),
    (PHI, {"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    (FALCON, {"alibi": True}, "alibi is true"),
    (FALCON, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2; with this architecture use 1"),
    (FALCON, {"parallel_attn": False, "attention_dropout": 0.1}, "attention_dropout is 0.1"),
    (NANOCHAT, {"hidden_act": "silu"}, 'hidden_act is "silu"'),
    (DEEPSEEK_V2, {"topk_method": "group_limited_greedy", "topk_group": 2}, "n_group is missing"),
    (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported values are greedy and group_"),
    (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob is true"),
    (DEEPSEEK_V2, {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    (MINISTRAL, {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window is None"),
    (MINISTRAL3, {"rope_scaling": {"type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}}, 'type is "linear"'),
    (MINISTRAL3, {"rope_scaling": YARN}, "llama_4_scaling_beta is missing"),
    (
        GLM4_MOE_LITE,
        {"mlp_layer_types": ["sparse"]},
        "dense or sparse for each of the 3 layers is",
    ),
    (EXAONE_MOE, {"first_k_dense_replace": 3}, "none of the 3 layers has experts; use mlp_layer_types with"),
    (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    (HUNYUAN, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    (HUNYUAN, {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha is -1.0; a number of 0 or more"),
    (HUNYUAN_MOE, {"moe_topk": [1, 2, 2]}, "num_experts_per_tok is [1, 2, 2]; a positive whole number"),
    (HUNYUAN_MOE, {"moe_topk": 7}, "num_experts_per_tok is 7, but the model has 6 experts"),
    (MINIMAX_M2, {"num_experts_per_tok": 1}, "num_experts_per_tok is 1; use 2 or more"),
    (MINIMAX_M2, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but only 0 is supported"),
    (MINIMAX_M2, {"rotary_dim": 32}, "partial_rotary_factor is 2.0"),
    (PHIMOE, {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, but only 2 is supported"),
    (PHIMOE, {"num_local_experts": 1}, "num_local_experts is 1, but transformers chooses two experts"),
    (PHIMOE, {"input_jitter_noise": 0.1}, "input_jitter_noise is 0.1, but only 0 is supported"),
    (PHIMOE, {"lm_head_bias": True, "tie_word_embeddings": True}, "tie_word_embeddings is true"),
    (
        PHIMOE,
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        "rope_type 'longrope' is not supported for this architecture",
    ),
    (ERNIE_MOE, {"use_bias": True}, "use_bias is true, but only false is supported"),
    (ERNIE_MOE, {"moe_k": 1}, "moe_k is 1; use 2 or more"),
    (ERNIE_MOE, {"moe_layer_start_index": 3}, "none of the 3 layers has experts by moe_layer_start_index 3"),
    (DOTS1, {"norm_topk_prob": None}, "norm_topk_prob is false, but only true is supported"),
    (DOTS1, {"n_routed_experts": None}, "n_routed_experts is missing"),
    (DOTS1, {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window is None"),
    (NEMOTRON, {"hidden_act": "silu"}, 'hidden_act is "silu"'),
    (JAIS2, {"hidden_act": "silu"}, 'hidden_act is "silu"'),
    (APERTUS, {"hidden_act": "silu"}, 'hidden_act is "silu"'),
    (APERTUS, {"rope_scaling": None}, "rope_scaling is null, which releases of transformers interpret differently"),
    (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads is 2; MLA needs one per attention head (6"),
    (DEEPSEEK, {"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5"),
    (DEEPSEEK, {"n_group": 3}, "n_group 3 must divide the 16 experts"),
    (DEEPSEEK, {"topk_group": 1, "num_experts_per_tok": 5}, "topk_group 1 groups have only 4 experts each"),
    (DEEPSEEK, {"first_k_dense_replace": 3}, "none of the 3 layers has experts; use 2 or less"),
    (
        DEEPSEEK,
        {"num_experts_per_tok": 1, "n_group": 1},
        "norm_topk_prob is true, but only false is supported: the score of a single expert is its weight",
    ),
    (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob is false, but only true is supported"),
    (DEEPSEEK, {"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
    (DEEPSEEK, {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim is set without mscale"),
    (DEEPSEEK, {"rope_scaling": YARN | {"factor": 1.0}}, "factor is 1.0; a number above 1"),
    (
        DEEPSEEK,
        {"rope_scaling": YARN | {"type": "linear"}},
        ("rope_type 'linear' is not supported for this architecture"),
    ),
    (DEEPSEEK, {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
    (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None"),
    (BLOOM, {"slow_but_exact": True}, "slow_but_exact is true"),
    (BLOOM, {"n_embed": 64}, "hidden_size is 48, but n_embed, another name of it, is 64"),
    (BLOOM, {"n_head": 7}, "hidden size 48 is not divisible by 7 attention heads"),
    (MPT, {"expansion_ratio": 3}, "expansion_ratio is 3"),
    (MPT, {"no_bias": False}, "no_bias is false"),
    (MPT, {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm', but transformers ignores it"),
    (MPT, {"embedding_fraction": 0.1}, "embedding_fraction is not 1"),
    (MPT, {"logit_scale": "inv_sqrt_d_model"}, 'logit_scale is "inv_sqrt_d_model"'),
    (MPT, {"attn_config": {"attn_type": "multiquery_attention"}}, 'attn_type is "multiquery_attention"'),
    (MPT, {"attn_config": {"alibi": False}}, "alibi is false"),
    (MPT, {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max is 16"),
    (MPT, {"attn_config": {"prefix_lm": True}}, "prefix_lm is true"),
    (MPT, {"attn_config": {"qk_ln": True}}, "qk_ln is true"),
    (MPT, {"attn_config": {"attn_pdrop": 0.1}}, "attn_pdrop is 0.1"),
    (MPT, {"emb_pdrop": 0.1}, "emb_pdrop is 0.1"),
    (OPT, {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32"),
    (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before is false"),
    (OPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is true"),
    (OPT, {"layerdrop": 0.1}, "layerdrop is 0.1"),
    (OPT, {"activation_function": "silu"}, "activation_function 'silu' is not supported"),
    (XGLM, {"add_cross_attention": True}, "add_cross_attention is true"),
    (XGLM, {"activation_dropout": 0.1}, "activation_dropout is 0.1"),
    (XGLM, {"pad_token_id": 5}, "pad_token_id is 5; 0, 1 or null is expected"),
    (LLAMA, {"architectures": ["TrOCRForCausalLM"]}, "TrOCRForCausalLM is not supported; docs/huggingface.md"),
    (LLAMA, {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is not supported; docs/huggingface.md"),
    (
        LLAMA,
        {"architectures": ["Qwen9MoeForCausalLM"]},
        "MoeForCausalLM); docs/huggingface.md",
    ),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported"),
    (LLAMA, {"architectures": None, "model_type": "mamba"}, "model_type 'mamba' is not supported"),
]


@pytest.mark.parametrize(("base", "change", "message"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        config_of(tmp_path, base | change)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("interval", "number", "message"),
    [
        (5, 2, "num_nextn_predict_layers is 2; the architecture has one MTP module or none"),
        (4, 1, "the MTP module has attention, but the last layer has linear attention"),
    ],
)
def test_mtp_modules_that_qwen3_next_does_not_have_are_refused(interval: int, number: int, message: str) -> None:
    values = QWEN3_NEXT | {"full_attention_interval": interval, "num_nextn_predict_layers": number}
    with pytest.raises(ConfigurationError, match=message):
        read_model(Settings(values, "config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "is 2; published models have one MTP module or none"),
        (
            {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M-"},
            r"mtp_layers_block_type is 'M-'; only \['full_attention', 'moe'\] is supported",
        ),
    ],
)
def test_mtp_modules_that_nemotron_h_does_not_have_are_refused(changes: dict[str, Any], message: str) -> None:
    values = NEMOTRON_H | {"hybrid_override_pattern": "M*E"} | changes
    with pytest.raises(ConfigurationError, match=message):
        read_model(Settings(values, "config.json"))


def test_qwen3_next_has_delta_nets_gates_and_zero_centered_norms(tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN3_NEXT)
    assert config.hybrid_layers == "GE GE GE *E GE"
    assert (config.hybrid.linear_attention_freq, config.hybrid.linear_value_head_dim) == ("4", 128)
    assert (config.attention_output_gate, config.apply_layernorm_1p, config.qk_layernorm) == (True, True, True)
    assert (config.rotary_dim, config.kv_channels, config.moe.moe_router_topk) == (64, 256, 10)
    assert not config.moe.moe_router_pre_softmax
    same = with_fields(config, linear_attention_freq="[1]*3+[0,1]")
    assert family_for(same).model_type == "qwen3_next"
    with pytest.raises(
        ConfigurationError, match=r"Qwen3NextForCausalLM, cannot represent attention_output_gate False$"
    ):
        family_for(with_fields(config, attention_output_gate=False))


def test_qwen3_5_moe_is_exported_as_qwen3_next_without_a_record_of_its_folder(tmp_path: Path) -> None:
    """Both compute the same; they differ in the names of the projections."""
    config = config_of(tmp_path, QWEN3_5_MOE)
    assert config.hybrid_layers == "GE GE GE *E GE"
    assert (config.moe.moe_router_topk, config.moe.moe_shared_expert_gate) == (8, True)
    assert family_for(config).model_type == "qwen3_next"
    (family,) = (family for family in FAMILIES if family.model_type == "qwen3_5_moe_text")
    _, again = read_model(Settings(family.write_settings(config), "written"))
    assert model_features(again) == model_features(config)


def test_kimi_linear_has_kda_and_mla_without_positions(tmp_path: Path) -> None:
    config = config_of(tmp_path, KIMI_LINEAR)
    assert config.hybrid_layers == "K- KE KE KE *E"
    assert (config.position_embedding_type, config.mla.multi_latent_attention, config.mla.q_lora_rank) == (
        "none",
        True,
        None,
    )
    assert (config.norm_epsilon, config.epsilon_of_latent_norms) == (1e-5, 1e-6)
    assert (config.hybrid.linear_num_value_heads, config.hybrid.linear_key_head_dim) == (4, 128)
    assert (config.moe.num_experts, config.moe.moe_router_topk_scaling_factor) == (12, 2.446)
    assert config_of(tmp_path, KIMI_LINEAR | {"num_experts_per_token": 2}).moe.moe_router_topk == 2


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_of(tmp_path, LLAMA | {"attention_bias": 1, "mlp_bias": 0, "hidden_act": "relu"})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "a JSON list; an object is expected")])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        hugging_face_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        hugging_face_config(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        hugging_face_config(tmp_path / "absent")


def test_a_model_that_no_family_expresses_is_rejected_with_what_the_nearest_lacks(tmp_path: Path) -> None:
    config = with_fields(config_of(tmp_path, MIXTRAL), moe_expert_capacity_factor=2.0)
    with pytest.raises(ConfigurationError) as caught:
        family_for(config)
    assert str(caught.value) == (
        "no supported Hugging Face architecture can represent this model; the most similar, MixtralForCausalLM, "
        "cannot represent moe_expert_capacity_factor 2.0"
    )


def test_seed_oss_has_optional_biases_and_the_dropout_of_its_configuration_class(tmp_path: Path) -> None:
    config = config_of(tmp_path, SEED_OSS)
    assert config.has_qkv_bias
    assert (config.hidden_dropout, config.attention_dropout, config.kv_channels) == (0.1, 0.1, 128)
    assert not config_of(tmp_path, SEED_OSS | {"attention_bias": False}).has_qkv_bias


def test_bloom_and_mpt_have_linear_biases_and_the_names_of_published_folders(tmp_path: Path) -> None:
    published = {
        "architectures": ["MPTForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
    }
    config = config_of(tmp_path, MPT | published | {"emb_pdrop": 0, "resid_pdrop": 0, "learned_pos_emb": True})
    assert config == config_of(tmp_path, MPT)
    assert (config.activation, config.norm_parameter_names, config.ffn_hidden_size) == ("gelu", ("weight",), 192)
    older = {name: value for name, value in BLOOM.items() if name not in ("hidden_size", "n_head")}
    bloom = config_of(tmp_path, older | {"n_embed": 48, "num_attention_heads": 6})
    assert bloom == config_of(tmp_path, BLOOM)
    assert config.alibi_slopes == bloom.alibi_slopes == (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    assert (bloom.add_embedding_norm, bloom.activation, bloom.add_bias_linear) == (True, "gelu_tanh", True)


def test_opt_and_xglm_have_positions_from_row_2_on(tmp_path: Path) -> None:
    opt, xglm = config_of(tmp_path, OPT), config_of(tmp_path, XGLM)
    assert (opt.position_embedding_type, opt.num_position_embeddings, opt.activation) == (
        "learned_absolute",
        514,
        "relu",
    )
    assert (xglm.position_embedding_type, xglm.position_embedding_offset, xglm.activation) == ("sinusoidal", 2, "gelu")
    assert xglm.scale_embeddings
    assert opt.hidden_dropout == xglm.hidden_dropout == 0.1
