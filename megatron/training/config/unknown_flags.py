"""Words of a command line that are no flags here: other trainers' flags, typing errors, stray values."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Sequence

from megatron.training.config.foreign_flags import ForeignFlag, foreign_flag

_STRAY = "unexpected value {!r}; a value must follow its flag"
_SHORT = 7
_CLOSE, _CLOSE_WHERE_SHORT = 0.8, 0.85
"""Share of the letters that must agree: ``hiden-size`` is 0.95 of ``hidden-size``, ``deepspeed`` 0.62 of ``seed``."""


def unknown_flags(words: Sequence[str], known: Collection[str], argv: Sequence[str]) -> Iterator[str]:
    """Yield one line for each word of a command line that the parser did not know.

    Words behind an unknown flag are its values, and a word right behind a known one is a switch's, which takes none.
    """
    before = {word: flag for flag, word in itertools.pairwise(argv) if flag in known}
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("-"):
            yield switch_with_value(before[word]) if word in before else _STRAY.format(word)
            continue
        name, has_value, value = word.partition("=")
        values = [value] if has_value else []
        while place < len(words) and not words[place].startswith("-"):
            values.append(words[place])
            place += 1
        foreign = foreign_flag(name, tuple(values)) or foreign_flag(name.replace("_", "-"), tuple(values))
        yield foreign_answer(name, values, foreign) if foreign else _unknown(name, known)


def switch_with_value(name: str) -> str:
    """Refuse a value behind a switch."""
    return f"{name} is a switch and takes no value; give {name} alone, or leave it out"


def foreign_answer(name: str, values: Sequence[str], foreign: ForeignFlag) -> str:
    """Say what stands for another trainer's flag, or its value, here, or why nothing does."""
    typed = f"{' '.join((name, *values))} (of {foreign.trainer})"
    change = foreign.change.removeprefix("nothing: ")
    if foreign.needs_decision and not foreign.becomes:
        return f"{typed} is not supported: {change}"
    if not foreign.becomes:
        return f"unknown flag {typed}; leave it out: {change}"
    instead = foreign.becomes.replace("{}", " ".join(values) or "VALUE")
    kind = "value" if " " in foreign.flag and instead.startswith(name) else "flag"
    return f"unknown {kind} {typed}; give {instead}" + (f": {change}" if foreign.needs_decision else "")


def _unknown(name: str, known: Collection[str]) -> str:
    bare = {flag.lstrip("-"): flag for flag in known}
    typed = name.lstrip("-").replace("_", "-").lower()
    cutoff = _CLOSE_WHERE_SHORT if len(typed) <= _SHORT else _CLOSE
    nearest = difflib.get_close_matches(typed, bare, n=1, cutoff=cutoff)
    return f"unknown flag {name}" + (f"; did you mean {bare[nearest[0]]}?" if nearest else "; see --help")
