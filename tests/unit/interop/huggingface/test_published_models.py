"""A preset is the model that was published."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.checkpoint.formats.huggingface.families import family_for, read_model
from megatron.checkpoint.formats.huggingface.family import model_features
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.config.arguments import resolve_arguments
from tests.unit.interop.huggingface.family_settings import (
    GPT_OSS,
    MIXTRAL,
    OLMO3,
    OLMOE,
    QWEN3_MOE,
)

PUBLISHED_GPT_OSS = GPT_OSS | {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PUBLISHED = {
    "mixtral-8x7b": MIXTRAL
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": QWEN3_MOE
    | {
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 151936,
    },
    "olmoe-7b": OLMOE
    | {
        "clip_qkv": None,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rope_theta": 10000.0,
        "vocab_size": 50304,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "gpt-oss-20b": PUBLISHED_GPT_OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
    },
    "gpt-oss-120b": PUBLISHED_GPT_OSS
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
    },
    "olmo3-7b": OLMO3
    | {
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "vocab_size": 100278,
    },
}
"""What decides the published models, as far as the presets have it too."""


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_the_published_model(preset: str) -> None:
    words = f"--model-preset {preset} --mock-data --train-iters 4 --lr 1e-4 --global-batch-size 96"
    model = resolve_arguments(words.split(), 1, needs_files=False).config.model
    family, published = read_model(Settings(PUBLISHED[preset], preset))
    lengths = {name: getattr(published, name) for name in ("vocab_size", "max_position_embeddings")}
    model = dataclasses.replace(model, **lengths)
    assert family_for(model) is family
    if preset == "deepseek-v3":
        # Its positions were stretched after pretraining, and Settings without files have no layer of further tokens.
        published = dataclasses.replace(published, rope_type="rope", rotary_scaling_factor=1.0, mtp_num_layers=1)
    if preset == "olmo3-7b":
        published = dataclasses.replace(published, rope_type=None, rotary_scaling_factor=1.0, rotary_base_local=None)
    assert model_features(model) == model_features(published)
