"""What is not supported of a folder, or of a model, is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families import family_for, hugging_face_config
from megatron.core.errors import CheckpointError, ConfigurationError, InputError
from tests.unit.interop.huggingface.family_settings import (
    DEEPSEEK,
    GEMMA2,
    GEMMA3,
    GPT2,
    LLAMA,
    LLAMA31_SCALING,
    MISTRAL,
    MIXTRAL,
    NEOX,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN,
    QWEN3,
    QWEN3_MOE,
    YARN,
    config_of,
)

REFUSED = [
    (LLAMA, {"attention_bias": True}, "attention_bias is true"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias is true"),
    (LLAMA, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    (LLAMA, {"rope_scaling": YARN | {"truncate": 0}}, "truncate is 0; true or false is expected"),
    (LLAMA, {"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor is 0; a number greater than 0"),
    (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor is 1.5"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
    (LLAMA, {"rope_scaling": LLAMA31_SCALING | {"factor": None}}, "factor is missing"),
    (LLAMA, {"rope_theta": 10000.5}, "rope_theta is 10000.5"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    (LLAMA, {"num_key_value_heads": 4}, "num_attention_heads 6 is not divisible by num_key_value_heads 4"),
    (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    (LLAMA, {"hidden_size": "48"}, "hidden_size is '48'"),
    (LLAMA, {"head_dim": 7}, "heads are 7 channels wide"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config is set"),
    (LLAMA, {"auto_map": {"AutoModel": "x.py"}}, "auto_map is set"),
    (QWEN, {"layer_types": ["full_attention", "sliding_attention", "x"]}, "layer_types has x; supported are full_"),
    (QWEN, {"layer_types": ["full_attention"] * 2}, "layer_types has 2 layers, but there are 3"),
    (QWEN, {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is false"),
    (NEOX, {"attention_bias": False}, "attention_bias is false"),
    (NEOX, {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    (NEOX, {"rotary_pct": 1.5}, "rotary_pct is 1.5"),
    (NEOX, {"head_dim": 16}, "head_dim is 16, supported is 8, hidden_size / num_attention_heads"),
    (MISTRAL, {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "for a Ministral"),
    (
        QWEN3,
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic' is not supported",
    ),
    (NEOX, {"num_attention_heads": 7}, "hidden_size 48 is not divisible by num_attention_heads 7"),
    (OLMO2, {"attention_bias": True}, "attention_bias is true"),
    (
        PHI3,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        "rope_type 'longrope' is not supported in phi3",
    ),
    (PHI3, {"embd_pdrop": 0.1}, "embd_pdrop is 0.1, supported is 0.0"),
    (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
    (GEMMA2, {"hidden_activation": "gelu"}, 'hidden_activation is "gelu"'),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    (GEMMA3, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
    (GEMMA3, {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, 'rope_type is "linear"'),
    (GEMMA3, {"rope_local_base_freq": 10.5}, "the rope_theta of layers with a window is 10.5"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window is 0"),
    (MISTRAL, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    (QWEN3, {"attention_bias": True}, "attention_bias is true"),
    (GPT2, {"activation_function": "tanh"}, "activation_function 'tanh'"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention is true"),
    (GPT2, {"n_head": 7}, "n_embd 48 is not divisible by n_head 7"),
    (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is not 0"),
    (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are 4 experts"),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0"),
    (QWEN3_MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, but there are 6 experts"),
    (QWEN3_MOE, {"mlp_only_layers": 2}, "mlp_only_layers is 2; a list of layer numbers"),
    (
        QWEN3_MOE,
        {"mlp_only_layers": [0, 1, 2]},
        "decoder_sparse_step 1 and mlp_only_layers leave no layer with experts",
    ),
    (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads is 2; latent attention has one for each of 6"),
    (DEEPSEEK, {"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5"),
    (DEEPSEEK, {"n_group": 3}, "n_group 3 and topk_group 2 do not divide 16 experts"),
    (DEEPSEEK, {"topk_group": 4}, "num_experts_per_tok 4 / topk_group 4 is not 2"),
    (DEEPSEEK, {"first_k_dense_replace": 3}, "none of 3 layers has experts; up to 2 works"),
    (
        DEEPSEEK,
        {"num_experts_per_tok": 1, "n_group": 1},
        "norm_topk_prob is true, supported is false: the score of a single expert is its weight",
    ),
    (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob is false, supported is true"),
    (DEEPSEEK, {"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
    (DEEPSEEK, {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    (DEEPSEEK, {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim is given without mscale"),
    (DEEPSEEK, {"rope_scaling": YARN | {"factor": 1.0}}, "factor is 1.0; more than 1"),
    (DEEPSEEK, {"rope_scaling": YARN | {"type": "linear"}}, "rope_type 'linear' is not supported in this family"),
    (DEEPSEEK, {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
    (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None"),
    (LLAMA, {"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM is not supported"),
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


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        config_of(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu"})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[1]", "a JSON list, not an object")])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        hugging_face_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        hugging_face_config(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        hugging_face_config(tmp_path / "absent")


def test_a_model_with_experts_of_no_family_is_refused_with_what_each_lacks(tmp_path: Path) -> None:
    config = dataclasses.replace(config_of(tmp_path, MIXTRAL), moe_expert_capacity_factor=2.0)
    with pytest.raises(ConfigurationError) as caught:
        family_for(config)
    assert "llama has no experts; " in str(caught.value)
    assert "mixtral has no moe_expert_capacity_factor 2.0; " in str(caught.value)
