"""Mappings between tensor-parallel regions that need no communication."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.parallel_state import ParallelSizes, describe_parallel_state
from megatron.core.tensor_parallel import mappings

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
