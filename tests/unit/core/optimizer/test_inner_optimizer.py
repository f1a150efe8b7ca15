"""Which parameters are decayed, and which have learning rates of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.errors import ConfigurationError
from megatron.core.optimizer.inner_optimizer import InnerOptimizer, is_decayed
from megatron.core.optimizer.optimizer_config import GroupOverride, OptimizerConfig, parse_override
from megatron.core.optimizer.param_rates import ParamRates, Rate
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, full_pieces


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("embedding.word_embeddings.weight", (5, 3), True),
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 3), True),
        ("decoder.layers.0.mlp.linear_fc1.bias", (4,), False),
        ("decoder.final_layernorm.weight", (3,), False),
        ("experts.linear_fc1.bias", (2, 4), False),
    ],
)
def test_biases_and_one_dimensional_parameters_are_not_decayed(
    name: str, shape: tuple[int, ...], decayed: bool
) -> None:
    assert is_decayed(name, torch.zeros(shape)) is decayed


def parameter(name: str, shape: tuple[int, ...]) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(shape))
    attach_spec(result, ParamSpec(name, shape, full_pieces(shape)))
    return result


def test_decayed_parameters_come_first_in_the_given_order() -> None:
    a, b, c = parameter("a.weight", (2, 3)), parameter("a.bias", (2,)), parameter("b.weight", (3, 4))
    rates = ParamRates(OptimizerConfig())
    (most, decayed), (least, others) = rates.by_decay([a, b, c])
    assert (most, least) == (1.0, 0.0)
    assert decayed[0] is a
    assert decayed[1] is c
    assert others[0] is b
    assert len(rates.by_decay([a, c])) == 1


def test_the_first_override_that_matches_and_has_the_multiplier_counts() -> None:
    texts = ("*.mlp.*:wd_mult=0", "decoder.*:lr_mult=0.5,wd_mult=2", "*.mlp.*:lr_mult=3")
    rates = ParamRates(OptimizerConfig(decoupled_lr=1.0, param_group_overrides=texts))
    fc1, norm = parameter("decoder.layers.0.mlp.linear_fc1.weight", (2, 2)), parameter("decoder.norm.weight", (2,))
    words = parameter("embedding.word_embeddings.weight", (2, 2))
    assert [rates.weight_decay(p) for p in (fc1, norm, words)] == [0.0, 2.0, 1.0]
    assert [rates.learning_rate(p) for p in (fc1, norm, words)] == [Rate(False, 0.5), Rate(False, 0.5), Rate(True, 1.0)]
    assert [rate for rate, _ in rates.by_rate([words, norm, fc1])] == [Rate(False, 0.5), Rate(True, 1.0)]


def test_every_pattern_matches_a_parameter_of_some_rank() -> None:
    alone, given = single_rank_group(), [parameter("decoder.norm.weight", (2,)), parameter("decoder.norm.bias", (2,))]
    ParamRates(OptimizerConfig(param_group_overrides=("*.norm.*:lr_mult=2",))).check_patterns(given, alone)
    rates = ParamRates(OptimizerConfig(param_group_overrides=("*.bias:lr_mult=2", "*.fc1.*:lr_mult=2")))
    with pytest.raises(
        ConfigurationError, match=r"--param-group-overrides \*\.fc1\.\*: no trained parameter"
    ) as caught:
        rates.check_patterns(given, alone)
    assert "decoder.norm.bias, decoder.norm.weight and 0 more" in str(caught.value)
    assert "*.bias" not in str(caught.value)


def test_the_state_of_a_built_in_rule_exists_from_the_start() -> None:
    inner = InnerOptimizer(OptimizerConfig(lr=0.1), [([nn.Parameter(torch.ones(3))], 1.0)])
    inner.make_state()
    assert inner.num_updates == 0
    inner.set_num_steps(4)
    inner.drop_made_state()
    assert inner.num_updates == 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lr_mult=2", "no pattern"),
        (":lr_mult=2", "no pattern"),
        ("a:lr=2", "'lr=2' is neither"),
        ("a:lr_mult=x", "'x' of lr_mult is not a number"),
        ("a:wd_mult=-1", "wd_mult=-1 must be 0 or more"),
        ("a:lr_mult=nan", "must be 0 or more"),
        ("a:lr_mult=1,lr_mult=2", "twice"),
    ],
)
def test_an_override_that_says_something_else_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_override(text)
    assert parse_override("a:b:lr_mult=1e-1") == GroupOverride("a:b", 0.1)


@pytest.mark.parametrize(
    ("config", "hidden", "word"),
    [
        ({}, 0.25, 0.25),
        ({"optimizer": "muon", "muon_scale_mode": "spectral"}, 0.5, 0.25),
        ({"optimizer": "muon", "muon_scale_mode": "unit_rms_norm"}, 1.0, 0.25),
    ],
)
def test_the_learning_rate_of_a_wider_model(config: dict[str, str], hidden: float, word: float) -> None:
    rates = ParamRates(OptimizerConfig(**config))  # type: ignore[arg-type]
    for name, multiplier in (
        ("decoder.layers.0.mlp.linear_fc1.weight", hidden),
        ("embedding.word_embeddings.weight", word),
    ):
        given = nn.Parameter(torch.zeros(4, 4))
        attach_spec(given, ParamSpec(name, (4, 4), full_pieces((4, 4)), width_multiplier=4.0))
        assert rates.learning_rate(given).multiplier == multiplier
        assert rates.learning_rate(parameter(name, (4, 4))).multiplier == 1.0
