"""Whole matrices on their owners, in batches in which some ranks hold nothing."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.flat_parameters import ParamShard
from megatron.core.optimizer.muon_shard_exchange import MuonShardExchange
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import Box, ParamSpec, Shard, attach_spec, full_shards
from tests.harness.distributed import run_distributed

SHAPES = ((4, 6), (5, 3), (2, 7), (3, 2))
RANGES = (((0, 0, 10),), (), ((0, 10, 24), (1, 0, 15), (2, 0, 14), (3, 0, 6)))
"""What each data-parallel rank has of the matrices: (number of the matrix, start, end)."""


def doubled(dtype: torch.dtype, batch_bytes: int) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    dp = create_parallel_state().dp
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for number, parameter in enumerate(parameters):
        attach_spec(parameter, ParamSpec(f"{number}.weight", SHAPES[number], full_shards(SHAPES[number])))
    parts, values = [], []
    for number, start, end in RANGES[dp.rank]:
        flat = parameters[number].data.view(-1)[start:end]
        parts.append(ParamShard(parameters[number], start, end, flat, torch.zeros_like(flat)))
        # 1 + 2**-20 and the like are no numbers of bfloat16.
        values.append(1.0 + (100.0 * number + torch.arange(start, end, dtype=torch.float32)) * 2.0**-20)
    exchange = MuonShardExchange(parameters, parts, single_rank_group(), dp, is_sharded=True, batch_bytes=batch_bytes)
    results = [torch.zeros_like(each) for each in values]
    for batch in exchange.batches:
        own = [values[at.shard][at.start : at.end] for at in batch.shard_ranges]
        for at, result in zip(batch.shard_ranges, batch.compute(own, lambda matrix, _: 2.0 * matrix), strict=True):
            results[at.shard][at.start : at.end] += result
    return len(exchange.batches), [2.0 * each for each in values], results


@pytest.mark.parametrize(("dtype", "batch_bytes", "num_batches"), [(torch.float32, 1, 4), (torch.bfloat16, 1000, 1)])
def test_ranks_without_any_part_of_a_matrix_compute_as_exactly_as_others(
    dtype: torch.dtype, batch_bytes: int, num_batches: int
) -> None:
    """Three ranks own four matrices, of all of which the last rank holds something, one per small batch."""
    for found_batches, expected, found in run_distributed(3, doubled, dtype, batch_bytes):
        assert found_batches == num_batches
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


NUM_LAYERS, LAYER, EXPERTS = 12, (6, 5), (5, 4, 7)


def cubed(matrix: torch.Tensor) -> torch.Tensor:
    return matrix @ matrix.T @ matrix


def cubed_in_batches(batch_bytes: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return how much of each batch this rank holds, its result, and that of one process.

    Two tensor-parallel ranks have half of the rows of each layer, and three experts or two. Of all that, one after
    another, the data-parallel ranks have a half each.
    """
    state = create_parallel_state(ParallelSizes(dp=2, tp=2))
    t, generator = state.tp.rank, torch.Generator().manual_seed(5)
    whole = torch.randn(NUM_LAYERS, *LAYER, dtype=torch.float64, generator=generator)
    experts = torch.randn(EXPERTS, dtype=torch.float64, generator=generator)
    rows, mine = slice(3 * t, 3 * t + 3), slice(3 * t, 3 + 2 * t)
    values = [*(each[rows] for each in whole), experts[mine]]
    expected = [*(cubed(each)[rows] for each in whole), torch.stack([cubed(each) for each in experts[mine]])]
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in values]
    for number, parameter in enumerate(parameters[:-1]):
        shard = Shard(Box((rows.start, 0), (3, 5)), (0, 0))
        attach_spec(parameter, ParamSpec(f"layers.{number}.weight", LAYER, (shard,)))
    of_experts = Shard(Box((mine.start, 0, 0), tuple(parameters[-1].shape)), (0, 0, 0))
    attach_spec(parameters[-1], ParamSpec("experts.weight", EXPERTS, (of_experts,), is_expert=True))
    half = sum(each.numel() for each in values) // 2
    begin, parts, values_of, expected_of, position = half * state.dp.rank, [], [], [], 0
    for parameter, value, result in zip(parameters, values, expected, strict=True):
        start, end = (min(max(at - position, 0), value.numel()) for at in (begin, begin + half))
        position += value.numel()
        if start < end:
            flat = parameter.data.view(-1)[start:end]
            parts.append(ParamShard(parameter, start, end, flat, torch.zeros_like(flat)))
            values_of.append(value.reshape(-1)[start:end])
            expected_of.append(result.reshape(-1)[start:end])
    exchange = MuonShardExchange(parameters, parts, state.tp, state.dp, is_sharded=True, batch_bytes=batch_bytes)
    found = [torch.zeros_like(each) for each in values_of]
    for batch in exchange.batches:
        own = [values_of[at.shard][at.start : at.end] for at in batch.shard_ranges]
        for at, result in zip(batch.shard_ranges, batch.compute(own, lambda each, _: cubed(each)), strict=True):
            found[at.shard][at.start : at.end] = result
    held = [sum(at.end - at.start for at in batch.shard_ranges) for batch in exchange.batches]
    return held, torch.cat(found), torch.cat(expected_of)


def test_batches_bound_what_each_rank_holds_over_tensor_and_expert_parallel_ranks() -> None:
    """Layers of 30 numbers, of which ranks hold 15, and experts of 28; data-parallel ranks hold six layers or more."""
    at_once = run_distributed(4, cubed_in_batches, 2**20)
    assert [len(held) for held, _, _ in at_once] == [1] * 4
    for most, some_have_nothing in ((30, False), (56, True)):
        in_batches = run_distributed(4, cubed_in_batches, most * 8)
        assert all(max(held) <= most for held, _, _ in in_batches)
        assert {len(held) for held, _, _ in in_batches} == {5}
        assert any(0 in held for held, _, _ in in_batches) == some_have_nothing
        for (_, one, expected), (_, other, _) in zip(at_once, in_batches, strict=True):
            assert torch.equal(one, other)
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def cubed_of_replicas() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return results and what they should be of matrices that two tensor-parallel ranks both hold whole."""
    state, generator = create_parallel_state(ParallelSizes(tp=2)), torch.Generator().manual_seed(7)
    values = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((6, 5), (3, 4), (2, 2))]
    parameters, parts = [], []
    for number, value in enumerate(values):
        parameter, shape = torch.nn.Parameter(value.clone()), tuple(value.shape)
        spec = ParamSpec(f"{number}.weight", shape, full_shards(shape), ("tp",), (), state.tp.rank, 2)
        attach_spec(parameter, spec)
        flat = parameter.data.view(-1)
        parameters.append(parameter)
        parts.append(ParamShard(parameter, 0, flat.numel(), flat, torch.zeros_like(flat)))
    (batch,) = MuonShardExchange(parameters, parts, state.tp, state.dp, is_sharded=False).batches
    results = batch.compute([part.values.clone() for part in parts], lambda each, _: cubed(each))
    return [(result.view(value.shape), cubed(value)) for result, value in zip(results, values, strict=True)]


def test_every_rank_has_the_result_of_a_replicated_matrix() -> None:
    for pairs in run_distributed(2, cubed_of_replicas):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
