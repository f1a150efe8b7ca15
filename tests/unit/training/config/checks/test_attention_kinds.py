"""Sinks and layers without positions on the command line."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.verification.cells import BASE_FLAGS

ROTARY = ("--position-embedding-type", "rope")


def resolve(*flags: str) -> RunConfig:
    return resolve_arguments([*BASE_FLAGS, *flags], 1, needs_files=False).config


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("2", (False, True, False, True)),
        ("1", (True, True, True, True)),
        ("5", (False, False, False, False)),
        ("[1,0,0,1]", (True, False, False, True)),
        ("([0]*3+[1])*1", (False, False, False, True)),
    ],
)
def test_a_number_skips_every_nth_layer_and_a_list_those_with_a_1(pattern: str, expected: tuple[bool, ...]) -> None:
    assert resolve(*ROTARY, "--no-rope-freq", pattern).model.layers_without_rotary == expected


def test_a_number_above_the_layers_is_said_to_count_for_nothing() -> None:
    flags = (*BASE_FLAGS, *ROTARY, "--no-rope-freq")
    (note,) = resolve_arguments([*flags, "5"], 1, needs_files=False).notes
    assert note.startswith("--no-rope-freq 5 has no effect on fewer layers than that")
    assert resolve_arguments([*flags, "4"], 1, needs_files=False).notes == ()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((*ROTARY, "--no-rope-freq", "[0,1]"), "the list is of 2 layers, but there are 4: a list of 4 works"),
        ((*ROTARY, "--no-rope-freq", "0"), "--no-rope-freq 0: a number greater than 0 is expected"),
        ((*ROTARY, "--no-rope-freq", "[0,1,2,0]"), "a list of 1 and 0 is expected"),
        (("--no-rope-freq", "2"), "no effect with --position-embedding-type learned_absolute"),
        ((*ROTARY, "--multi-latent-attention", "--no-rope-freq", "2"), "leave --no-rope-freq out"),
        (("--softmax-type", "two"), "vanilla"),
        ((*ROTARY, "--no-yarn-correction-range-round-to-int"), "has no effect without --rope-type yarn"),
    ],
)
def test_what_cannot_be_is_answered_in_a_line(flags: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(*flags)
    assert [line for line in caught.value.problems if problem in line], caught.value.problems
