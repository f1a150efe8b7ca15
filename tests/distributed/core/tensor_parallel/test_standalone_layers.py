"""The layers in a user's own model: whole inputs and outputs, and biases that are left to the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.errors import ConfigurationError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.distributed.core.tensor_parallel.test_layers import fill
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import Fragment, fragments, named_values, reassemble, tensor_parallel_group

LENGTH, BATCH, INNER, OUTER = 4, 3, 6, 10
FLOAT64 = ModelParallelConfig(params_dtype="float64")
SEQUENCE_PARALLEL = ModelParallelConfig(sequence_parallel=True)
TWO_RANKS = Group(axes=("tp",), ranks=(0, 1), rank=0)
Result = tuple[list[torch.Tensor], torch.Tensor, list[Fragment]]


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run_layer(kind: str, settings: dict[str, Any]) -> Result:
    """Return what a layer gives (one tensor or two), the input's gradient, and the parameters' by their place."""
    tp = tensor_parallel_group()
    widths = {"input_size": INNER, "output_size": OUTER}
    layer: Any
    if kind == "column":
        layer = ColumnParallelLinear(**widths, tp_group=tp, config=FLOAT64, **settings)
    else:
        layer = RowParallelLinear(**widths, tp_group=tp, config=FLOAT64, **settings)
    fill(layer)
    x = values(LENGTH, BATCH, INNER, seed=1)
    if kind == "row" and settings.get("input_is_parallel", True):
        x = x.chunk(tp.size, dim=-1)[tp.rank]
    x = x.clone().requires_grad_()
    given = layer(x)
    outputs = list(given) if isinstance(given, tuple) else [given]
    total = outputs[0] if len(outputs) == 1 or outputs[1] is None else outputs[0] + outputs[1]
    grad = values(LENGTH, BATCH, OUTER, seed=2)
    total.backward(grad if total.shape[-1] == OUTER else grad.chunk(tp.size, dim=-1)[tp.rank])
    assert x.grad is not None
    kept = [output.detach().clone() for output in outputs if output is not None]
    return kept, x.grad, fragments((spec_of(p), p.grad) for p in layer.parameters() if p.grad is not None)


def plain() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return a plain map's product, its bias, the input's gradient and the parameters'."""
    layer = ColumnParallelLinear(INNER, OUTER, single_rank_group(), config=FLOAT64)
    weight = torch.from_numpy(named_values(spec_of(layer.weight))).requires_grad_()
    assert layer.bias is not None
    bias = torch.from_numpy(named_values(spec_of(layer.bias))).requires_grad_()
    x = values(LENGTH, BATCH, INNER, seed=1).requires_grad_()
    F.linear(x, weight, bias).backward(values(LENGTH, BATCH, OUTER, seed=2))
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return F.linear(x, weight).detach(), bias.detach(), x.grad, {"weight": weight.grad, "bias": bias.grad}


CASES: list[tuple[str, dict[str, Any]]] = [
    ("column", {"gather_output": True}),
    ("column", {"skip_bias_add": True}),
    ("column", {"gather_output": True, "skip_bias_add": True}),
    ("column", {"gather_output": True, "padded_output_size": 12}),
    ("row", {"input_is_parallel": False}),
    ("row", {"skip_bias_add": True}),
    ("row", {"input_is_parallel": False, "skip_bias_add": True}),
]


def run_cases() -> list[Result]:
    return [run_layer(kind, settings) for kind, settings in CASES]


def test_every_flag_gives_what_a_plain_product_gives() -> None:
    product, bias, x_grad, gradients = plain()
    results = run_distributed(2, run_cases)
    for number, (kind, settings) in enumerate(CASES):
        is_cut = kind == "column" and not settings.get("gather_output", False)
        for rank in range(2):
            outputs, own_x_grad, _ = results[rank][number]
            expected = [product, bias] if settings.get("skip_bias_add") else [product + bias]
            if is_cut:
                expected = [tensor.chunk(2, dim=-1)[rank] for tensor in expected]
            assert len(outputs) == len(expected), settings
            for ours, theirs in zip(outputs, expected, strict=True):
                torch.testing.assert_close(ours, theirs, msg=f"{kind} {settings}")
            cut_grad = kind == "row" and settings.get("input_is_parallel", True)
            wanted = x_grad.chunk(2, dim=-1)[rank] if cut_grad else x_grad
            torch.testing.assert_close(own_x_grad, wanted, msg=f"{kind} {settings}: input's gradient")
        found = reassemble([results[rank][number][2] for rank in range(2)], copy_tolerance=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(torch.from_numpy(found[name]), gradient, msg=f"{kind} {settings}: {name}")


def test_a_layer_without_a_bias_gives_none_for_it() -> None:
    for layer in (
        ColumnParallelLinear(INNER, OUTER, single_rank_group(), bias=False, skip_bias_add=True),
        RowParallelLinear(INNER, OUTER, single_rank_group(), bias=False, skip_bias_add=True),
    ):
        output, bias = layer(torch.zeros(LENGTH, BATCH, INNER))
        assert output.shape == (LENGTH, BATCH, OUTER)
        assert bias is None


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        (ColumnParallelLinear, {"output_size": 7}, "7 output features are not divisible by tensor-parallel size 2;"),
        (ColumnParallelLinear, {"stride": 2}, "10 output features .* size 2 x 2 stacked tensors;"),
        (ColumnParallelLinear, {"gather_output": True, "config": SEQUENCE_PARALLEL}, "here True and 1; drop one"),
        (RowParallelLinear, {"input_size": 5}, "5 input features are not divisible by tensor-parallel size 2;"),
        (RowParallelLinear, {"input_is_parallel": False, "config": SEQUENCE_PARALLEL}, "input_is_parallel=False takes"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(layer: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        layer(**{"input_size": INNER, "output_size": OUTER, "tp_group": TWO_RANKS} | settings)
    assert "\n" not in str(caught.value)
