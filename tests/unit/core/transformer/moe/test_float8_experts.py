"""The experts' products in fp8 against float64 products of the same quantised operands, and experts in a layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fp8.float8_config import Float8Config
from megatron.core.fp8.float8_quantisers import Float8Quantisers
from megatron.core.fp8.float8_recipe import Float8Recipe
from megatron.core.main_grad import MainGrad, attach_main_grad
from megatron.core.models.float8_layers import compute_in_float8
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.moe.float8_grouped_linear import float8_grouped_linear
from megatron.core.transformer.moe.grouped_linear import grouped_linear
from tests.harness.toy_model import load_global_weights, make_batch, make_model

COUNTS, INNER, OUTER = (5, 0, 33, 16), 160, 48
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")


def quantisers_of(recipe: str, **settings: bool) -> Float8Quantisers:
    return Float8Quantisers(Float8Recipe.of(Float8Config(fp8_format="hybrid", fp8_recipe=recipe, **settings)))


def operands() -> tuple[torch.Tensor, torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(COUNTS), INNER, generator=generator).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(len(COUNTS), OUTER, INNER, generator=generator).bfloat16())
    bias = torch.nn.Parameter(torch.randn(len(COUNTS), OUTER, generator=generator).bfloat16())
    return x, weight, bias, torch.randn(sum(COUNTS), OUTER, generator=generator).bfloat16()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, rounded: bool = True) -> None:
    """Assert equality up to the rounding of the result to bfloat16, or of sums in float32."""
    tolerance = 2**-8 if rounded else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_each_experts_quantised_operands(recipe: str) -> None:
    quantisers = quantisers_of(recipe)
    x, weight, bias, grad = operands()
    main_grad = MainGrad(torch.full((len(COUNTS), OUTER, INNER), torch.nan))
    attach_main_grad(weight, main_grad)
    output = float8_grouped_linear(x, weight, bias, COUNTS, quantisers, adds_bias=True, library="auto")
    output.backward(grad)
    assert x.grad is not None
    assert bias.grad is not None
    start = 0
    for number, count in enumerate(COUNTS):
        rows, of_output = x.detach()[start : start + count], grad[start : start + count]
        if not count:
            assert not main_grad.tensor[number].any()
            continue
        # What is missing to a whole number of blocks is zero, and has no part in any scale but its own.
        missing = (0, 0, 0, -count % 16)
        rows, of_output = F.pad(rows, missing), F.pad(of_output, missing)

        def values(operand: str, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            plain, turned = quantisers.matrix(operand, matrix, transpose=True, records=False)
            assert turned is not None
            return plain.values(torch.float64), turned.values(torch.float64)

        (left, left_turned), (back, back_turned) = values("input", rows), values("grad", of_output)
        plain, turned = (
            quantisers.weight(weight.detach()[number], transpose=flag, records=False, scale=None).values(torch.float64)
            for flag in (False, True)
        )
        product = (left @ plain.t())[:count].bfloat16() + bias.detach()[number]
        assert_near(output.detach()[start : start + count], product.double())
        assert_near(x.grad[start : start + count], (back @ turned.t())[:count])
        assert_near(main_grad.tensor[number], back_turned @ left_turned.t(), rounded=False)
        assert_near(bias.grad[number], of_output.double().sum(dim=0))
        start += count


def test_weight_gradients_may_stay_out_of_fp8() -> None:
    gradients = []
    for quantisers in (None, quantisers_of("tensorwise", fp8_wgrad=False)):
        x, weight, _, grad = operands()
        if quantisers is None:
            grouped_linear(x, weight, None, COUNTS).backward(grad)
        else:
            float8_grouped_linear(x, weight, None, COUNTS, quantisers, adds_bias=True, library="auto").backward(grad)
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_of_experts_in_fp8_has_nearly_the_losses_of_bfloat16(recipe: str) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 32}
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32}
    tokens, labels, positions, _ = make_batch(16, 2, 53)
    losses = []
    for precision in ({}, {"fp8_format": "hybrid", "fp8_recipe": recipe}):
        settings = {**shape, **experts, **precision, "max_position_embeddings": 16, "bf16": True}
        model = make_model(single_rank_group(), **settings)
        load_global_weights(model)
        compute_in_float8([model], model.config, "cpu")
        loss = model(tokens, positions, labels=labels, losses=[]).float().mean()
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
