"""The zigzag cut: its inverse, its balance, and what may look at what."""

from __future__ import annotations

import pytest
import torch

from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads
from megatron.core.context_parallel.partition import (
    chunks_of,
    cut_sequence,
    positions_of,
    to_rank_order,
    to_sequence_order,
)
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.parallel_config import ParallelConfig
from megatron.core.process_group import Group, single_rank_group

SIZES = (1, 2, 3, 4, 8)


def test_two_ranks_hold_the_outer_and_the_inner_quarters() -> None:
    assert chunks_of(0, 2) == (0, 3)
    assert positions_of(0, 2, 12).tolist() == [0, 1, 2, 9, 10, 11]
    assert positions_of(1, 2, 12).tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("size", SIZES)
def test_every_position_is_held_once_and_in_ascending_order(size: int) -> None:
    parts = [positions_of(rank, size, 48).tolist() for rank in range(size)]
    assert all(part == sorted(part) for part in parts)
    assert sorted(position for part in parts for position in part) == list(range(48))


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_same_number_of_causal_pairs(size: int) -> None:
    keys = torch.arange(48)
    pairs = [int(CAUSAL.visible(positions_of(rank, size, 48), keys).sum()) for rank in range(size)]
    # 24 / size chunks' own triangles differ by nothing: all ranks do exactly as much.
    assert pairs == [48 * 49 // 2 // size] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_together_are_the_whole(size: int, dim: int) -> None:
    shape = [3, 5, 7]
    shape[dim] = 48
    whole = torch.randn(shape)
    parts = [cut_sequence(whole, Group(("cp",), tuple(range(size)), rank), dim) for rank in range(size)]
    assert all(part.shape[dim] == 48 // size for part in parts)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, positions_of(rank, size, 48)))
    joined = torch.cat(parts, dim=dim)
    assert torch.equal(to_sequence_order(joined, size, dim), whole)
    assert torch.equal(to_rank_order(whole, size, dim), joined)


def test_one_rank_is_given_the_tensor_itself() -> None:
    whole = torch.randn(3, 7)
    assert cut_sequence(whole, single_rank_group(("cp",)), dim=1) is whole


def test_group_decides_the_part() -> None:
    cp = Group(axes=("cp",), ranks=(4, 6, 8), rank=1)
    assert cut_sequence(torch.arange(12), cp, dim=0).tolist() == [2, 3, 8, 9]


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 14 tokens cannot be divided into 2 x 2 equal chunks"):
        cut_sequence(torch.arange(14), Group(("cp",), (0, 1), 0), dim=0)


@pytest.mark.parametrize(
    ("heads", "groups", "size", "copies"),
    [(12, 12, 4, 1), (12, 4, 2, 1), (12, 2, 4, 2), (12, 1, 4, 4), (12, 3, 2, 2), (12, 2, 3, 3), (6, 6, 4, None)],
)
def test_key_value_heads_are_repeated_until_the_ranks_can_share_them(
    heads: int, groups: int, size: int, copies: int | None
) -> None:
    assert copies_of_key_value_heads(heads, groups, size) == copies


def test_exchanges_are_given_once_or_for_each_layer() -> None:
    assert ParallelConfig(cp_comm_type=("a2a",)).cp_exchange(3) == "a2a"
    assert ParallelConfig(cp_comm_type=("a2a", "p2p", "all_gather")).cp_exchange(1) == "p2p"
