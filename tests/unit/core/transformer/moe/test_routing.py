"""Routing decisions are those of a plain twin in float64, written token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.core.transformer.moe.routing import choose_experts, expert_capacity, kept_choices
from megatron.core.transformer.transformer_config import MoEConfig, moe_layers

NUM_TOKENS, NUM_EXPERTS = 37, 12
KINDS = [
    {},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    {"moe_router_topk": 5},
    {"moe_router_topk": 8, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    {"moe_router_topk": 3, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
    {"moe_router_topk": 4, "moe_router_num_groups": 6, "moe_router_group_topk": 2},
    {
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
    },
]


def plain_twin(logits: np.ndarray, bias: np.ndarray | None, config: MoEConfig) -> tuple[list[int], list[float]]:
    """Return the experts of one token, the best first, and their weights."""
    exponentials = [math.exp(value) for value in logits]
    if config.moe_router_score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    else:
        scores = [value / sum(exponentials) for value in exponentials]
    if config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax:
        scores = list(map(float, logits))
    ranked = scores if bias is None else [score + float(move) for score, move in zip(scores, bias)]
    allowed = list(range(len(logits)))
    if config.moe_router_num_groups is not None and config.moe_router_group_topk is not None:
        size = len(logits) // config.moe_router_num_groups
        groups = [allowed[start : start + size] for start in range(0, len(logits), size)]
        num_best = config.moe_router_topk // config.moe_router_group_topk
        worth = {i: sum(sorted((ranked[e] for e in g), reverse=True)[:num_best]) for i, g in enumerate(groups)}
        best = sorted(worth, key=lambda i: -worth[i])[: config.moe_router_group_topk]
        allowed = [expert for group in best for expert in groups[group]]
    chosen = sorted(allowed, key=lambda expert: -ranked[expert])[: config.moe_router_topk]
    weights = [scores[expert] for expert in chosen]
    if scores == list(logits):
        weights = [exponentials[expert] for expert in chosen]
    is_softmax = config.moe_router_score_function == "softmax"
    if (is_softmax and not config.moe_router_pre_softmax) or (not is_softmax and config.moe_router_topk > 1):
        weights = [weight / sum(weights) for weight in weights]
    return chosen, [weight * (config.moe_router_topk_scaling_factor or 1.0) for weight in weights]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())) or "default")
def test_experts_and_weights_are_those_of_a_plain_twin(kind: dict[str, object]) -> None:
    config = MoEConfig(num_experts=NUM_EXPERTS, **kind)  # type: ignore[arg-type]
    generator = np.random.default_rng(7)
    logits = generator.normal(size=(NUM_TOKENS, NUM_EXPERTS))
    bias = generator.normal(size=NUM_EXPERTS) * 0.1 if config.moe_router_enable_expert_bias else None
    indices, weights = choose_experts(
        torch.from_numpy(logits), config, None if bias is None else torch.from_numpy(bias)
    )
    for token in range(NUM_TOKENS):
        chosen, expected = plain_twin(logits[token], bias, config)
        assert indices[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_full_expert_keeps_the_heaviest_or_the_first_tokens(policy: str) -> None:
    config = MoEConfig(num_experts=NUM_EXPERTS, moe_router_topk=2, moe_expert_capacity_factor=0.75)
    generator = torch.Generator().manual_seed(3)
    indices, weights = choose_experts(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator).double(), config)
    capacity = expert_capacity(NUM_TOKENS, config)
    assert capacity == math.ceil(NUM_TOKENS * 2 / NUM_EXPERTS * 0.75)
    # The rows are those of tokens in another order.
    positions = torch.randperm(NUM_TOKENS, generator=generator)
    is_kept = kept_choices(indices, weights, positions, NUM_EXPERTS, capacity, policy)
    for expert in range(NUM_EXPERTS):
        choices = (indices == expert).nonzero().tolist()
        if policy == "probs":
            choices.sort(key=lambda choice: -weights[choice[0], choice[1]].item())
        else:
            choices.sort(key=lambda choice: positions[choice[0]].item())
        assert all(bool(is_kept[token, place]) == (rank < capacity) for rank, (token, place) in enumerate(choices))
    assert 0 < (~is_kept).sum() < is_kept.numel()


def test_capacity_is_at_most_all_tokens() -> None:
    assert expert_capacity(5, MoEConfig(num_experts=2, moe_expert_capacity_factor=9.0)) == 5
    assert expert_capacity(5, MoEConfig(num_experts=2)) is None


def test_layers_with_experts_are_every_nth_or_those_of_a_list() -> None:
    assert moe_layers(MoEConfig(), 3) == (False, False, False)
    assert moe_layers(MoEConfig(num_experts=2), 3) == (True, True, True)
    assert moe_layers(MoEConfig(num_experts=2, moe_layer_freq="2"), 5) == (True, False, True, False, True)
    assert moe_layers(MoEConfig(num_experts=2, moe_layer_freq="([0]+[1]*2)"), 3) == (False, True, True)
    with pytest.raises(ValueError, match="a list of 4 works"):
        moe_layers(MoEConfig(num_experts=2, moe_layer_freq="[0,1]"), 4)
    with pytest.raises(ValueError, match="greater than 0"):
        moe_layers(MoEConfig(num_experts=2, moe_layer_freq="0"), 4)
