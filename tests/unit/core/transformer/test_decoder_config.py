"""What follows from the fields of a transformer's configuration: latent attention's widths and layer patterns too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.config_base import field_value, from_fields, with_fields
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.decoder_config import DecoderConfig, RotaryConfig, default_ffn_hidden_size
from megatron.core.transformer.layer_pattern import _MOST_LAYERS, format_layer_pattern, parse_layer_pattern
from megatron.core.transformer.rotary_pos_embedding import proportional_frequencies, yarn_frequencies
from tests.harness.toy_model import make_model


def make(**fields: Any) -> DecoderConfig:
    return from_fields(DecoderConfig, **{"num_layers": 8, "hidden_size": 96, "num_attention_heads": 6} | fields)


def test_layers_without_a_window_have_another_shape_of_attention() -> None:
    own = {"global_kv_channels": 24, "global_num_query_groups": 1, "attention_k_eq_v": True}
    model = make(num_query_groups=3, window_size="3,0", window_attn_skip_freq="4", mtp_num_layers=1, **own)
    windowed, whole = model.of_layer(0), model.of_layer(3)
    assert [model.of_layer(number) is whole for number in range(9)] == [False, False, False, True] * 2 + [True]
    assert (windowed.kv_channels, windowed.num_query_groups, windowed.value_projection_size) == (16, 3, 48)
    assert (whole.kv_channels, whole.num_query_groups, whole.value_projection_size) == (24, 1, 0)
    assert (whole.kv_projection_size, whole.query_projection_size, whole.score_scale) == (24, 144, 24**-0.5)
    assert model.attention_shapes == (whole, windowed)
    (gemms, core), (own_gemms, own_core) = (model.layer_forward_flops(number, 10) for number in (0, 3))
    assert gemms - own_gemms == 2 * 10 * 96 * ((2 * 96 + 2 * 48) - (2 * 144 + 24))
    assert own_core / core == (144 * 10 * 0.5) / (96 * 4 * (1 - 4 / 10 / 2))


def test_a_global_shape_that_is_the_usual_one_is_none() -> None:
    model = make(global_kv_channels=16, global_num_query_groups=6, window_size="3,0")
    assert (model.global_kv_channels, model.global_num_query_groups) == (None, None)
    assert (model.of_layer(0), model.attention_shapes) == (model, (model,))


def test_proportional_frequencies_are_the_highest_of_a_whole_head() -> None:
    assert proportional_frequencies(100.0, 8, 4).tolist() == [1.0, 100.0**-0.25, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "activation", "is_gated"),
    [
        ({"swiglu": True}, "swiglu", True),
        ({"geglu": True}, "geglu", True),
        ({"quick_geglu": True}, "quick_geglu", True),
        ({"squared_relu": True}, "squared_relu", False),
        ({"xielu": True}, "xielu", False),
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
        ({"disable_proj_bias": True}, {"has_proj_bias": False, "has_qkv_bias": True}),
        ({"add_bias_linear": False}, {"has_qkv_bias": False, "has_proj_bias": False}),
        ({"add_bias_linear": False, "add_qkv_bias": True}, {"has_qkv_bias": True}),
    ],
)
def test_values_that_follow_from_others(fields: dict[str, Any], derived: dict[str, Any]) -> None:
    config = make(**fields)
    assert {name: field_value(config, name) for name in derived} == derived


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
    # Routed experts read and write 32 channels, between two projections.
    of_latent = with_fields(experts, moe_latent_size=32).layer_forward_flops(0, 10)[0]
    assert of_experts - of_latent == 2 * 10 * (3 * 2 * 70 * (96 - 32) - 2 * 96 * 32)


LATENT: dict[str, Any] = {"multi_latent_attention": True}
YARN: dict[str, Any] = {"rope_type": "yarn", "rotary_scaling_factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "is_stretched"),
    [
        ({}, False),
        ({"rotary_scaling_factor": 4.0}, False),
        ({"rotary_scaling_factor": 4.0, "rope_type": "rope"}, False),
        (YARN, True),
        ({"rope_type": "yarn"}, False),
        (LATENT, False),
        (LATENT | {"rotary_scaling_factor": 4.0}, True),
        (LATENT | {"rotary_scaling_factor": 4.0, "rope_type": "rope"}, False),
    ],
)
def test_positions_are_stretched_by_a_factor_of_yarn_alone(fields: dict[str, Any], is_stretched: bool) -> None:
    config = make(**fields)
    assert config.stretches_positions is is_stretched
    assert (config.rotary_amplitude != 1.0) is is_stretched


def test_the_amplitude_and_the_scores_grow_with_the_logarithm_of_the_factor() -> None:
    config = make(**LATENT, rotary_scaling_factor=math.e**5, mscale=2.0, mscale_all_dim=1.0)
    # 0.1 x 2 x 5 + 1 over 0.1 x 1 x 5 + 1.
    assert config.rotary_amplitude == pytest.approx(2.0 / 1.5)
    assert config.latent_score_factor == pytest.approx(1.5**2)
    assert config.scales_latent_scores
    assert not make(**LATENT, rotary_scaling_factor=4.0).scales_latent_scores
    assert not make(**LATENT, mscale_all_dim=1.0).scales_latent_scores
    assert not make(**YARN, mscale_all_dim=1.0).scales_latent_scores
    # Fewer positions are no reason to grow.
    assert make(**YARN | {"rotary_scaling_factor": 0.5}).rotary_amplitude == 1.0


def test_scores_are_divided_by_the_root_of_the_width_without_padding() -> None:
    narrow = make(**LATENT, qk_head_dim=6, qk_pos_emb_head_dim=3, v_head_dim=5)
    assert (narrow.mla.latent_query_width, narrow.mla.latent_head_width, narrow.latent_score_factor) == (9, 9, 1.0)
    padded = make(**LATENT, qk_head_dim=6, qk_pos_emb_head_dim=3, v_head_dim=36)
    assert (padded.mla.latent_query_width, padded.mla.latent_head_width, padded.latent_score_factor) == (9, 36, 2.0)


def test_flops_of_sparse_attention_are_those_of_selected_keys_and_of_indexers() -> None:
    indexer = {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 70, "dsa_indexer_topk": 16}
    sparse = make(
        **LATENT | indexer,
        q_lora_rank=5,
        experimental_attention_variant="dsa",
        dsa_indexer_layer_freq="2",
        mtp_num_layers=1,
    )
    plain, tokens = make(**LATENT, q_lora_rank=5, mtp_num_layers=1), 100
    gemms, core = plain.layer_forward_flops(1, tokens)
    # A query attends to as many keys as it sees, and to 16 at most.
    seen = sum(min(position + 0.5, 16) for position in range(tokens))
    heads, width = plain.num_attention_heads, plain.mla.latent_query_width + plain.mla.v_head_dim
    assert sparse.layer_forward_flops(1, tokens)[0] == gemms
    assert sparse.layer_forward_flops(1, tokens)[1] == pytest.approx(2 * heads * width * seen)
    for number in (0, plain.num_layers):
        found = sparse.layer_forward_flops(number, tokens)
        further = plain.layer_forward_flops(number, tokens)[0]
        assert found[0] - further == 2 * tokens * (5 * 3 * 70 + 96 * (70 + 3))
        assert found[1] == pytest.approx(2 * heads * width * seen + 2 * 3 * 70 * tokens * tokens / 2)
    # All keys of short sequences are selected without scores, but generation stores the keys of the indexer.
    assert sparse.layer_forward_flops(0, 16)[1] == plain.layer_forward_flops(0, 16)[1]
    assert sparse.layer_forward_flops(0, 16)[0] - plain.layer_forward_flops(0, 16)[0] == 2 * 16 * 96 * (70 + 3)
    assert core > sparse.layer_forward_flops(1, tokens)[1]


@pytest.mark.parametrize(("q_lora_rank", "num_maps"), [(None, 4), (5, 5)])
def test_linear_maps_of_latent_attention_are_those_of_the_model(q_lora_rank: int | None, num_maps: int) -> None:
    widths = {"kv_lora_rank": 7, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 3}
    latent = LATENT | widths | {"q_lora_rank": q_lora_rank, "position_embedding_type": "rope"}
    attention = make_model(single_rank_group(), device="meta", **latent).decoder.layers["0"].self_attention
    maps = [parameter for name, parameter in attention.named_parameters() if "linear" in name and parameter.dim() == 2]
    config = make_model(single_rank_group(), device="meta", **latent).config
    assert len(maps) == config.mla.num_attention_maps == num_maps
    expected = config.mla.latent_projections(config.hidden_size, config.num_attention_heads)
    assert sum(parameter.numel() for parameter in maps) == expected
    assert make().mla.num_attention_maps == 2


@pytest.mark.parametrize("whole_channels", [True, False])
def test_slow_frequencies_are_divided_and_fast_ones_kept(whole_channels: bool) -> None:
    width, base, length, factor = 32, 10_000.0, 4096, 8.0
    config = RotaryConfig(
        rope_type="yarn",
        rotary_scaling_factor=factor,
        original_max_position_embeddings=length,
        beta_fast=32.0,
        beta_slow=1.0,
        yarn_correction_range_round_to_int=whole_channels,
    )
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = length * plain / (2 * math.pi)
    # The logarithm of the turns falls evenly from channel to channel: where are there 32, and where one?
    per_channel = math.log(turns[0] / turns[1])
    low, high = (math.log(turns[0] / beta) / per_channel for beta in (32.0, 1.0))
    if whole_channels:
        low, high = math.floor(low), math.ceil(high)
    found = yarn_frequencies(config, base, width)
    for channel, (before, after) in enumerate(zip(plain.tolist(), found.tolist(), strict=True)):
        share = min(max((channel - low) / (high - low), 0.0), 1.0)
        assert after == pytest.approx(before * (1 - share) + before / factor * share, rel=1e-12)
    assert found[0] == plain[0]
    assert found[-1] == plain[-1] / factor


def test_frequencies_that_never_turn_once_are_divided() -> None:
    few = RotaryConfig(**YARN, original_max_position_embeddings=4)
    plain = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.allclose(yarn_frequencies(few, 100.0, 8)[1:], plain[1:] / 4.0)


def test_a_blend_ends_at_the_width_at_most() -> None:
    """Its end would be after channel 9 of a width of 8: it then ends at 7, as in the models of Hugging Face."""
    config = RotaryConfig(**YARN, original_max_position_embeddings=100_000, beta_fast=1000.0)
    plain = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    divided = plain / 4.0
    # From channel 2 on, so that channel 3 is a fifth of the way.
    expected = torch.cat((plain[:3], 0.8 * plain[3:] + 0.2 * divided[3:]))
    assert torch.allclose(yarn_frequencies(config, 100.0, 8), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("1", "000000"),
        ("2", "101010"),
        ("4", "111011"),
        ("([1]*2+[0])*2", "110110"),
        ("[0, 0, 1, 1, 1, 1]", "001111"),
    ],
)
def test_a_pattern_names_layers_and_is_found_again(text: str, kinds: str) -> None:
    layers = tuple(kind == "1" for kind in kinds)
    assert parse_layer_pattern(text, 6) == layers
    assert parse_layer_pattern(format_layer_pattern(layers), 6) == layers
    assert format_layer_pattern((True, True, False, True)) == "3"


def test_a_list_is_as_long_as_any_model_has_layers_and_no_longer() -> None:
    assert len(parse_layer_pattern(f"[1]*{_MOST_LAYERS}", _MOST_LAYERS)) == _MOST_LAYERS
    with pytest.raises(ValueError, match="expected"):
        parse_layer_pattern(f"[1]*{_MOST_LAYERS + 1}", _MOST_LAYERS + 1)


BIG = "[1]*100000*100000*100000"
NESTED = "[1, 0, [1, 0], 1, 0, 1, 0]"


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "[1]*7", "[2]*6", "1.5", "[1]*10**9", "()", "[[1]]*6", "2*[1]", "True", BIG, NESTED],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|the list has"):
        parse_layer_pattern(text, 6)


def test_norms_of_latent_vectors_and_ranks_of_groups_have_defaults() -> None:
    config = make(**LATENT, norm_epsilon=1e-3)
    assert config.epsilon_of_latent_norms == 1e-3
    assert with_fields(config, latent_norm_epsilon=1e-6).epsilon_of_latent_norms == 1e-6
    groups = {"num_experts": 12, "moe_router_num_groups": 4, "moe_router_group_topk": 3, "moe_router_topk": 8}
    assert make(**groups).experts_that_rank_a_group == 2
    assert make(**groups, moe_router_group_score_topk=1).experts_that_rank_a_group == 1
    assert make(num_experts=12).experts_that_rank_a_group is None
