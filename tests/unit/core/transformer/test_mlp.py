"""Activations of the feed-forward layer and gates with limits, written out, with their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.gated_activation import gated_activation
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.mlp import FeedForward
from megatron.core.transformer.xielu import xielu
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
    ({"activation_func": "relu"}, lambda x: np.maximum(x, 0)),
    ({"swiglu": True}, swiglu),
]


@pytest.mark.parametrize(("settings", "activation"), CASES)
def test_feed_forward_layer(settings: dict[str, Any], activation: Any) -> None:
    config = DecoderConfig(
        num_layers=1, hidden_size=12, num_attention_heads=2, ffn_hidden_size=20, params_dtype="float64", **settings
    )
    mlp = FeedForward(config, single_rank_group(), "cpu")
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


def slopes() -> list[torch.Tensor]:
    """Return ``alpha_p``, ``alpha_n``, ``beta`` and an ``eps`` far from zero, so that values lie between them."""
    return [torch.tensor([value], dtype=torch.float64) for value in (0.3, -0.9, 0.45, -0.2)]


def test_xielu_is_that_of_the_paper_with_exact_gradients() -> None:
    alpha_p, alpha_n, beta, eps = (float(each) for each in slopes())
    x = torch.linspace(-3, 3, 24, dtype=torch.float64).view(4, 6)
    above, below = math.log1p(math.exp(alpha_p)), beta + math.log1p(math.exp(alpha_n))
    expected = [
        above * v * v + beta * v if v > 0 else below * (math.expm1(min(v, eps)) - v) + beta * v
        for v in x.flatten().tolist()
    ]
    np.testing.assert_allclose(xielu(x, *slopes()).flatten(), expected, rtol=1e-14)
    learned = [each.requires_grad_() for each in (x, *slopes()[:2])]
    assert torch.autograd.gradcheck(lambda *given: xielu(*given, *slopes()[2:]), learned)
    half, exact = x.detach().bfloat16(), x.detach().bfloat16().double()
    assert torch.equal(xielu(half, *(each.float() for each in slopes())), xielu(exact, *slopes()).bfloat16())


def test_slopes_of_xielu_are_learned_from_the_published_start_and_constants_are_kept() -> None:
    model = make_model(single_rank_group(), add_bias_linear=False, xielu=True)
    activation = model.decoder.layers["0"].mlp.activation
    x = torch.tensor([-2.0, -1e-7, 0.0, 1.5])
    expected = torch.where(x > 0, 0.8 * x * x, 0.8 * (torch.expm1(x.clamp(max=-1e-6)) - x)) + 0.5 * x
    torch.testing.assert_close(activation(x), expected, rtol=1e-6, atol=1e-12)
    learned = {name: parameter.requires_grad for name, parameter in activation.named_parameters()}
    assert learned == {"alpha_p": True, "alpha_n": True, "beta": False, "eps": False}


KINDS = {
    "swiglu": F.silu,
    "geglu": lambda gate: F.gelu(gate, approximate="tanh"),
    "quick_geglu": lambda gate: gate * torch.sigmoid(1.702 * gate),
}
GATE_CASES = [(kind, 1.0, 0.75) for kind in KINDS] + [("quick_geglu", 0.0, None), ("swiglu", 0.5, None)]


def values(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    found = torch.randn(5, 3, 14, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # A gate and both ends of what multiplies it exactly at the limit of most cases.
    found[0, 0, [0, 8, 9]] = torch.tensor([0.75, 0.75, -0.75], dtype=torch.float64)
    return found.to(dtype)


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize(("kind", "offset", "limit"), GATE_CASES)
def test_value_and_gradient_are_those_of_the_formula(
    kind: str, offset: float, limit: float | None, is_compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    ours, theirs = values().requires_grad_(), values().requires_grad_()
    gate, up = theirs.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = KINDS[kind](gate) * (up + offset)
    found = gated_activation(ours, kind, offset, limit)
    weights = torch.arange(found.numel(), dtype=torch.float64).view_as(found)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (our_grad,) = torch.autograd.grad((found * weights).sum(), ours)
    (their_grad,) = torch.autograd.grad((expected * weights).sum(), theirs)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-12, atol=1e-12)


def test_the_input_alone_is_kept_and_the_result_rounded_once() -> None:
    x = values(torch.bfloat16).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = gated_activation(x, "quick_geglu", 1.0, 7.0)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    exact = gated_activation(x.detach().float(), "quick_geglu", 1.0, 7.0)
    assert torch.equal(found, exact.to(torch.bfloat16))
