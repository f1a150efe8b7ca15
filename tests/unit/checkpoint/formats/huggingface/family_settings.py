"""Settings of a small model of each family, as its config.json has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.checkpoint.formats.huggingface.families import hugging_face_config
from megatron.core.models.gpt.gpt_config import GPTConfig

GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 48, "n_head": 6, "n_layer": 3}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
LLAMA31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
NEOX = LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu"}
NEO = {
    "architectures": ["GPTNeoForCausalLM"],
    "model_type": "gpt_neo",
    "hidden_size": 48,
    "num_heads": 6,
    "num_layers": 3,
    "vocab_size": 101,
    "attention_types": [[["global", "local"], 1], [["global"], 1]],
    "embed_dropout": 0,
    "resid_dropout": 0,
}
GPTJ = GPT2 | {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "rotary_dim": 6}
CODEGEN = GPT2 | {"architectures": ["CodeGenForCausalLM"], "model_type": "codegen", "n_head": 8, "rotary_dim": 4}
GPT_BIGCODE = GPT2 | {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode"}
PERSIMMON = LLAMA | {
    "architectures": ["PersimmonForCausalLM"],
    "model_type": "persimmon",
    "num_key_value_heads": 6,
    "hidden_act": "relu2",
}
OLMO2 = LLAMA | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-6,
}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
OLMOE = LLAMA | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "num_experts": 16}
OLMO3 = LLAMA | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 5}
GPT_OSS = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 8}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 5}
GEMMA = LLAMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu"}
QWEN2_MOE = LLAMA | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 6}
SEED_OSS = LLAMA | {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss"}
GLM4 = LLAMA | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 12}
ARCEE = LLAMA | {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}
STARCODER2 = LLAMA | {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "hidden_act": "gelu_pytorch_tanh",
}
EXAONE4 = LLAMA | {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"}
HELIUM = LLAMA | {"architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 8, "attention_bias": True}
ERNIE = LLAMA | {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": 12, "use_bias": True}
ERNIE_MOE = LLAMA | {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_num_experts": 8}
STABLELM = LLAMA | {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "num_key_value_heads": 6}
GLM4_MOE = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 5,
    "num_experts": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
QWEN3_5 = QWEN3_NEXT | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
QWEN3_5_MOE = QWEN3_NEXT | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
KIMI_LINEAR = LLAMA | {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 5,
    "num_key_value_heads": 6,
    "num_experts": 12,
    "linear_num_heads": 4,
}
GEMMA4 = LLAMA | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 7,
    "head_dim": 12,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "moe_intermediate_size": 20, "num_experts": 8, "top_k_experts": 3}
FLEX_OLMO = LLAMA | {"architectures": ["FlexOlmoForCausalLM"], "model_type": "flex_olmo"}
GRANITE = LLAMA | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GRANITE_MOE = LLAMA | {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe"}
COHERE = LLAMA | {"architectures": ["CohereForCausalLM"], "model_type": "cohere"}
COHERE2 = LLAMA | {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "num_hidden_layers": 5}
OLMO = LLAMA | {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
PHI = LLAMA | {"architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new"}
FALCON = LLAMA | {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "num_kv_heads": 2}
NANOCHAT = LLAMA | {"architectures": ["NanoChatForCausalLM"], "model_type": "nanochat", "hidden_act": "relu2"}
DEEPSEEK_V2 = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 6,
    "num_experts_per_tok": 6,
    "rms_norm_eps": 1e-6,
}
BAMBA = LLAMA | {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
}
GRANITE_HYBRID = LLAMA | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
}
NEMOTRON_H = LLAMA | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*",
    "n_groups": 2,
    "mamba_num_heads": 8,
}
FALCON_H1 = LLAMA | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
}
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 48, "n_head": 6, "n_layer": 3}
OPT = LLAMA | {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 88}
XGLM = {
    "architectures": ["XGLMForCausalLM"],
    "model_type": "xglm",
    "d_model": 48,
    "attention_heads": 6,
    "num_layers": 3,
}
MPT = {"architectures": ["MptForCausalLM"], "model_type": "mpt", "d_model": 48, "n_heads": 6, "n_layers": 3}
MINISTRAL = LLAMA | {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
MINISTRAL3 = LLAMA | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
SOLAR_OPEN = LLAMA | {"architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open"}
GLM4_MOE_LITE = LLAMA | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 6,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
}
DEEPSEEK_V32 = LLAMA | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_key_value_heads": 6,
    "first_k_dense_replace": 1,
    "index_topk": 16,
}
GLM_MOE_DSA = LLAMA | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_key_value_heads": 6,
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "indexer_types": ["full", "shared", "full"],
    "index_topk": 16,
}
EXAONE_MOE = LLAMA | {"architectures": ["ExaoneMoeForCausalLM"], "model_type": "exaone_moe"}
APERTUS = LLAMA | {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "hidden_act": "xielu",
    "rope_scaling": {"rope_type": "default"},
}
HUNYUAN = LLAMA | {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense"}
HUNYUAN_MOE = LLAMA | {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "model_type": "hunyuan_v1_moe",
    "num_experts": 6,
    "moe_topk": 2,
}
MINIMAX_M2 = LLAMA | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "head_dim": 16,
    "num_local_experts": 16,
}
PHIMOE = LLAMA | {"architectures": ["PhimoeForCausalLM"], "model_type": "phimoe"}
DOTS1 = LLAMA | {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
NEMOTRON = LLAMA | {"architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_act": "relu2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def config_of(folder: Path, values: dict[str, Any]) -> GPTConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return hugging_face_config(folder)
