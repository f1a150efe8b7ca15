"""The norm of gradients: accurate, and each element counted once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.main_grad import main_grad_of
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.optimizer.clip_grads import GradNorm, GradStatistics, clip_coefficient, is_counted, sum_of_squares
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, even_pieces, full_pieces


def coefficient(norm: float, max_norm: float) -> float:
    return clip_coefficient(torch.tensor(norm, dtype=torch.float64), max_norm).item()


def test_coefficient_clips_only_what_is_too_long() -> None:
    assert coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert coefficient(0.5, 1.0) == 1.0
    assert coefficient(1.0, 1.0) == 1.0 / (1.0 + 1e-6)
    assert coefficient(100.0, 0.0) == 1.0
    assert coefficient(0.0, 1.0) == 1.0
    # Divided once: 0.7 times the reciprocal would be another number.
    assert coefficient(1.4, 0.7) == 0.7 / (1.4 + 1e-6) != 0.7 * (1.0 / (1.4 + 1e-6))


@pytest.mark.parametrize("length", [1, 127, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sum_of_squares_of_any_length(length: int, dtype: torch.dtype) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    expected = math.fsum(value * value for value in values.double().tolist())
    assert sum_of_squares(values).item() == pytest.approx(expected, rel=1e-6)


def test_sum_of_squares_of_many_small_values_is_accurate() -> None:
    values = torch.full((3_000_001,), 1.1e-3)
    exact = values.numel() * float(values[0]) ** 2
    assert sum_of_squares(values).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_sum_of_squares_is_not_finite_where_a_value_of_no_weight_is_not(bad: float) -> None:
    values = torch.ones(384)
    weights = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    assert sum_of_squares(values, weights).item() == pytest.approx(256.0, rel=1e-6)
    values[200] = bad
    assert not math.isfinite(sum_of_squares(values, weights).item())


def test_one_rank_of_the_grid_counts_each_replicated_parameter() -> None:
    shape = (3,)
    for rank in range(8):
        state = describe_parallel_state(rank, 8, ParallelSizes(tp=2, pp=2))
        over_tp = ParamSpec("a", shape, full_pieces(shape), ("tp",), (), state.tp.rank, 2)
        over_both = ParamSpec("b", shape, full_pieces(shape), ("tp", "pp"))
        sharded = ParamSpec("c", (6,), even_pieces((6,), 0, state.tp.rank, 2))
        assert is_counted(over_tp, state) == (state.tp.rank == 0)
        assert is_counted(over_both, state) == (state.tp.rank == 0 and state.pp.rank == 0)
        assert is_counted(sharded, state)


class Shards(nn.Module):
    """Hold a padded shard of a table, a replicated norm and a second copy of a shared head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 3))
        self.norm = nn.Parameter(torch.zeros(3))
        self.shared = nn.Parameter(torch.zeros(2, 5))
        attach_spec(self.table, ParamSpec("table", (7, 3), even_pieces((7, 3), 0, 1, 2, padded_length=8)))
        attach_spec(self.norm, ParamSpec("norm", (3,), full_pieces((3,)), ("tp",), (), 1, 2))
        attach_spec(self.shared, ParamSpec("shared", (2, 5), full_pieces((2, 5)), replica_index=0, num_replicas=2))


def test_copies_and_padding_do_not_count() -> None:
    # Rank 1 of a tensor-parallel pair, whose own contribution to the norm is looked at without the other's.
    state = describe_parallel_state(1, 2, ParallelSizes(tp=2))
    state = replace(state, model_parallel=single_rank_group(("pp", "tp"), rank=1))
    model = Shards()
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(), state)
    values = {"table": 2.0, "norm": 50.0, "shared": 3.0}
    for name, parameter in model.named_parameters():
        main_grad = main_grad_of(parameter)
        assert main_grad is not None
        main_grad.tensor.fill_(values[name])
    grads = {name: main_grad_of(parameter).tensor for name, parameter in model.named_parameters()}
    grads["table"][3] = 0.0
    grads["table"][1, 2] = 0.0
    grads["shared"][0, :3] = 0.0
    grads["norm"][0] = 0.0
    meter = GradNorm([ddp], state)
    statistics = GradStatistics.from_totals(meter.measure(count_zeros=True).tolist())
    assert statistics.norm == pytest.approx(math.sqrt(8 * 4.0 + 7 * 9.0), rel=1e-6)
    assert statistics.num_zeros == 4
    assert [len(meter.measure(count_zeros=counted)) for counted in (False, True)] == [1, 2]
    assert GradStatistics.from_totals(meter.measure().tolist()).num_zeros is None
    grads["norm"][1] = float("nan")
    assert not GradStatistics.from_totals(meter.measure().tolist()).is_finite
