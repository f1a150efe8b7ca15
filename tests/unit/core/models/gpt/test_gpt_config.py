"""What a GPT's configuration says of its work and of what its stages hand on."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.models.gpt.gpt_config import GPTConfig, flags_without_argument
from megatron.core.process_group import single_rank_group
from tests.harness.toy_model import make_model

GPT2: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "swiglu": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.parametrize("settings", [GPT2, LLAMA])
def test_flops_are_those_of_the_weights_and_of_half_the_scores(settings: dict[str, Any]) -> None:
    length = 12
    model = make_model(single_rank_group(), device="meta", num_layers=3, **settings)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    if model.output_layer is None:
        weights += model.output_weight.numel()
    # Scores and their product with the values, 4 heads of width 10, each over half of a square.
    scores = 2 * 2 * 3 * (4 * 10) * length * length / 2
    assert model.config.forward_flops_per_sequence(length) == 2 * length * weights + scores


def test_flops_of_a_window_are_those_of_a_band() -> None:
    full, windowed = (
        make_model(single_rank_group(), device="meta", num_layers=3, **settings).config.forward_flops_per_sequence(12)
        for settings in ({}, {"window_size": "3,0", "window_attn_skip_freq": "3"})
    )
    # Two layers look at 4 of 12 keys: of half a square of 12 remains what a half square of 8 leaves.
    assert full - windowed == 2 * 2 * 2 * (4 * 10) * 8 * 8 / 2


def test_shape_of_what_stages_hand_on() -> None:
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 3}
    config = GPTConfig(num_layers=2, hidden_size=28, num_attention_heads=4, **sizes)
    assert config.hidden_shape(48, 5) == (16, 5, 28)
    config = GPTConfig(num_layers=2, hidden_size=28, num_attention_heads=4, sequence_parallel=True, **sizes)
    assert config.hidden_shape(48, 5) == (8, 5, 28)


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, []),
        ({"attn_logit_softcapping": 30.0, "use_mup": True}, ["--attn-logit-softcapping 30.0", "--use-mup"]),
        ({"rope_type": "rope"}, []),
        ({"rope_type": "yarn", "rotary_scaling_factor": 4.0}, []),
        ({"rotary_scaling_factor": 4.0}, ["--rotary-scaling-factor 4.0"]),
        # Megatron's arguments hold these in another form.
        ({"window_size": "3,0", "num_experts": 4}, []),
        ({"multi_latent_attention": True, "kv_lora_rank": 8}, []),
        ({"kv_lora_rank": 8}, ["--kv-lora-rank 8"]),
        # A choice that Megatron does not have, of a field that it has.
        ({"normalization": "MeanAbsNorm"}, ["--normalization MeanAbsNorm"]),
        ({"num_experts": 4, "moe_router_score_function": "relu"}, ["--moe-router-score-function relu"]),
    ],
)
def test_flags_that_the_arguments_of_megatrons_files_cannot_hold(fields: dict[str, Any], flags: list[str]) -> None:
    config = GPTConfig(num_layers=2, hidden_size=24, num_attention_heads=4, vocab_size=50, **fields)
    assert sorted(flags_without_argument(config)) == sorted(flags)
