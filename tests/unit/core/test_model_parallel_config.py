"""Configurations under megatron-core's names: what follows from other fields, contradictions, and the conversion."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.errors import ConfigurationError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import init_method_normal, scaled_init_method_normal

SMALL: dict[str, Any] = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4}


def test_fields_that_follow_from_others() -> None:
    config = TransformerConfig(**SMALL, tensor_model_parallel_size=2, params_dtype=torch.bfloat16)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (64, 4, 4)
    assert (config.expert_tensor_parallel_size, config.autocast_dtype) == (2, torch.bfloat16)
    assert config.embedding_init_method.keywords == config.init_method.keywords == {"mean": 0.0, "std": 0.02}
    # 0.02 / sqrt(2 x 4 layers)
    assert config.output_layer_init_method.keywords["std"] == pytest.approx(0.0070710678)
    config.hidden_dropout = 0.0  # fields may change afterwards
    assert TransformerConfig(**SMALL, init_method=F.relu).embedding_init_method is F.relu


def test_initial_values_have_their_standard_deviation() -> None:
    torch.manual_seed(1)
    values = init_method_normal(0.5)(torch.empty(200, 200))
    assert values.std().item() == pytest.approx(0.5, rel=0.02)
    scaled = scaled_init_method_normal(0.5, num_layers=8)
    assert isinstance(scaled, functools.partial)
    assert scaled(torch.empty(200, 200)).std().item() == pytest.approx(0.125, rel=0.02)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_parallel": True}, "sequence parallelism without tensor parallelism"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_dtype must be specified"),
        ({"fp16": True, "bf16": True}, "Only one of"),
        ({"tensor_model_parallel_size": 3}, r"num_attention_heads \(4\)"),
        ({"num_query_groups": 3, "tensor_model_parallel_size": 2}, "multiple or divisor"),
        ({"expert_model_parallel_size": 2}, "num_moe_experts must be non None"),
        ({"num_moe_experts": -1}, "must be positive"),
        ({"moe_router_topk": 1}, "pre-softmax"),
        ({"moe_router_enable_expert_bias": True}, "sigmoid"),
        ({"moe_router_group_topk": 2}, "moe_router_num_groups"),
        ({"moe_pad_expert_input_to_capacity": True}, "moe_expert_capacity_factor"),
        ({"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"}, "load balancing"),
        ({"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True}, "alltoall"),
        ({"variable_seq_lengths": True}, "allgather"),
        ({"recompute_granularity": "full"}, "recompute_method"),
        ({"recompute_granularity": "some"}, 'must be "full" or "selective"'),
        ({"recompute_granularity": "selective", "recompute_modules": ["meo"]}, r"unknown names \['meo'\]"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "moe_grouped_gemm=True"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, "multi_latent_attention=True"),
        ({"recompute_granularity": "full", "moe_layer_recompute": True}, "selective or None, not full"),
        ({"moe_router_load_balancing_type": "auxloss"}, "is 'auxloss'; use sinkhorn alone"),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "moe_aux_loss_coeff": [0.1, 0.0]},
            "use sinkhorn alone",
        ),
        ({"moe_router_dtype": "bf16"}, "is 'bf16'; use fp32, fp64 or None"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 4}, "less than 4"),
        ({"num_layers_in_first_pipeline_stage": 1, "account_for_loss_in_pipeline_split": True}, "same time"),
    ],
)
def test_contradictions_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SMALL, **fields)


def test_expert_fields_that_contradict_each_other() -> None:
    with pytest.raises(AssertionError, match="ETP==1"), pytest.warns(UserWarning, match="moe_ffn_hidden_size"):
        TransformerConfig(**SMALL, num_moe_experts=4, tensor_model_parallel_size=2)
    with pytest.raises(AssertionError, match="moe_ffn_hidden_size must be None"):
        TransformerConfig(**SMALL, moe_ffn_hidden_size=4)
    config = TransformerConfig(**SMALL, num_moe_experts=4, moe_ffn_hidden_size=8, moe_expert_capacity_factor=-1.0)
    assert config.moe_expert_capacity_factor is None
    config = TransformerConfig(**SMALL, num_moe_experts=4, moe_ffn_hidden_size=8, moe_layer_recompute=True)
    assert config.recomputed_modules == ("core_attn", "moe")


def test_conversion_to_the_frameworks_own_configuration() -> None:
    config = TransformerConfig(
        **SMALL,
        num_query_groups=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        window_size=(7, 0),
        attention_backend=AttnBackend.unfused,
        num_moe_experts=8,
        moe_ffn_hidden_size=24,
        moe_layer_freq=[0, 1, 1, 1],
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
        moe_aux_loss_coeff=[0.1, 0.2],
    )
    own = config.to_decoder_config()
    assert (own.num_layers, own.hidden_size, own.params_dtype, own.sequence_parallel) == (4, 16, "bfloat16", True)
    assert (own.group_query_attention, own.num_query_groups, own.norm_epsilon) == (True, 2, 1e-6)
    assert (own.swiglu, own.geglu, own.add_bias_linear, own.disable_qkv_bias) == (True, False, False, True)
    assert (own.window_size, own.attention_backend) == ("7,0", "unfused")
    assert (own.moe.num_experts, own.moe.moe_layer_freq) == (8, "[0, 1, 1, 1]")
    assert own.moe.moe_aux_losses == {"aux_loss": 0.1, "seq_aux_loss": 0.2}


def test_conversion_of_latent_attention_and_squared_relu() -> None:
    config = MLATransformerConfig(**SMALL, q_lora_rank=None, activation_func=lambda x: F.relu(x) ** 2)
    own = config.to_decoder_config()
    assert (own.mla.multi_latent_attention, own.mla.q_lora_rank, own.mla.kv_lora_rank) == (True, None, 512)
    assert (own.rope.rope_type, own.rope.rotary_scaling_factor, own.squared_relu) == ("yarn", 40, True)
    with pytest.raises(ValueError, match="Output gate"):
        MLATransformerConfig(**SMALL, attention_output_gate=True)


def test_what_has_no_equivalent_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        TransformerConfig(**SMALL, qk_clip=True, softmax_scale=0.5).to_decoder_config()
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["softmax_scale=0.5", "qk_clip=True"]
    with pytest.raises(ConfigurationError, match="activation_func is"):
        TransformerConfig(**SMALL, activation_func=F.tanh).to_decoder_config()
    with pytest.raises(ConfigurationError, match=r"params_dtype is torch\.int8"):
        ModelParallelConfig(params_dtype=torch.int8).to_parallel_config()
    with pytest.raises(ConfigurationError, match="hybrid_context_parallel"):
        ModelParallelConfig(hybrid_context_parallel=True).to_parallel_config()
    assert ModelParallelConfig(params_dtype=torch.float64).to_parallel_config().params_dtype == "float64"
