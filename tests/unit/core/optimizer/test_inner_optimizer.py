"""Which parameters are decayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.optimizer.inner_optimizer import build_param_groups, is_decayed
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
    groups = build_param_groups([a, b, c])
    assert [group.weight_decay_multiplier for group in groups] == [1.0, 0.0]
    assert groups[0].parameters[0] is a
    assert groups[0].parameters[1] is c
    assert groups[1].parameters[0] is b
    assert len(build_param_groups([a, c])) == 1
