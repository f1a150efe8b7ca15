"""Activations of the feed-forward layer, written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.process_group import single_rank_group
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.toy_model import make_model


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


CASES = [
    ({"bias_gelu_fusion": False}, gelu),
    ({}, gelu_tanh),
    ({"openai_gelu": True, "bias_gelu_fusion": False}, gelu_tanh),
    ({"squared_relu": True}, lambda x: np.maximum(x, 0) ** 2),
    ({"swiglu": True}, swiglu),
]


@pytest.mark.parametrize(("settings", "activation"), CASES)
def test_feed_forward_layer(settings: dict[str, Any], activation: Any) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=12, num_attention_heads=2, ffn_hidden_size=20, params_dtype="float64", **settings
    )
    mlp = MLP(config, single_rank_group(), "cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_()
    x = torch.randn(3, 2, 12, dtype=torch.float64)
    first, second = mlp.linear_fc1, mlp.linear_fc2
    assert first.bias is not None
    assert second.bias is not None
    middle = activation((x @ first.weight.t() + first.bias).detach().numpy())
    expected = middle @ second.weight.detach().numpy().T + second.bias.detach().numpy()
    np.testing.assert_allclose(mlp(x).hidden.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_layers_without_biases() -> None:
    model = make_model(single_rank_group(), add_bias_linear=False, normalization="RMSNorm")
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    with_qkv = make_model(single_rank_group(), add_bias_linear=False, add_qkv_bias=True, normalization="RMSNorm")
    biases = [name for name, _ in with_qkv.named_parameters() if name.endswith("bias")]
    assert biases == [f"decoder.layers.{number}.self_attention.linear_qkv.bias" for number in range(2)]
