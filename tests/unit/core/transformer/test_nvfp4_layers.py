"""Layers in NVFP4: their three GEMMs against float64, the keys of stochastic rounding, and the layers in NVFP4."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config_base import from_fields
from megatron.core.errors import ConfigurationError
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.models import fp8_layers
from megatron.core.models.fp8_layers import compute_in_float8, describe_float8
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.dropout import DropoutKeys, DropoutSamples
from megatron.core.ops.fp8_tensor import SQUARES_OF_16
from megatron.core.ops.nvfp4_quantizers import Nvfp4Quantizers
from megatron.core.ops.nvfp4_tensor import hadamard, quantize_nvfp4
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.decoder_config import DecoderConfig
from tests.harness.float8_products import assert_products
from tests.harness.toy_model import make_batch, make_float8_model, make_model

LENGTH, BATCH = 32, 2
SHAPE: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16, "max_position_embeddings": 32}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "num_query_groups": 4,
    "add_bias_linear": False,
}
RECURRENT: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": "[1]",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 8,
    "add_bias_linear": False,
}


def make(**config: Any) -> GPTModel:
    return make_float8_model("nvfp4", **(SHAPE | config))


def keys_at(iteration: int = 1, first: int = 0) -> DropoutKeys:
    samples = DropoutSamples.at(1, iteration, first, BATCH, "cpu")
    return DropoutKeys(samples, torch.arange(LENGTH), slice(None), range(4))


@pytest.mark.parametrize(
    "config",
    [
        {"add_bias_linear": False},
        LATENT,
        RECURRENT,
        RECURRENT
        | {
            "experimental_attention_variant": "kimi_delta_attention",
            "linear_value_head_dim": 32,
            "linear_key_head_dim": 32,
            "linear_num_value_heads": 32,
        },
        {
            "hybrid_override_pattern": "P",
            "mamba_state_dim": 12,
            "mamba_head_dim": 4,
            "mamba_num_groups": 2,
            "mamba_num_heads": 16,
            "num_query_groups": 4,
            "add_bias_linear": False,
        },
        {"mtp_num_layers": 1, "position_embedding_type": "rope", "add_bias_linear": False},
    ],
)
def test_all_products_are_those_of_quantized_operands(config: dict[str, Any]) -> None:
    model, generator = make(num_layers=1, **config), torch.Generator().manual_seed(5)
    found = {name: module for name, module in model.named_modules() if getattr(module, "quantizers", None) is not None}
    assert len(found) >= 4
    sites = set()
    for name, module in found.items():
        assert isinstance(module.quantizers, Nvfp4Quantizers)
        module.quantizers.keys = keys_at()
        assert_products(module, LENGTH, BATCH, generator, name)
        sites.add(module.quantizers._first_site)
    assert len(sites) == len(found), "each layer draws its own random numbers"


def test_gradients_are_near_those_without_rounding() -> None:
    """The slow path: float64 GEMMs of the operands before quantization. The Hadamard transform cancels."""
    linear = make(num_layers=1).decoder.layers["0"].mlp.linear_fc1
    linear.quantizers.keys = keys_at()
    x = torch.randn(LENGTH, BATCH, 64).bfloat16().requires_grad_()
    grad = torch.randn(LENGTH, BATCH, 96).bfloat16()
    output = linear(x)
    output.backward(grad)
    rows, grads, weight = (each.detach().double() for each in (x.flatten(0, 1), grad.flatten(0, 1), linear.weight))
    assert x.grad is not None
    bias = linear.bias.detach().double()
    for found, exact in (
        (output.flatten(0, 1), rows @ weight.t() + bias),
        (x.grad.flatten(0, 1), grads @ weight),
        (linear.weight.grad, grads.t() @ rows),
    ):
        # Two operands with a relative error of about 0.1 each, at random rounding 0.15.
        assert float((found.detach().double() - exact).norm() / exact.norm()) < 0.25
    assert torch.equal(linear.bias.grad, grad.flatten(0, 1).sum(0, dtype=torch.float32).bfloat16())


def test_both_passes_have_the_same_weight_and_rounding_is_of_the_right_operands() -> None:
    quantizers = make(num_layers=1).decoder.layers["0"].mlp.linear_fc2.quantizers
    quantizers.keys = keys_at()
    weight, x = torch.randn(64, 96).bfloat16(), torch.randn(LENGTH * BATCH, 64).bfloat16()
    plain, turned = (quantizers.weight(weight, transpose=flag, records=False, scale=None) for flag in (False, True))
    assert plain.blocks == SQUARES_OF_16
    assert torch.equal(plain.values(), turned.values().t())
    left, left_turned = quantizers.matrix("input", x, transpose=True, records=False)
    assert left_turned is not None
    assert torch.equal(left.data, quantize_nvfp4(x, left.blocks).data), "inputs are rounded to nearest"
    assert torch.equal(left_turned.data, quantize_nvfp4(hadamard(x.t()), left.blocks).data)
    back, back_turned = quantizers.matrix("grad", x, transpose=True, records=False)
    assert back_turned is not None
    differing = (back.values() != left.values()).float().mean()
    assert 0.1 < float(differing) < 0.6, "gradients are rounded stochastically"
    assert 0.1 < float((back_turned.values() != left_turned.values()).float().mean()) < 0.6
    for operand, expected in (("input", left_turned), ("grad", back_turned)):
        again = quantizers.columns(operand, x)
        assert torch.equal(again.data, expected.data)
        assert torch.equal(again.scale.view(torch.uint8), expected.scale.view(torch.uint8))


def test_a_micro_batch_keeps_its_keys_while_another_passes() -> None:
    """In a pipeline a second forward pass precedes the first backward pass."""
    linear = make(num_layers=1).decoder.layers["0"].mlp.linear_fc1
    x, grad = torch.randn(LENGTH, BATCH, 64).bfloat16(), torch.randn(LENGTH, BATCH, 96).bfloat16()

    def gradient(between: DropoutKeys | None, own: DropoutKeys) -> torch.Tensor:
        given = x.clone().requires_grad_()
        linear.quantizers.keys = own
        output = linear(given)
        if between is not None:
            linear.quantizers.keys = between
            linear(given)
        output.backward(grad)
        assert given.grad is not None
        return given.grad

    expected = gradient(None, keys_at())
    assert torch.equal(gradient(keys_at(first=2), keys_at()), expected)
    assert not torch.equal(gradient(None, keys_at(first=2)), expected)
    assert not torch.equal(gradient(None, keys_at(iteration=2)), expected)


def test_a_layer_without_keys_has_no_backward_pass() -> None:
    linear = make(num_layers=1).decoder.layers["0"].mlp.linear_fc1
    output = linear(torch.randn(LENGTH, BATCH, 64).bfloat16().requires_grad_())
    with pytest.raises(ConfigurationError, match="were called in training without keys"):
        output.sum().backward()


MTP: dict[str, Any] = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MLP: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}


@pytest.mark.parametrize("more", [{}, MLP, FULL | MTP])
def test_a_model_rounds_by_the_samples_of_the_micro_batch(more: dict[str, Any]) -> None:
    """Also if it recomputes layers in the backward pass, after the forward pass of another micro-batch."""
    model = make(num_layers=2, vocab_size=53, **more)
    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)

    def loss_of(iteration: int) -> torch.Tensor:
        samples, losses = DropoutSamples.at(3, iteration, 0, BATCH, "cpu"), list[AuxiliaryLoss]()
        output = model(tokens, positions, labels=labels, dropout_samples=samples, losses=losses)
        assert len(losses) == len(model.mtp.layers if model.mtp is not None else ())
        return output.float().mean() + sum((each.loss_sum / each.num_tokens for each in losses), torch.zeros(()))

    def gradients(iteration: int, between: int | None = None) -> torch.Tensor:
        model.zero_grad()
        loss = loss_of(iteration)
        if between is not None:
            loss_of(between)
        loss.backward()
        found = [p.grad for p in model.parameters()]
        return torch.cat([each.flatten() for each in found if each is not None])

    first = gradients(1)
    assert len(first) == sum(p.numel() for p in model.parameters())
    assert torch.equal(gradients(1, between=2), first)
    assert not torch.equal(gradients(2), first)
    model.eval()
    with torch.no_grad():
        model(tokens, positions, labels=labels)


def test_first_and_last_layers_stay_in_bfloat16() -> None:
    model = make(num_layers=4, first_last_layers_bf16=True)
    found = {
        name.split(".")[2] for name, module in model.named_modules() if getattr(module, "quantizers", None) is not None
    }
    assert found == {"1", "2"}
    assert [bool(layer.keyed_quantizers) for layer in model.decoder.layers.values()] == [False, True, True, False]


@pytest.mark.parametrize(
    ("device", "has_products", "by"),
    [
        ("cpu", True, "float32 GEMMs of the quantized operands: this device has no NVFP4 GEMMs for them"),
        ("cuda", False, "float32 GEMMs of the quantized operands: this device has no NVFP4 GEMMs for them"),
        ("cuda", True, "torch's NVFP4 GEMMs"),
    ],
)
def test_the_line_says_what_computes_the_products(
    monkeypatch: pytest.MonkeyPatch, device: str, has_products: bool, by: str
) -> None:
    monkeypatch.setattr(fp8_layers, "has_nvfp4_products", lambda *given: has_products)
    config = from_fields(DecoderConfig, num_layers=4, hidden_size=32, num_attention_heads=4, fp4_format="e2m1")
    assert describe_float8(config, device) == f"fp4: e2m1, nvfp4 scaling, layers 1 to 4 of 4; computed by {by}"


@pytest.mark.parametrize(("capability", "fits"), [((9, 0), False), ((10, 0), True), ((12, 0), True), (None, True)])
def test_a_gpu_before_blackwell_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, fits: bool
) -> None:
    monkeypatch.setattr(fp8_layers, "compute_capability", lambda device: capability)
    monkeypatch.setattr(fp8_layers, "triton_works", lambda: False)
    model = make_model(single_rank_group(), bf16=True, fp4_format="e2m1", **SHAPE)
    if fits:
        assert compute_in_float8([model], model.config, "cuda") is None
    else:
        with pytest.raises(ConfigurationError, match=r"compute capability 9\.0 has no NVFP4 GEMMs"):
            compute_in_float8([model], model.config, "cuda")
