"""When the weights of FSDP are gathered and freed, on one rank, where gathers complete at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron.core.distributed.fully_sharded_data_parallel import (
    ShardedWeightBuffer,
    ShardedWeights,
    WeightShards,
    unit_labels,
)
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer, ReductionPlan
from megatron.core.distributed.param_layout import plan_layout
from megatron.core.main_grad import main_grad_of
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, full_shards, held_of

GROUP = single_rank_group(("dp", "cp"))
NAMES = ("first", "layer0", "layer1", "rest")


class Map(nn.Linear):
    """Say when it runs."""

    def __init__(self, say: Callable[[], None]) -> None:
        super().__init__(3, 3, bias=False)
        self.say = say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.say()
        return super().forward(x)


class Chunk(nn.Module):
    """Four linear maps, of which the middle ones are layers; ``seen`` has who was in memory when each ran."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(Map(lambda: self.seen.append(self.in_memory())) for _ in NAMES)
        for number, parameter in enumerate(self.parameters()):
            attach_spec(parameter, ParamSpec(NAMES[number], (3, 3), full_shards((3, 3))))
        self.first, self.layers = self.maps[0], list(self.maps[1:3])
        self.weights: ShardedWeights | None = None
        self.seen: list[list[str]] = []
        self.wraps_output = False

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor]:
        assert self.weights is not None
        for module in self.maps:
            self.weights.enter([module])
            before, x = x, module(x)
            self.weights.exit([module], before, x)
        return (x,) if self.wraps_output else x

    def in_memory(self) -> list[str]:
        return [name for name, weight in zip(NAMES, self.parameters()) if weight.untyped_storage().nbytes()]


def make_chunk() -> tuple[Chunk, ShardedWeights, list[torch.Tensor]]:
    """Return a chunk with sharded weights, and the values of the weights."""
    chunk = Chunk()
    parameters = list(chunk.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    labels = unit_labels(chunk, chunk.layers, chunk.first)
    layout = plan_layout([9] * 4, units=[labels[id(parameter)] for parameter in parameters])
    plan = ReductionPlan(shard=True, average=False)
    buffer = ShardedWeightBuffer(parameters, layout, torch.float32, GROUP, plan, lambda: True)
    weights = ShardedWeights(chunk, chunk.layers, chunk.first, [buffer])
    chunk.weights = weights
    return chunk, weights, values


def test_weights_are_in_memory_when_they_are_asked_for() -> None:
    chunk, weights, values = make_chunk()
    assert chunk.in_memory() == []
    weights.use_all()
    assert chunk.in_memory() == list(NAMES)
    assert all(torch.equal(parameter, value) for parameter, value in zip(chunk.parameters(), values))
    weights.use_all()
    weights.free_all()
    weights.free_all()
    assert chunk.in_memory() == []
    for parameter, value in zip(chunk.parameters(), values):
        ((_, held),) = held_of(parameter)
        assert torch.equal(held, value)


def test_without_gradients_weights_go_when_their_part_has_run() -> None:
    chunk, _, values = make_chunk()
    x = torch.randn(2, 3)
    expected = x
    for value in values:
        expected = expected @ value.t()
    with torch.no_grad():
        torch.testing.assert_close(chunk(x), expected)
    assert chunk.seen == [["first", "layer0", "rest"], ["layer0", "layer1", "rest"], ["layer1", "rest"], ["rest"]]
    assert chunk.in_memory() == []


def test_the_rest_stays_for_the_backward_pass_or_comes_again() -> None:
    chunk, weights, values = make_chunk()
    x = torch.randn(2, 3, requires_grad=True)
    for frees_between in (False, True):
        output = chunk(x)
        assert isinstance(output, torch.Tensor)
        assert chunk.in_memory() == ["rest"]
        if frees_between:
            weights.free_all()
        (gradient,) = torch.autograd.grad(output.sum(), list(chunk.parameters())[3])
        assert chunk.in_memory() == ["rest"]
        assert gradient.shape == values[3].shape


def test_an_output_without_a_gradient_is_left_alone() -> None:
    chunk, _, _ = make_chunk()
    chunk.requires_grad_(requires_grad=False)
    output = chunk(torch.randn(2, 3))
    assert not output.requires_grad
    chunk.wraps_output = True
    (output,) = chunk(torch.randn(2, 3))
    assert output.shape == (2, 3)


def test_another_chunk_of_the_same_parameters_has_them_too() -> None:
    chunk, weights, values = make_chunk()
    other = Chunk()
    for own, module in zip(other.maps, chunk.maps):
        own.weight = module.weight
    weights.follow_chunk(other, other.layers, other.first)
    other.weights = weights
    x = torch.randn(2, 3)
    with torch.no_grad():
        found = other(x)
    torch.testing.assert_close(found, x @ values[0].t() @ values[1].t() @ values[2].t() @ values[3].t())
    assert other.seen[0] == ["first", "layer0", "rest"]
    assert chunk.in_memory() == []


def test_shards_of_parameters_without_memory_are_zero() -> None:
    full, empty = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    empty.untyped_storage().resize_(0)
    shards = WeightShards([full, empty], plan_layout([4, 4], bucket_size=1, param_alignment=4), GROUP)
    # The last parameter is in the first bucket.
    assert shards.data.tolist() == [0.0] * 4 + [1.0] * 4
    assert full.untyped_storage().nbytes() == 0
    shards.use(1)
    assert full.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(("average", "num_averaged", "expected"), [(True, 4, 0.5), (True, None, 2.0), (False, 4, 2.0)])
def test_one_rank_with_experts_of_several_divides_by_their_number(
    average: bool, num_averaged: int | None, expected: float
) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    attach_spec(parameter, ParamSpec("expert", (3,), full_shards((3,))))
    plan = ReductionPlan(average=average, num_averaged=num_averaged)
    buffer = ParamAndGradBuffer([parameter], plan_layout([3]), torch.float32, GROUP, plan, lambda: True)
    buffer.reset()
    main_grad = main_grad_of(parameter)
    assert main_grad is not None
    main_grad.add(torch.full((3,), 2.0))
    buffer.finish_sync()
    assert main_grad.tensor.tolist() == [expected] * 3
