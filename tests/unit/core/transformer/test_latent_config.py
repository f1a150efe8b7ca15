"""The widths of multi-head latent attention (MLA), and YaRN's scaling of positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.process_group import single_rank_group
from megatron.core.transformer.rotary_pos_embedding import yarn_frequencies
from megatron.core.transformer.transformer_config import LatentConfig
from tests.harness.toy_model import make_model

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
    config = LatentConfig(**fields)
    assert config.stretches_positions is is_stretched
    assert (config.rotary_amplitude != 1.0) is is_stretched


def test_the_amplitude_and_the_scores_grow_with_the_logarithm_of_the_factor() -> None:
    config = LatentConfig(**LATENT, rotary_scaling_factor=math.e**5, mscale=2.0, mscale_all_dim=1.0)
    # 0.1 x 2 x 5 + 1 over 0.1 x 1 x 5 + 1.
    assert config.rotary_amplitude == pytest.approx(2.0 / 1.5)
    assert config.latent_score_factor == pytest.approx(1.5**2)
    assert config.scales_latent_scores
    assert not LatentConfig(**LATENT, rotary_scaling_factor=4.0).scales_latent_scores
    assert not LatentConfig(**LATENT, mscale_all_dim=1.0).scales_latent_scores
    assert not LatentConfig(**YARN, mscale_all_dim=1.0).scales_latent_scores
    # Fewer positions are no reason to grow.
    assert LatentConfig(**YARN | {"rotary_scaling_factor": 0.5}).rotary_amplitude == 1.0


def test_scores_are_divided_by_the_root_of_the_width_without_padding() -> None:
    narrow = LatentConfig(**LATENT, qk_head_dim=6, qk_pos_emb_head_dim=3, v_head_dim=5)
    assert (narrow.latent_query_width, narrow.latent_head_width, narrow.latent_score_factor) == (9, 9, 1.0)
    padded = LatentConfig(**LATENT, qk_head_dim=6, qk_pos_emb_head_dim=3, v_head_dim=36)
    assert (padded.latent_query_width, padded.latent_head_width, padded.latent_score_factor) == (9, 36, 2.0)


@pytest.mark.parametrize(("q_lora_rank", "num_maps"), [(None, 4), (5, 5)])
def test_linear_maps_of_latent_attention_are_those_of_the_model(q_lora_rank: int | None, num_maps: int) -> None:
    widths = {"kv_lora_rank": 7, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 3}
    latent = LATENT | widths | {"q_lora_rank": q_lora_rank, "position_embedding_type": "rope"}
    attention = make_model(single_rank_group(), device="meta", **latent).decoder.layers["0"].self_attention
    maps = [parameter for name, parameter in attention.named_parameters() if "linear" in name and parameter.dim() == 2]
    config = make_model(single_rank_group(), device="meta", **latent).config
    assert len(maps) == config.num_attention_maps == num_maps
    expected = config.latent_projections(config.hidden_size, config.num_attention_heads)
    assert sum(parameter.numel() for parameter in maps) == expected
    assert LatentConfig().num_attention_maps == 2


@pytest.mark.parametrize("whole_channels", [True, False])
def test_slow_frequencies_are_divided_and_fast_ones_kept(whole_channels: bool) -> None:
    width, base, length, factor = 32, 10_000.0, 4096, 8.0
    config = LatentConfig(
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
    few = LatentConfig(**YARN, original_max_position_embeddings=4)
    plain = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.allclose(yarn_frequencies(few, 100.0, 8)[1:], plain[1:] / 4.0)


def test_a_blend_ends_at_the_width_at_most() -> None:
    """Its end would be after channel 9 of a width of 8: it then ends at 7, as in the models of Hugging Face."""
    config = LatentConfig(**YARN, original_max_position_embeddings=100_000, beta_fast=1000.0)
    plain = 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    divided = plain / 4.0
    # From channel 2 on, so that channel 3 is a fifth of the way.
    expected = torch.cat((plain[:3], 0.8 * plain[3:] + 0.2 * divided[3:]))
    assert torch.allclose(yarn_frequencies(config, 100.0, 8), expected, rtol=1e-12)
