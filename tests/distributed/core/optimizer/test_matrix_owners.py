"""Whole matrices on their owners, where some ranks hold nothing of any matrix."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.flat_parameters import ParamPart
from megatron.core.optimizer.matrix_owners import MatrixOwners
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import ParamSpec, attach_spec, full_pieces
from tests.harness.distributed import run_distributed

SHAPES = ((4, 6), (5, 3), (2, 7), (3, 2))
STRETCHES = (((0, 0, 10),), (), ((0, 10, 24), (1, 0, 15), (2, 0, 14), (3, 0, 6)))
"""What each data-parallel rank has of the matrices: (number of the matrix, start, end)."""


def doubled(dtype: torch.dtype, round_bytes: int) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    dp = create_parallel_state().dp
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for number, parameter in enumerate(parameters):
        attach_spec(parameter, ParamSpec(f"{number}.weight", SHAPES[number], full_pieces(SHAPES[number])))
    parts, values = [], []
    for number, start, end in STRETCHES[dp.rank]:
        flat = parameters[number].data.view(-1)[start:end]
        parts.append(ParamPart(parameters[number], start, end, flat, torch.zeros_like(flat)))
        # 1 + 2**-20 and the like are no numbers of bfloat16.
        values.append(1.0 + (100.0 * number + torch.arange(start, end, dtype=torch.float32)) * 2.0**-20)
    owners = MatrixOwners(parameters, parts, single_rank_group(), dp, is_sharded=True, round_bytes=round_bytes)
    results = [torch.zeros_like(each) for each in values]
    for matrices in owners.rounds:
        own = [values[at.part][at.start : at.end] for at in matrices.stretches]
        for at, result in zip(matrices.stretches, matrices.compute(own, lambda matrix, _: 2.0 * matrix), strict=True):
            results[at.part][at.start : at.end] += result
    return len(owners.rounds), [2.0 * each for each in values], results


@pytest.mark.parametrize(("dtype", "round_bytes", "rounds"), [(torch.float32, 1, 2), (torch.bfloat16, 1000, 1)])
def test_ranks_without_any_part_of_a_matrix_compute_as_exactly_as_others(
    dtype: torch.dtype, round_bytes: int, rounds: int
) -> None:
    """Three ranks own four matrices: one of them has two."""
    for num_rounds, expected, found in run_distributed(3, doubled, dtype, round_bytes):
        assert num_rounds == rounds
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
