"""The report of replicas that differ, from hashes as several ranks would bring them."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed import weight_checks
from megatron.core.distributed.weight_checks import bit_hash, compare_replicas
from megatron.core.process_group import Group

RANKS = (10, 11, 12, 13, 14)


def compared(monkeypatch: pytest.MonkeyPatch, changed: dict[int, int], num_tensors: int = 10) -> str:
    """Return what is said if some of the ranks, by their places, have other bits in so many of the first tensors."""

    def gather(hashes: torch.Tensor, group: Group) -> torch.Tensor:
        of_ranks = hashes.repeat(group.size, 1)
        for place, count in changed.items():
            of_ranks[place, :count] += 1 + place
        return of_ranks.flatten()

    monkeypatch.setattr(weight_checks, "all_gather_first_dim", gather)
    tensors = [(f"w{number}", torch.full((2,), float(number))) for number in range(num_tensors)]
    return compare_replicas(tensors, Group(("dp",), RANKS, 0))


@pytest.mark.parametrize(
    ("changed", "report"),
    [
        ({}, ""),
        ({2: 1}, "1 of 10 parameters differ * w0; rank 12 differs from the others"),
        ({4: 1, 0: 2}, "2 of 10 parameters differ * w0, w1; ranks 10, 14 differ from most"),
        ({1: 8}, "8 of 10 parameters differ * w0, w1, w2, w3, w4, w5, w6, w7; rank 11 differs from the others"),
        (
            {1: 9},
            "9 of 10 parameters differ * w0, w1, w2, w3, w4, w5, w6, w7 and 1 more; rank 11 differs from the others",
        ),
        # As many agree on one value as on another.
        ({1: 1, 2: 1, 3: 1, 4: 1}, "1 of 10 parameters differ * w0; no majority tells which of them is wrong"),
    ],
)
def test_the_ranks_that_are_not_among_most_are_named(
    monkeypatch: pytest.MonkeyPatch, changed: dict[int, int], report: str
) -> None:
    between = "between the data-parallel ranks [10, 11, 12, 13, 14]:"
    assert compared(monkeypatch, changed) == report.replace("*", between)


def test_one_rank_or_no_tensor_needs_no_comparison() -> None:
    assert compare_replicas([("w", torch.ones(2))], Group(("dp",), (3,), 0)) == ""
    assert compare_replicas([], Group(("dp",), RANKS, 0)) == ""


def test_a_hash_is_the_same_whatever_part_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 7)
    whole = bit_hash(values)
    monkeypatch.setattr(weight_checks, "_CHUNK_ELEMENTS", 4)
    assert bit_hash(values) == whole
    assert bit_hash(values.t()) != whole
