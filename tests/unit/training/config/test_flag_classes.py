"""Each flag is in one class, and the class is true: those without effect change nothing, those refused say why."""

from __future__ import annotations

import pytest

from megatron.config.arguments import all_flags, resolve_arguments
from megatron.config.megatron_flags import NO_EFFECT, NOT_SUPPORTED, REASONS, ForeignFlag, foreign_flags, refusal_reason
from megatron.config.run_config import command_line_fields
from megatron.core.errors import ConfigurationError
from tests.unit.training.config.command_lines import MINIMAL

PLAIN = resolve_arguments(MINIMAL, 1)
FOREIGN = [row for row in foreign_flags().values() if " " not in row.flag and not row.flag.endswith("*")]


def words_of(name: str, arity: int | str, value: str = "7") -> list[str]:
    return [name] if arity == 0 else [name, value]


def problems_of(words: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        resolve_arguments([*MINIMAL, *words], 1)
    return caught.value.problems


def test_no_flag_is_in_two_classes() -> None:
    fields = {name for _, spec in command_line_fields() for name in spec.flags}
    assert (
        fields & NO_EFFECT.keys() == fields & NOT_SUPPORTED.keys() == NO_EFFECT.keys() & NOT_SUPPORTED.keys() == set()
    )
    assert all_flags().keys() == fields | NO_EFFECT.keys() | NOT_SUPPORTED.keys()


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_flag_without_effect_leaves_the_run_as_it_is_and_says_so(name: str) -> None:
    note = NO_EFFECT[name]
    for value in note.accepted or note.quiet or ("7",):
        words = words_of(name, note.arity, value)
        parsed = resolve_arguments([*MINIMAL, *words], 1)
        assert parsed.config == PLAIN.config
        assert len(parsed.notes) == (0 if value in note.quiet else 1)
    if note.accepted:
        assert problems_of([name, "something-else"]) == (
            f"{name} something-else is not supported yet; possible: {', '.join(note.accepted)}",
        )


def test_every_reason_is_of_a_flag_that_is_refused() -> None:
    reached = {
        next(beginning for beginning, _ in REASONS if name.startswith(beginning))
        for name in NOT_SUPPORTED
        if refusal_reason(name)
    }
    assert [beginning for beginning, _ in REASONS if beginning not in reached] == []


@pytest.mark.parametrize("name", NOT_SUPPORTED)
def test_a_flag_that_is_not_supported_is_refused_with_a_reason(name: str) -> None:
    refused = NOT_SUPPORTED[name]
    (problem,) = problems_of(words_of(name, refused.arity))
    assert problem.startswith(name)
    reason = refused.instead or refusal_reason(name)
    assert reason, f"{name}: say what to do in its place, or why there is nothing to do"
    assert problem.endswith(f" is not supported yet; {reason}")
    if refused.default is not None:
        assert resolve_arguments([*MINIMAL, name, refused.default], 1).config == PLAIN.config


@pytest.mark.parametrize("row", FOREIGN, ids=lambda row: row.flag)
def test_another_trainers_flag_is_refused_by_name_with_what_stands_for_it(row: ForeignFlag) -> None:
    if row.flag in all_flags():
        return
    (problem,) = problems_of(words_of(row.flag, row.arity))
    assert row.flag in problem
    assert row.trainer in problem
    assert row.becomes.replace("{}", "7") in problem
    assert row.becomes or row.change in problem


@pytest.mark.full
def test_each_spelling_of_a_field_is_the_same_flag() -> None:
    for _, spec in command_line_fields():
        value = [] if spec.is_bool else ["7"]
        answers = set()
        for name in spec.flags:
            try:
                answers.add(repr(resolve_arguments([*MINIMAL, name, *value], 1).config))
            except ConfigurationError as error:
                answers.add(repr(error.problems).replace(name, spec.flags[0]))
        assert len(answers) == 1, spec.flags
