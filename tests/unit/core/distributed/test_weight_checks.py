"""The checks of weights and replicas: not finite, far too large, or different among ranks."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed import weight_checks
from megatron.core.distributed.weight_checks import (
    ABSURD_RATIO,
    BadWeight,
    bit_hash,
    compare_replicas,
    describe_bad_weights,
    find_bad_weights,
    find_huge_weights,
    find_outlying_weights,
    not_finite,
)
from megatron.core.process_group import Group
from megatron.core.sharding import Box, ParamSpec, Shard, attach_spec, full_shards


def parameter_of(values: list[float]) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))
    attach_spec(parameter, ParamSpec("norm.weight", (len(values),), full_shards((len(values),))))
    return parameter


def test_elements_that_are_not_finite_are_counted_and_the_first_is_named() -> None:
    (bad,) = find_bad_weights([parameter_of([1.0, 2.0]), parameter_of([1.0, float("inf"), 3.0, float("nan")])])
    assert (bad.name, bad.num_bad, bad.num_elements, bad.first, bad.value) == ("norm.weight", 2, 4, (1,), float("inf"))


@pytest.mark.parametrize(
    ("values", "ratio", "place"),
    [
        ([1.0, 2.0, 9000.0], 1.0e3, 2),
        ([1.0, 2.0, 900.0], 1.0e3, None),
        # The square of the first element swallows the other's in float64: the mean of the others is measured again.
        ([1.0e14, 1.0e3], 1.0e5, 0),
        # Here the difference of the sums is one unit in the last place, half as much again as the other's square.
        ([1.0e14, 1.2e6], 7.5e7, 0),
        ([1.0e14, 1.0e11], 1.0e5, None),
        # The mean is that of the others alone.
        ([1.0, 2.0, 1900.0], 1.0e3, 2),
        ([1.0, 900.0], 1.0e3, None),
        # Others that are all but zero count as a thousandth.
        ([0.0, 0.0, 1.5], 1.0e3, 2),
        ([0.0, 0.0, 0.9], 1.0e3, None),
        ([5.0e6], 1.0e3, None),
        # Exactly so many times the others' mean is not beyond it.
        ([2.0, 20.0], 10.0, None),
        ([2.0, 20.5], 10.0, 1),
        ([-20.5, 2.0], 10.0, 0),
    ],
)
def test_an_element_far_above_the_mean_of_the_others_is_found(
    values: list[float], ratio: float, place: int | None
) -> None:
    found = [(bad.num_bad, bad.first) for bad in find_outlying_weights([parameter_of(values)], ratio)]
    assert found == ([] if place is None else [(1, (place,))])


def test_an_ordinary_ratio_is_a_thousand_and_an_absurd_one_a_million() -> None:
    for largest, is_found in ((1000.0, False), (1001.0, True)):
        assert bool(find_outlying_weights([parameter_of([1.0, largest])])) is is_found
    for largest, is_found in ((1.0e6, False), (1.1e6, True)):
        assert bool(find_outlying_weights([parameter_of([1.0, largest])], ABSURD_RATIO)) is is_found


def test_a_mean_of_a_thousand_is_not_huge_yet() -> None:
    assert find_huge_weights([parameter_of([1000.0, -1000.0]), parameter_of([])]) == []
    (bad,) = find_huge_weights([parameter_of([-1001.0, 1001.0, 999.0, 1002.0])])
    assert (bad.num_bad, bad.first, bad.value) == (3, (0,), -1001.0)


def test_a_parameter_whose_mean_is_huge_is_found() -> None:
    (bad,) = find_huge_weights([parameter_of([999.0, 999.0]), parameter_of([1.0, 2000.0])])
    assert (bad.num_bad, bad.first, bad.value) == (1, (1,), 2000.0)


def test_an_element_is_named_by_its_place_in_the_whole_parameter() -> None:
    """The local rows 1 and 2 are the rows 4 and 5 of the whole; the others are padding."""
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    attach_spec(parameter, ParamSpec("fc.weight", (6, 3), (Shard(Box((4, 0), (2, 3)), (1, 0)),)))
    for local, place in (((1, 0), (4, 0)), ((2, 2), (5, 2)), ((0, 1), (0, 1)), ((3, 1), (3, 1))):
        with torch.no_grad():
            parameter.zero_()[local] = torch.inf
        (bad,) = find_bad_weights([parameter])
        assert bad.first == place


def test_findings_beyond_the_fourth_are_counted() -> None:
    found = [BadWeight(name, 1, 2, (0,), 5.0, (0, 2)) for name in "abcdef"]
    text = describe_bad_weights(found)
    assert text.startswith("a on ranks 0, 2: 1 of 2 elements, the first at [0] is 5; b on ")
    assert text.endswith("the first at [0] is 5 and 2 more")
    assert text.count("; ") == 3
    assert "more" not in describe_bad_weights(found[:4])
    assert str(BadWeight("a", 1, 2, (0,), 5.0, (3,))).startswith("a on rank 3: ")


def test_integers_and_parameters_without_elements_are_finite() -> None:
    given = [torch.ones(2, dtype=torch.int64), torch.ones(0), torch.tensor([1.0, torch.nan]), torch.ones(2)]
    assert not_finite(given[:2]) == []
    assert [id(each) for each in not_finite(given)] == [id(given[2])]


def test_empty_tensors_and_integers_are_passed_over() -> None:
    infinite = torch.tensor([1.0, float("-inf")])
    tensors = [torch.empty(0), torch.arange(3), torch.ones(2, dtype=torch.bool), infinite, torch.ones(2)]
    assert not_finite(tensors) == [infinite]
    assert not_finite([torch.empty(0), torch.arange(3)]) == []


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
        (
            {1: 1, 2: 1, 3: 1, 4: 1},
            ("1 of 10 parameters differ * w0; there is no majority that identifies the wrong rank"),
        ),
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
