"""Faults are named by flags, befall a rank that the seed draws, and end a run with a documented status."""

from __future__ import annotations

import random

import pytest

from megatron.core.errors import ConfigurationError
from megatron.verification.faults.injection import Fault, Kind, parse_fault


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("kill", "any", Fault("kill", "any")),
        ("kill", "launcher", Fault("kill", "launcher")),
        ("stop", "007", Fault("stop", "7")),
        ("slow", "1:2.5", Fault("slow", "1", 2.5)),
        ("corrupt", "weight", Fault("corrupt", "weight")),
    ],
)
def test_flags_name_faults(kind: Kind, text: str, expected: Fault) -> None:
    assert parse_fault(kind, text) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("kill", "-1"),
        ("kill", "some"),
        ("kill", "²"),
        ("kill", "9" * 5000),
        ("stop", "launcher"),
        ("partition", "all"),
        ("corrupt", "disk"),
        ("slow", "1"),
        ("slow", "1:"),
        ("slow", "1:1"),
        ("slow", "1:nan"),
        ("slow", "1:inf"),
        ("slow", "any:1e9"),
    ],
)
def test_what_names_no_fault_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--{kind} "):
        parse_fault(kind, text)


def test_the_seed_draws_the_rank() -> None:
    drawn = {Fault("kill", "any").rank([0, 1, 2], random.Random(seed)) for seed in range(30)}
    assert drawn == {0, 1, 2}
    assert Fault("kill", "2").rank([0, 1, 2], random.Random(1)) == 2
    assert Fault("kill", "all").rank([0, 1, 2], random.Random(1)) is None


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--kill 2: there is no rank 2 here; change it to one of: 0, 1"):
        Fault("kill", "2").rank([0, 1], random.Random(1))


@pytest.mark.parametrize("kind", ["stop", "partition"])
def test_a_rank_alone_is_neither_stopped_nor_cut_off(kind: Kind) -> None:
    with pytest.raises(ConfigurationError, match="the run has one rank here"):
        Fault(kind, "any").rank([0], random.Random(1))


def test_statuses_are_those_of_the_command() -> None:
    assert Fault("kill", "1").statuses(has_launcher=True) == (1,)
    assert -9 in Fault("kill", "launcher").statuses(has_launcher=True)
    assert -9 in Fault("kill", "0").statuses(has_launcher=False)
    assert Fault("corrupt", "sample").statuses(has_launcher=False) == (2,)
    assert Fault("corrupt", "sample").statuses(has_launcher=True) == (1,)
    assert Fault("slow", "1", 2.0).statuses(has_launcher=True) == ()
