"""A limit that a run ends before it can reach says so."""

from __future__ import annotations

import pytest

from megatron.config.arguments import resolve_arguments
from tests.unit.training.config.command_lines import MINIMAL

FIRST_BAD_GRADIENT = (
    "--max-consecutive-skipped-iterations 5 has no effect without --fp16: the first gradient that is not finite ends "
    "the run or follows --spike-policy; --no-check-for-nan-in-loss-and-grad skips it"
)


@pytest.mark.parametrize(
    ("words", "remedy", "note"),
    [
        (
            "--spike-policy stop --spike-budget 3",
            "--spike-policy skip",
            "--spike-budget 3 has no effect with --spike-policy stop: the first spike ends the run",
        ),
        ("--max-consecutive-skipped-iterations 5", "--no-check-for-nan-in-loss-and-grad", FIRST_BAD_GRADIENT),
        ("--max-consecutive-skipped-iterations 5", "--fp16", FIRST_BAD_GRADIENT),
    ],
)
def test_limits_that_are_never_reached_say_so(words: str, remedy: str, note: str) -> None:
    assert resolve_arguments([*MINIMAL, *words.split()], 1).notes == (note,)
    assert resolve_arguments([*MINIMAL, *words.split(), *remedy.split()], 1).notes == ()
