"""Configurations under megatron-core's names: derived fields, contradictions and unsupported fields."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.errors import ConfigurationError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
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


def test_hybrid_context_parallelism_is_rejected() -> None:
    with pytest.raises(
        ConfigurationError, match="hybrid_context_parallel=True is unsupported; leave it at its default"
    ):
        TransformerConfig(**SMALL, hybrid_context_parallel=True)


def test_bfloat16_matmuls_can_accumulate_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(allow_bf16_reduced_precision_reduction=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", settings)
    TransformerConfig(**SMALL, disable_bf16_reduced_precision_matmul=True)
    assert settings.allow_bf16_reduced_precision_reduction
    TransformerConfig(**SMALL, disable_bf16_reduced_precision_matmul=True, bf16=True)
    assert not settings.allow_bf16_reduced_precision_reduction


def test_latent_attention_rejects_an_output_gate() -> None:
    with pytest.raises(ValueError, match="Output gate"):
        MLATransformerConfig(**SMALL, attention_output_gate=True)


def test_layers_name_a_dtype_that_they_do_not_support() -> None:
    config = ModelParallelConfig(params_dtype=torch.int8, use_cpu_initialization=True)
    with pytest.raises(ConfigurationError, match=r"params_dtype is torch\.int8; supported dtypes: torch\.float32"):
        ColumnParallelLinear(4, 4, config=config, init_method=torch.nn.init.zeros_)
