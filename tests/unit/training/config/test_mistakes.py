"""Typical mistakes are each answered in one line."""

from __future__ import annotations

import pytest

from tests.unit.training.config.mistakes import MISTAKES, RIGHT, Mistake, workplace

ALL = [mistake for mistakes in MISTAKES.values() for mistake in mistakes]


def test_the_command_line_that_they_change_is_right() -> None:
    with workplace():
        assert Mistake("").answers() == ()
    assert len(ALL) >= 50
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("mistake", ALL, ids=[mistake.title for mistake in ALL])
def test_each_is_answered_in_one_line_that_names_a_flag(mistake: Mistake) -> None:
    with workplace():
        (answer,) = mistake.answers()
    assert "\n" not in answer
    typed = [word for word in (*mistake.added.split(), *mistake.without) if word.startswith("-")]
    names = [word.split("=")[0] for word in typed]
    assert any(name in answer for name in (*names, *(word for word in RIGHT.split() if word.startswith("--"))))
