"""Descriptions of the parameters of tensor-parallel layers."""

from __future__ import annotations

import pytest

from megatron.core.parallel_state import ParallelSizes, describe_parallel_state
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, replicated_spec


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ()),
        ({"fused_rows": (4, 2, 2)}, (4, 2, 2)),
        ({"num_stacked": 2}, (4, 4)),
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
