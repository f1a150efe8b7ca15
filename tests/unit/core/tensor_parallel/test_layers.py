"""Descriptions of the parameters of tensor-parallel layers."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.parallel_state import ParallelSizes, describe_parallel_state
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, replicated_spec


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ()),
        ({"stride": 2}, (4, 4)),
    ],
)
def test_rows_of_several_matrices_in_one_weight(options: dict[str, object], expected: tuple[int, ...]) -> None:
    tp = describe_parallel_state(0, 1).tp
    layer = ColumnParallelLinear(3, 8, tp, device="meta", **options)  # type: ignore[arg-type]
    assert spec_of(layer.weight).fused_rows == expected


@pytest.mark.parametrize("tp_size", [1, 2, 3])
@pytest.mark.parametrize("is_partial", [False, True])
def test_a_replicated_parameter_sums_the_gradients_of_parts_over_several_ranks(tp_size: int, is_partial: bool) -> None:
    state = describe_parallel_state(tp_size - 1, tp_size, ParallelSizes(tp=tp_size))
    spec = replicated_spec("norm.weight", (4,), state.tp, is_partial)
    assert spec.replicated_axes == (("tp",) if tp_size > 1 else ())
    assert spec.gradient_sum_axes == (("tp",) if is_partial and tp_size > 1 else ())
    assert (spec.replica_index, spec.num_replicas) == (tp_size - 1, tp_size)


def test_a_bias_comes_into_the_sum_on_cuda_only() -> None:
    tp = describe_parallel_state(0, 1).tp
    assert not RowParallelLinear(4, 4, tp).brings_bias_into_sum


def test_a_layer_leaves_its_bias_to_the_caller() -> None:
    tp = describe_parallel_state(0, 1).tp
    x = torch.randn(5, 2, 4)
    for layer in (
        RowParallelLinear(4, 6, tp, skip_bias_add=True),
        RowParallelLinear(4, 6, tp, skip_bias_add=True, input_is_parallel=False),
        ColumnParallelLinear(4, 6, tp, skip_bias_add=True),
    ):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        output, bias = layer(x)
        assert bias is layer.bias
        torch.testing.assert_close(output, torch.nn.functional.linear(x, layer.weight))
        layer.skip_bias_add = False
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_gathered_output_has_no_padding() -> None:
    tp = describe_parallel_state(0, 1).tp
    layer = ColumnParallelLinear(4, 6, tp, padded_output_size=8, gather_output=True, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 4))
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight[:6]))
    layer.gather_output = False
    assert layer(x).shape == (5, 2, 8)


def test_features_that_ranks_cannot_share_evenly_are_rejected() -> None:
    tp = describe_parallel_state(0, 2, ParallelSizes(tp=2)).tp
    for make in (
        lambda: ColumnParallelLinear(4, 7, tp),
        lambda: ColumnParallelLinear(4, 6, tp, stride=2),
        lambda: RowParallelLinear(7, 4, tp),
    ):
        with pytest.raises(ConfigurationError, match="features"):
            make()
    assert ColumnParallelLinear(4, 7, tp, padded_output_size=8).weight.shape == (4, 4)
