"""Descriptions of the parameters of tensor-parallel layers, and mappings that need no communication."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.parallel_state import ParallelSizes, describe_parallel_state
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.sharded_layers import ColumnShardedLinear, RowShardedLinear, replicated_spec


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ()),
        ({"stride": 2}, (4, 4)),
    ],
)
def test_rows_of_several_matrices_in_one_weight(options: dict[str, object], expected: tuple[int, ...]) -> None:
    tp = describe_parallel_state(0, 1).tp
    layer = ColumnShardedLinear(3, 8, tp, device="meta", **options)  # type: ignore[arg-type]
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
    assert not RowShardedLinear(4, 4, tp).brings_bias_into_sum


def test_a_layer_leaves_its_bias_to_the_caller() -> None:
    tp = describe_parallel_state(0, 1).tp
    x = torch.randn(5, 2, 4)
    for layer in (
        RowShardedLinear(4, 6, tp, skip_bias_add=True),
        RowShardedLinear(4, 6, tp, skip_bias_add=True, input_is_parallel=False),
        ColumnShardedLinear(4, 6, tp, skip_bias_add=True),
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
    layer = ColumnShardedLinear(4, 6, tp, padded_output_size=8, gather_output=True, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 4))
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight[:6]))
    layer.gather_output = False
    assert layer(x).shape == (5, 2, 8)


def test_features_that_ranks_cannot_share_evenly_are_rejected() -> None:
    tp = describe_parallel_state(0, 2, ParallelSizes(tp=2)).tp
    for make in (
        lambda: ColumnShardedLinear(4, 7, tp),
        lambda: ColumnShardedLinear(4, 6, tp, stride=2),
        lambda: RowShardedLinear(7, 4, tp),
    ):
        with pytest.raises(ConfigurationError, match="features"):
            make()
    assert ColumnShardedLinear(4, 7, tp, padded_output_size=8).weight.shape == (4, 4)


MAPPINGS = (
    mappings.copy_to_tensor_model_parallel_region,
    mappings.reduce_from_tensor_model_parallel_region,
    mappings.sum_over_tensor_model_parallel_region,
    mappings.scatter_to_tensor_model_parallel_region,
    mappings.gather_from_tensor_model_parallel_region,
    mappings.gather_from_sequence_parallel_region,
    mappings.reduce_scatter_to_sequence_parallel_region,
    mappings.scatter_to_sequence_parallel_region,
)


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: mapping.__name__)
def test_one_rank_has_the_whole_tensor(mapping) -> None:  # type: ignore[no-untyped-def]
    x = torch.arange(6.0).view(2, 3)
    assert mapping(x, describe_parallel_state(0, 1).tp) is x


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_keeps_its_part(rank: int) -> None:
    tp = describe_parallel_state(rank, 3, ParallelSizes(tp=3)).tp
    x = torch.arange(36.0).view(6, 6)
    columns = mappings.scatter_to_tensor_model_parallel_region(x, tp)
    assert columns.is_contiguous()
    assert torch.equal(columns, x[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(mappings.scatter_to_sequence_parallel_region(x, tp), x[2 * rank : 2 * rank + 2])
    with pytest.raises(ConfigurationError, match=r"dim -1 of a tensor \[6, 4\] is not divisible by .* size 3"):
        mappings.scatter_to_tensor_model_parallel_region(x[:, :4], tp)
