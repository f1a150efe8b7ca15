"""What follows from the fields of a transformer's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.transformer.transformer_config import TransformerConfig, default_ffn_hidden_size


def make(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{"num_layers": 8, "hidden_size": 96, "num_attention_heads": 6} | fields)


@pytest.mark.parametrize(
    ("fields", "activation", "is_gated"),
    [
        ({"swiglu": True}, "swiglu", True),
        ({"geglu": True}, "geglu", True),
        ({"quick_geglu": True}, "quick_geglu", True),
        ({"squared_relu": True}, "squared_relu", False),
        ({"openai_gelu": True, "bias_gelu_fusion": False}, "gelu_tanh", False),
        ({"bias_gelu_fusion": True}, "gelu_tanh", False),
        ({"bias_gelu_fusion": False}, "gelu", False),
    ],
)
def test_activations(fields: dict[str, Any], activation: str, is_gated: bool) -> None:
    assert (make(**fields).activation, make(**fields).is_gated) == (activation, is_gated)


@pytest.mark.parametrize(
    ("fields", "derived"),
    [
        ({}, {"ffn_hidden_size": 384, "kv_channels": 16, "num_query_groups": 6}),
        ({"swiglu": True}, {"ffn_hidden_size": 256}),
        ({"geglu": True}, {"ffn_hidden_size": 256}),
        ({"ffn_hidden_size": 100, "kv_channels": 20}, {"ffn_hidden_size": 100, "kv_channels": 20}),
        ({"group_query_attention": True}, {"num_query_groups": 1}),
        ({"group_query_attention": True, "num_query_groups": 3}, {"num_query_groups": 3}),
        ({"attention_head_type": "multiquery"}, {"num_query_groups": 1, "group_query_attention": True}),
        ({"num_experts": 4}, {"moe_ffn_hidden_size": 384}),
        ({"num_experts": 4, "moe_ffn_hidden_size": 50}, {"moe_ffn_hidden_size": 50}),
        ({"use_flash_attn": True}, {"attention_backend": "flash"}),
        ({"use_flash_attn": True, "attention_backend": "fused"}, {"attention_backend": "fused"}),
        ({}, {"attention_backend": "auto", "recompute_granularity": None, "recomputed_modules": ()}),
        ({"recompute_activations": True}, {"recomputed_modules": ("core_attn",)}),
        ({"moe_layer_recompute": True, "num_experts": 4}, {"recomputed_modules": ("core_attn", "moe")}),
        ({"moe_layer_recompute": True}, {"recomputed_modules": ("core_attn",)}),
        (
            {"moe_layer_recompute": True, "num_experts": 4, "recompute_modules": ("moe",)},
            {"recomputed_modules": ("moe",)},
        ),
        (
            {"moe_layer_recompute": True, "num_experts": 4, "recompute_granularity": "full"},
            {"recompute_modules": ("core_attn",), "recomputed_modules": ()},
        ),
        ({"cpu_offloading_num_layers": 3}, {"num_offloaded_layers": 0}),
        ({"cpu_offloading_num_layers": 3, "cpu_offloading": True}, {"num_offloaded_layers": 3}),
        ({"init_method_std": 0.5}, {"output_init_method_std": 0.125}),
        ({}, {"has_qkv_bias": True, "score_scalar": 16}),
        ({"disable_qkv_bias": True, "query_pre_attn_scalar": 25}, {"has_qkv_bias": False, "score_scalar": 25}),
        ({"add_bias_linear": False}, {"has_qkv_bias": False}),
        ({"add_bias_linear": False, "add_qkv_bias": True}, {"has_qkv_bias": True}),
    ],
)
def test_values_that_follow_from_others(fields: dict[str, Any], derived: dict[str, Any]) -> None:
    config = make(**fields)
    assert {name: getattr(config, name) for name in derived} == derived


NOTHING_DROPPED = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
AT_RANDOM = {"num_experts": 4, "moe_router_force_load_balancing": True}


@pytest.mark.parametrize(
    ("fields", "drops", "routes"),
    [
        (NOTHING_DROPPED, False, False),
        (NOTHING_DROPPED | {"hidden_dropout": 0.1}, True, False),
        (NOTHING_DROPPED | {"attention_dropout": 0.1}, True, False),
        (NOTHING_DROPPED | {"lora_dropout": 0.1}, True, False),
        (NOTHING_DROPPED | AT_RANDOM, False, True),
        (NOTHING_DROPPED | AT_RANDOM | {"num_experts": None}, False, False),
        (NOTHING_DROPPED | {"num_experts": 4}, False, False),
    ],
)
def test_what_is_drawn_for_each_sample(fields: dict[str, Any], drops: bool, routes: bool) -> None:
    config = make(**fields)
    assert (config.has_dropout, config.routes_at_random) == (drops, routes)
    assert config.draws_by_sample == (drops or routes)


@pytest.mark.parametrize(("hidden_size", "width"), [(96, 256), (4096, 10880), (5120, 13632)])
def test_narrow_feed_forward_layers_are_multiples_of_64(hidden_size: int, width: int) -> None:
    assert default_ffn_hidden_size(hidden_size, is_narrow=True) == width
    assert default_ffn_hidden_size(hidden_size, is_narrow=False) == 4 * hidden_size


def test_flops_of_experts() -> None:
    dense = make(ffn_hidden_size=200, swiglu=True)
    experts = make(
        num_experts=5,
        moe_ffn_hidden_size=70,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=60,
        swiglu=True,
        moe_layer_freq="[1]*7+[0]",
        ffn_hidden_size=200,
    )
    (of_dense, core), (of_experts, same_core) = (each.layer_forward_flops(0, 10) for each in (dense, experts))
    assert core == same_core
    # Two routed experts of width 70 and the shared one are as wide as the dense layer; the router comes on top.
    assert of_experts - of_dense == 2 * 10 * 96 * 5
    assert experts.layer_forward_flops(7, 10) == (of_dense, core)
