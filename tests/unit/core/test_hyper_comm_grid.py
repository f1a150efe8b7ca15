"""The groups of a grid with axes of one's own."""

from __future__ import annotations

import pytest

from megatron.core.hyper_comm_grid import HyperCommGrid

# From megatron-core 0.16.1.
GROUPS = {
    "cp": [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11], [12, 14, 16], [13, 15, 17], [18, 20, 22], [19, 21, 23]],
    "tp cp": [[first + rank for rank in range(6)] for first in (0, 6, 12, 18)],
    "dp tp": [[first + step + rank for step in (0, 6, 12, 18) for rank in (0, 1)] for first in (0, 2, 4)],
}


@pytest.mark.parametrize("dims", GROUPS)
def test_groups_are_those_of_megatron_core(dims: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "24")
    grid = HyperCommGrid([2, 3, 4], ["tp", "cp", "dp"])
    assert grid.get_rank_enum(dims.split()) == GROUPS[dims]
    assert grid.get_rank_enum(dims.split()[::-1]) == GROUPS[dims]


def test_a_grid_may_begin_after_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4).get_rank_enum("dp") == [[4, 6], [5, 7]]


def test_what_does_not_fit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="2 dims, but there are 1"):
        HyperCommGrid([2, 2], ["tp"])
    with pytest.raises(ValueError, match="equal names"):
        HyperCommGrid([2, 2], ["tp", "tp"])
    with pytest.raises(ValueError, match="non-negative, got -1"):
        HyperCommGrid([2], ["tp"], rank_offset=-1)
    with pytest.raises(RuntimeError, match="over sized"):
        HyperCommGrid([4, 2], ["tp", "dp"], rank_offset=2)
    grid = HyperCommGrid([4, 2], ["tp", "dp"])
    with pytest.raises(KeyError, match="hasn't been created"):
        grid.get_pg("tp")
    with pytest.raises(ValueError, match=r"no dims \['pp'\]"):
        grid.get_rank_enum("pp")
