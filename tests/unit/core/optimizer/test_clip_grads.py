"""Clipping of gradients: an accurate norm, each element once, by kind, and messages about what is not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.weight_checks import BadWeightsError
from megatron.core.main_grad import main_grad_of
from megatron.core.optimizer.clip_grads import (
    ALL_KINDS,
    KINDS,
    GradNorm,
    GradStatistics,
    check_weights,
    clip_coefficient,
    describe_bad_gradients,
    grad_multipliers,
    is_counted,
    kind_of,
    sum_of_squares,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, even_shards, full_shards, spec_of
from tests.unit.core.distributed.toy_model import ToyModel, autograd_gradients
from tests.unit.core.distributed.toy_model import parameter as toy_parameter
from tests.unit.core.optimizer.test_optimizer import build, train_step


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
        over_tp = ParamSpec("a", shape, full_shards(shape), ("tp",), (), state.tp.rank, 2)
        over_both = ParamSpec("b", shape, full_shards(shape), ("tp", "pp"))
        sharded = ParamSpec("c", (6,), even_shards((6,), 0, state.tp.rank, 2))
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
        attach_spec(self.table, ParamSpec("table", (7, 3), even_shards((7, 3), 0, 1, 2, padded_length=8)))
        attach_spec(self.norm, ParamSpec("norm", (3,), full_shards((3,)), ("tp",), (), 1, 2))
        attach_spec(self.shared, ParamSpec("shared", (2, 5), full_shards((2, 5)), replica_index=0, num_replicas=2))


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


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("embedding.word_embeddings.weight", (5, 3), "embeddings"),
        ("output_layer.weight", (5, 3), "embeddings"),
        ("decoder.layers.0.mlp.linear_fc1.weight", (4, 3), "matrices"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight", (2, 4, 3), "matrices"),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", (2, 4), "vectors"),
        ("decoder.final_layernorm.weight", (3,), "vectors"),
    ],
)
def test_kinds(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert kind_of(ParamSpec(name, shape, full_shards(shape))) == kind


def test_kinds_are_clipped_first_and_then_all_together() -> None:
    config = OptimizerConfig(clip_grad=1.0, clip_grad_matrices=0.6, clip_grad_vectors=0.5)
    sums = torch.tensor([9.0, 4.0, 0.04], dtype=torch.float64) * 64.0
    found = grad_multipliers(sums.sum().sqrt(), sums, 8.0, config)
    # Norms of 3, 2 and 0.2: the first is shortened to 0.6, the third is not, the second has no limit.
    left = (0.6**2 + 2.0**2 + 0.2**2) ** 0.5
    expected = [0.2 / left / 8, 1.0 / left / 8, 1.0 / left / 8]
    assert [found[kind].item() for kind in KINDS] == pytest.approx(expected, rel=2e-6)
    assert found[ALL_KINDS].item() == pytest.approx(1.0 / left / 8, rel=2e-6)
    plain = grad_multipliers(sums.sum().sqrt(), sums[:0], 8.0, OptimizerConfig(clip_grad=1.0))
    assert plain[ALL_KINDS].item() == pytest.approx(1.0 / 13.04**0.5 / 8, rel=2e-6)


def test_an_update_has_the_gradients_that_are_left() -> None:
    gradients = autograd_gradients([0])
    ddp, optimizer = build(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, clip_grad_vectors=0.1)
    before = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
    outcome = train_step(ddp, optimizer, 0)
    of_vectors = [g for name, g in gradients.items() if kind_of(spec_of(getattr(ToyModel(), name))) == "vectors"]
    norm = torch.cat(of_vectors).norm().item()
    assert norm > 0.1
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert outcome.grad_norm == pytest.approx(whole)
    for name, parameter in ddp.module.named_parameters():
        factor = 0.1 / norm if kind_of(spec_of(parameter)) == "vectors" else 1.0
        expected = before[name] - 0.01 * factor * gradients[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-9)


WORLD = single_rank_group(("world",))


def chunk_with(bad: list[str], **gradients: list[float]) -> Any:
    parts = [
        SimpleNamespace(spec=SimpleNamespace(name=name), gradient=torch.tensor(values))
        for name, values in gradients.items()
    ]
    return SimpleNamespace(names_of_bad_local_gradients=lambda: bad, shards=parts)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "rank 0: p0"), (4, "rank 0: p0, p1, p2, p3"), (6, "rank 0: p0, p1, p2, p3 and 2 more")],
)
def test_four_bad_gradients_of_a_rank_are_named(count: int, expected: str) -> None:
    chunk = chunk_with([f"p{number}" for number in range(count)], p0=[float("nan")])
    assert describe_bad_gradients([chunk], WORLD, 1.0).endswith(f"; {expected}")


def test_a_sum_of_gradients_that_no_rank_has_recorded_as_bad_is_named_without_a_rank() -> None:
    chunk = chunk_with([], p0=[float("inf")], p1=[1.0], p2=[float("nan")])
    message = describe_bad_gradients([chunk, chunk], WORLD, 1.0)
    assert message.endswith("before the optimizer step; not finite after the reduction, rank unknown: p0, p2")


def test_the_four_largest_elements_are_reported_without_the_loss_scale() -> None:
    chunk = chunk_with([], a=[8.0, -64.0], b=[128.0], c=[], d=[4.0], e=[2.0], f=[16.0])
    message = describe_bad_gradients([chunk], WORLD, 4.0)
    assert message.endswith("the largest elements are 32 in b, 16 in a, 4 in f, 1 in d")


def test_weights_are_checked_after_their_gather() -> None:
    weight = toy_parameter("fc.weight", (2, 3), 1, torch.float32)

    def finish_param_gather() -> None:
        with torch.no_grad():
            weight[0, 1] = float("nan")

    chunk: Any = SimpleNamespace(finish_param_gather=finish_param_gather, parameters=lambda: [weight])
    with pytest.raises(BadWeightsError, match=r"fc\.weight"):
        check_weights([chunk], WORLD)
