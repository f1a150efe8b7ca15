"""Translate the flags of older Megatron-LM versions and of its forks to current flags.

The parser accepts these flags with a note, if the translation does not change the results. Flags of other programs, and
flags that the user has to decide about, are rejected with the flags that replace them (`unknown_flags`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from megatron.config.megatron_flags import NO_EFFECT, NOT_SUPPORTED, ForeignFlag, foreign_flag, same_value
from megatron.config.run_config import command_line_fields
from megatron.core.config_base import FieldSpec

_OTHER_PROGRAMS = ("Hugging Face transformers", "nanoGPT", "several trainers")
"""Trainers in the table whose command lines are not those of pretrain_gpt.py."""


@dataclasses.dataclass(frozen=True)
class TranslatedWords:
    """Command line with current flags, a note for each translated flag, and a problem for each contradiction."""

    words: list[str]
    notes: list[str]
    problems: list[str]


@dataclasses.dataclass(frozen=True)
class _Flag:
    """Flag with its values, and its words on the command line; ``name`` is empty for words before any flag."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((self.name, *self.values))


def translate_flags(words: Sequence[str]) -> TranslatedWords:
    """Replace the flags of older versions and of forks on the command line of a training run.

    A translation may add flags that its flag requires. They are left out if the command line sets them.
    """
    flags = list(_split(words))
    translations = [_translation(flag) for flag in flags]
    if not any(translations):
        return TranslatedWords(list(words), [], [])
    fields = _fields()
    typed = {fields[flag.name].name: flag for flag in flags if flag.name in fields}
    equivalents = [
        None if known is None else list(_split(_words_of(flag, known))) for flag, known in zip(flags, translations)
    ]
    required_by_none = {*typed, *(fields[new[0].name].name for new in equivalents if new)}
    translated = TranslatedWords([], [], [])
    for flag, known, new in zip(flags, translations, equivalents):
        if known is None or new is None:
            translated.words.extend(flag.words)
        elif not new:
            translated.notes.append(f"{flag.text} has no effect: {known.change.removeprefix('nothing: ')}")
        else:
            same = typed.get(fields[new[0].name].name)
            if same is not None and not _is_same(same, new[0]):
                translated.problems.append(f"{flag.text} means {new[0].text}, and {same.text} is given; keep one")
                continue
            required = [each for each in new[1:] if fields[each.name].name not in required_by_none]
            added = [new[0], *required]
            translated.words.extend(word for each in added for word in each.words)
            translated.notes.append(f"{flag.text} is read as {' '.join(each.text for each in added)}")
    return translated


@functools.cache
def _fields() -> Mapping[str, FieldSpec]:
    return {name: spec for _, spec in command_line_fields() for name in spec.flags}


def _split(words: Sequence[str]) -> Iterator[_Flag]:
    """Yield the flags of a command line with their values. Words after ``--`` are no flags."""
    place = 0
    while place < len(words):
        begin, word = place, words[place]
        place += 1
        if word == "--":
            yield _Flag("", (), tuple(words[begin:]))
            return
        name, has_value, value = word.partition("=") if word.startswith("--") else ("", "", "")
        while place < len(words) and not words[place].startswith("--"):
            place += 1
        values = words[begin + 1 : place]
        yield _Flag(name, (*([value] if has_value else []), *values), tuple(words[begin:place]))


def _translation(flag: _Flag) -> ForeignFlag | None:
    """Return the table's entry of a flag that is translated, None if the flag stays as it is."""
    if not flag.name or flag.name in _fields() or flag.name in NO_EFFECT or flag.name in NOT_SUPPORTED:
        return None
    known = foreign_flag(flag.name, flag.values)
    if known is None or known.needs_decision or known.trainer in _OTHER_PROGRAMS or known.flag.endswith("*"):
        return None
    has_its_values = bool(flag.values) if known.arity == "+" else len(flag.values) == known.arity
    return known if has_its_values else None


def _words_of(flag: _Flag, known: ForeignFlag) -> list[str]:
    return [value for word in known.becomes.split() for value in (flag.values if word == "{}" else (word,))]


def _is_same(given: _Flag, translated: _Flag) -> bool:
    return len(given.values) == len(translated.values) and all(map(same_value, given.values, translated.values))
