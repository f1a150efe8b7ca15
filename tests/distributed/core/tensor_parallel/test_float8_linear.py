"""A column- and a row-parallel layer in fp8, of numbers whose sums are exact: the bits of one rank, amaxes too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.model_parallel_config import Float8Config, Fp8TensorIndex, ModelParallelConfig
from megatron.core.ops.fp8_quantizers import Float8Recipe, Float8State, Fp8Quantizers
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, tensor_parallel_group

LENGTH, BATCH, WIDTH, INNER = 12, 2, 10, 16
WORLD = single_rank_group(("world",))


def whole_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


def run_pair(
    recipe: str, sequence_parallel: bool, brings_bias: bool, is_frozen: bool = False, in_fp8: bool = True
) -> dict[str, Any]:
    """Run two steps, and return of the second what comes out, all gradients, and what delayed scaling saw."""
    tp = tensor_parallel_group()
    of_layers = ModelParallelConfig(sequence_parallel=sequence_parallel)
    first = ColumnParallelLinear(WIDTH, INNER, tp, config=of_layers)
    second = RowParallelLinear(INNER, WIDTH, tp, config=of_layers)
    second.brings_bias_into_sum = brings_bias
    layers = torch.nn.ModuleList((first, second))
    load_global_weights(layers, lambda spec: whole_numbers(len(spec.global_shape), *spec.global_shape).numpy())  # type: ignore[arg-type]
    config = Float8Config(fp8_format="hybrid", fp8_recipe=recipe, fp8_wgrad=in_fp8)
    state = Float8State(config, Fp8TensorIndex(1), "cpu") if recipe == "delayed" else None
    for place, layer in enumerate((first, second)):
        layer.quantizers = Fp8Quantizers(Float8Recipe.of(config), state, (0, place))
        layer.weight.requires_grad_(not is_frozen)
    found: dict[str, Any] = {}
    for step in range(2):
        x, grad = whole_numbers(10 + step, LENGTH, BATCH, WIDTH), whole_numbers(20 + step, LENGTH, BATCH, WIDTH)
        if sequence_parallel:
            x, grad = x.chunk(tp.size)[tp.rank], grad.chunk(tp.size)[tp.rank]
        x = x.clone().requires_grad_()
        layers.zero_grad()
        output = second(first(x).relu())
        output.backward(grad)
        found = {"output": output.detach(), "x": x.grad}
        if state is not None:
            if tp.size > 1:
                dist.all_reduce(state.amax, dist.ReduceOp.MAX)
            found["amax"] = state.amax.clone()
            state.update(WORLD, step)
    for name, parameter in layers.named_parameters():
        if parameter.grad is not None:
            if tp.size > 1 and spec_of(parameter).gradient_sum_axes:
                dist.all_reduce(parameter.grad)
            found[name] = parameter.grad
    return found


def whole(name: str, results: list[dict[str, Any]], sequence_parallel: bool) -> torch.Tensor:
    """Return a tensor of one rank from its parts."""
    cut = {"0.weight": 0, "0.bias": 0, "1.weight": 1} | ({"output": 0, "x": 0} if sequence_parallel else {})
    parts = [result[name] for result in results]
    return torch.cat(parts, dim=cut[name]) if name in cut else parts[0]


@pytest.mark.default(5)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("sequence_parallel", "brings_bias", "is_frozen"),
    [(False, False, False), (True, False, False), (True, True, False), (True, False, True)],
)
def test_two_ranks_compute_the_bits_of_one(
    recipe: str, sequence_parallel: bool, brings_bias: bool, is_frozen: bool
) -> None:
    expected = run_pair(recipe, sequence_parallel=False, brings_bias=False, is_frozen=is_frozen)
    results = run_distributed(2, run_pair, recipe, sequence_parallel, brings_bias, is_frozen)
    assert len(results[0]) == len(expected) == (4 if is_frozen else 6) + (recipe == "delayed")
    for name, values in expected.items():
        assert torch.equal(whole(name, results, sequence_parallel), values), name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_weight_gradient_outside_fp8_is_a_product_of_unrounded_values(recipe: str) -> None:
    layer = ColumnParallelLinear(WIDTH, INNER, tensor_parallel_group(), bias=False)
    recipe_of_layer = Float8Recipe.of(Float8Config(fp8_format="hybrid", fp8_recipe=recipe, fp8_wgrad=False))
    layer.quantizers = Fp8Quantizers(recipe_of_layer, None, (0, 0))
    # These values are rounded in fp8, and sums of their products are exact in float32.
    x, grad = 40 + whole_numbers(1, LENGTH, BATCH, WIDTH), 40 + whole_numbers(2, LENGTH, BATCH, INNER)
    layer(x.requires_grad_()).backward(grad)
    expected = grad.flatten(0, 1).double().t() @ x.detach().flatten(0, 1).double()
    assert torch.equal(layer.weight.grad.double(), expected)
