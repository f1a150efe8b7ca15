"""Tiny random models made by transformers, what it computes with them, and a checkpoint source in memory.

transformers takes seconds to import and is a development dependency only: nothing here imports it before it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.checkpoint_source import CheckpointSource, TensorInfo
from megatron.core.sharding import Box

# (Sizes differ from each other, so that no transposed dimension can pass.)
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_DECODER = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3, "vocab_size": 101}

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"class": "GPT2", "n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 320, "vocab_size": 101},
    "gpt2_untied": {
        "class": "GPT2",
        "n_embd": 40,
        "n_head": 4,
        "n_layer": 2,
        "n_inner": 72,
        "n_positions": 96,
        "vocab_size": 83,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
    },
    "llama31": {
        "class": "Llama",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": _LLAMA3_SCALING,
        "tie_word_embeddings": False,
    },
    "llama_tied": {
        "class": "Llama",
        **_DECODER,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0},
        "tie_word_embeddings": True,
    },
    "qwen_untied": {
        "class": "Qwen2",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "qwen_tied": {
        "class": "Qwen2",
        **_DECODER,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "class": "Qwen3",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "qwen3_windows": {
        "class": "Qwen3",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 30,
        "max_window_layers": 2,
    },
    "mistral": {
        "class": "Mistral",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        "sliding_window": 20,
        "tie_word_embeddings": False,
    },
    "neo": {
        "class": "GPTNeo",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_layers": 3,
        "num_heads": 6,
        "vocab_size": 101,
        "max_position_embeddings": 320,
        "attention_types": [[["global", "local"], 1], [["local"], 1]],
        "window_size": 20,
    },
    "neox": {
        "class": "GPTNeoX",
        **_DECODER,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.34},
        "use_parallel_residual": True,
    },
    "neox_serial": {
        "class": "GPTNeoX",
        **_DECODER,
        "num_attention_heads": 6,
        "max_position_embeddings": 512,
        "hidden_act": "gelu_new",
        "use_parallel_residual": False,
        "tie_word_embeddings": False,
    },
    "gptj": {
        "class": "GPTJ",
        "hidden_size": 48,
        "n_inner": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "n_positions": 512,
        "rotary_dim": 6,
        "vocab_size": 101,
    },
    "codegen": {
        "class": "CodeGen",
        "hidden_size": 48,
        "n_inner": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "n_positions": 512,
        "rotary_dim": 4,
        "vocab_size": 101,
    },
    "gpt_bigcode": {
        "class": "GPTBigCode",
        "hidden_size": 48,
        "n_inner": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "n_positions": 512,
        "vocab_size": 101,
    },
    "persimmon": {
        "class": "Persimmon",
        **_DECODER,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "olmo2": {
        "class": "Olmo2",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "phi3": {
        "class": "Phi3",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        "sliding_window": 50,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "gemma2": {
        "class": "Gemma2",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "query_pre_attn_scalar": 10,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "sliding_window": 30,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "class": "Gemma3",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "query_pre_attn_scalar": 10,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    },
    "mixtral": {
        "class": "Mixtral",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "class": "Qwen3Moe",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
        },
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "olmoe": {
        "class": "Olmoe",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    "deepseek": {
        "class": "DeepseekV3",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 512,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "class": "GptOss",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 20,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "sliding_window": 30,
        "swiglu_limit": 0.7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "tie_word_embeddings": False,
    },
    "olmo3": {
        "class": "Olmo3",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.3,
            },
        },
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "class": "SmolLM3",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 30,
        "pad_token_id": None,
        "tie_word_embeddings": True,
    },
    "gemma": {
        "class": "Gemma",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "head_dim": 16,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "qwen2_moe": {
        "class": "Qwen2Moe",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 30,
        "max_window_layers": 2,
        "tie_word_embeddings": False,
    },
    "seed_oss": {
        "class": "SeedOss",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "glm4": {
        "class": "Glm4",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "head_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "arcee": {
        "class": "Arcee",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "starcoder2": {
        "class": "Starcoder2",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "sliding_window": 20,
        "tie_word_embeddings": False,
    },
    "exaone4": {
        "class": "Exaone4",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": _LLAMA3_SCALING,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": False,
    },
    "exaone4_without_window": {
        "class": "Exaone4",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "tie_word_embeddings": True,
    },
    "helium": {
        "class": "Helium",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "ernie4_5": {
        "class": "Ernie4_5",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "use_bias": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "stablelm": {
        "class": "StableLm",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "use_qkv_bias": True,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "class": "Glm4Moe",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.7,
        "moe_intermediate_size": 20,
        "tie_word_embeddings": False,
    },
    "flex_olmo": {
        "class": "FlexOlmo",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    "granite": {
        "class": "Granite",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.7,
        "logits_scaling": 49.0,
        "tie_word_embeddings": False,
    },
    "granite_moe": {
        "class": "GraniteMoe",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "intermediate_size": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.25,
        "logits_scaling": 6.0,
        "tie_word_embeddings": False,
    },
    "cohere": {
        "class": "Cohere",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "logit_scale": 0.3,
        "pad_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    },
    "stablelm_parallel": {
        "class": "StableLm",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "use_parallel_residual": True,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
    "olmo": {
        "class": "Olmo",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "clip_qkv": 0.8,
        "pad_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    "phi": {
        "class": "Phi",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
    "falcon_multi_query": {
        "class": "Falcon",
        **_DECODER,
        "ffn_hidden_size": 88,
        "num_attention_heads": 6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "falcon_two_norms": {
        "class": "Falcon",
        **_DECODER,
        "ffn_hidden_size": 88,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "bias": True,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "falcon_serial": {
        "class": "Falcon",
        **_DECODER,
        "ffn_hidden_size": 88,
        "num_attention_heads": 6,
        "multi_query": False,
        "parallel_attn": False,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "cohere2": {
        "class": "Cohere2",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "logit_scale": 0.3,
        "sliding_window": 30,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    },
    "nanochat": {
        "class": "NanoChat",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "final_logit_softcapping": 4.0,
        "pad_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    "deepseek_v2": {
        "class": "DeepseekV2",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 512,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.7,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
        },
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        "class": "Qwen3Next",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "mlp_only_layers": [2],
        # Heads of random delta-nets are short; a smaller epsilon of their norm would magnify rounding errors.
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "class": "Qwen3_5",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "class": "Qwen3_5Moe",
        **{name: value for name, value in _DECODER.items() if name != "intermediate_size"},
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "rms_norm_eps": 0.1,
        "tie_word_embeddings": False,
    },
    "kimi_linear": {
        "class": "KimiLinear",
        **_DECODER,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "model_max_length": 512,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 10,
            "short_conv_kernel_size": 3,
        },
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "rms_norm_eps": 1e-3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    },
    "mistral_without_window": {
        "class": "Mistral",
        **_DECODER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
}


_CONFIG_CLASSES = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
_OF_DIFFERENCES = ("Gemma", "Qwen3Next", "Qwen3_5")
"""Families that store the weights of norms as their difference from one, except in gated delta-nets."""


def import_transformers() -> Any:
    """Return the package, or skip the test where it is not installed."""
    return pytest.importorskip("transformers", reason="transformers is not installed (requirements/dev.txt has it)")


def make_model(kind: str, dtype: torch.dtype = torch.float32, config: Any = None, **changes: Any) -> Any:
    """Build a model whose every value is random, norms and biases too, and large enough to matter.

    ``config`` is transformers' own, in place of the kind's.
    """
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: requirements/dev.txt has it"
    )
    settings = KINDS[kind] | changes
    family = settings["class"]
    config_class = getattr(transformers, _CONFIG_CLASSES.get(family, f"{family}Config"))
    model_class = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))
    if config is None:
        config = config_class(**{name: value for name, value in settings.items() if name != "class"})
    model = model_class(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    with torch.no_grad():
        router_biases = (pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias"))
        for name, parameter in (*model.named_parameters(), *router_biases):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            mean = 0.0 if family.startswith(_OF_DIFFERENCES) and "linear_attn" not in name else 1.0
            parameter.copy_(mean + 0.2 * noise if is_norm else 0.25 * noise)
    return model


def save_model(kind: str, folder: Path, *, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """Write a model as transformers does, with tokenizer files that are told apart from others, and return it."""
    model = make_model(kind, **changes)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def tokens_of(kind: str, batch: int, length: int) -> torch.Tensor:
    """Return random tokens ``[batch, length]`` of the model's vocabulary."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, KINDS[kind]["vocab_size"], (batch, length), generator=generator)


def their_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits that transformers computes, ``[b, s, v]``."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def their_greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers chooses after a prompt."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        new = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return new[0, len(prompt) :].tolist()


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a folder's config.json."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


class MemorySource:
    """Hold tensors by their native names; a `CheckpointSource`."""

    def __init__(self, values: Mapping[str, torch.Tensor], common: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.values = dict(values)
        # What a file would keep of it.
        self.common: Mapping[str, Any] = json.loads(json.dumps(common))
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self.values.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        value = self.values[name]
        return (value if box is None else value[box.slices]).clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self.values = {}


def copy_of(source: CheckpointSource) -> MemorySource:
    """Read everything and let the original go."""
    values = {name: source.read(name) for name in source.tensors}
    source.close()
    return MemorySource(values, source.common, source.folder)
