"""Weights that are gathered in fp8, against rounding in float64: every rank has the same numbers, expert by expert."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.distributed.flat_parameters import Float8FlatParameters, send_in_float8
from megatron.core.distributed.param_layout import plan_layout
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from tests.harness.distributed import run_distributed

SHAPES = ((6, 5), (3, 7, 11), (3, 13, 2), (9, 4))
NUM_SCALES = (1, 3, 3, 1)
LARGEST, SMALLEST_EXPONENT, MANTISSA_BITS = 448.0, -6, 3


def parameters() -> list[torch.nn.Parameter]:
    """Return weights whose parts, experts', are of very different sizes; those of one of them are zero."""
    generator = torch.Generator().manual_seed(9)
    result = []
    for shape, number in zip(SHAPES, NUM_SCALES):
        values = torch.randn(shape, generator=generator)
        for index, part in enumerate(values.chunk(number)):
            part.mul_(0.0 if number > 1 and index == 1 else 37.0 ** (3 * index - 2))
        result.append(torch.nn.Parameter(values.to(torch.bfloat16)))
        send_in_float8(result[-1], number)
    return result


def rounded(part: torch.Tensor) -> torch.Tensor:
    """Return a part in E4M3 by the power of two that its largest number asks for, computed in float64."""
    numbers = part.detach().double()
    largest = float(numbers.abs().max())
    if largest == 0.0:
        return numbers
    scale = 2.0 ** math.ceil(math.log2(largest / LARGEST))
    scaled = numbers / scale
    exponents = torch.frexp(scaled).exponent - 1
    steps = torch.pow(2.0, (exponents.clamp(min=SMALLEST_EXPONENT) - MANTISSA_BITS).double())
    return torch.round(scaled / steps) * steps * scale


def gathered(bucket_size: int | None, by_bucket: bool) -> list[torch.Tensor]:
    """Return what a rank holds after a gather; before it, a rank has only its own shards right."""
    state = create_parallel_state(ParallelSizes())
    weights = parameters()
    layout = plan_layout([weight.numel() for weight in weights], bucket_size, num_shards=state.dp_cp.size)
    flat = Float8FlatParameters(weights, layout, state.dp_cp)
    for bucket in layout.buckets:
        start, end = bucket.shard(state.rank, state.dp_cp.size)
        flat.data[bucket.start : start] = 1.0e4
        flat.data[end : bucket.end] = 1.0e4
    if by_bucket:
        for index in reversed(range(len(layout.buckets))):
            flat.start_gather_of(index, async_op=True)
    else:
        flat.start_gather(async_op=True)
    flat.wait_for_all()
    return [weight.detach().double() for weight in weights]


@pytest.mark.parametrize(("num_ranks", "bucket_size", "by_bucket"), [(1, None, False), (2, 40, True), (3, None, False)])
def test_every_rank_has_what_rounding_in_float64_gives(
    num_ranks: int, bucket_size: int | None, by_bucket: bool
) -> None:
    expected = [
        torch.cat([rounded(part) for part in weight.chunk(number)]) for weight, number in zip(parameters(), NUM_SCALES)
    ]
    for of_rank in run_distributed(num_ranks, gathered, bucket_size, by_bucket):
        for found, right in zip(of_rank, expected, strict=True):
            assert torch.equal(found, right)


def test_one_scale_for_all_experts_would_round_small_ones_away() -> None:
    weight = parameters()[1]
    whole = rounded(weight)
    by_expert = torch.cat([rounded(part) for part in weight.chunk(3)])
    assert not whole[0].any()
    assert by_expert[0].all()
