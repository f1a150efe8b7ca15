"""Unknown flags: flags of other trainers with their equivalent here, typing errors and stray values.

`foreign_flags.tsv` has one line for each flag, or for one value of it, or for all flags with a prefix (``--moe-*``).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

_TABLE = Path(__file__).with_name("foreign_flags.tsv")


@dataclasses.dataclass(frozen=True)
class ForeignFlag:
    """Describe a flag of another trainer.

    ``becomes`` are the flags that stand for it, ``{}`` its values, nothing where it is left out. Of several, the
    first is meant and the others are what it needs unless the command has them. ``needs_decision`` tells that
    what is computed changes in a way that its user must agree to.
    """

    flag: str
    arity: int | str
    becomes: str
    trainer: str
    needs_decision: bool
    change: str


@functools.cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    """Return the table by flag, or by flag and value."""
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        flag: ForeignFlag(flag, int(values) if values.isdigit() else values, becomes, trainer, decide == "yes", change)
        for flag, values, becomes, trainer, decide, change in rows
    }


def foreign_flag(name: str, values: tuple[str, ...] = ()) -> ForeignFlag | None:
    """Return what is known of a flag with these values; the line of the value goes before the flag's."""
    table = foreign_flags()
    for key in (" ".join((name, *values)), name):
        if key in table:
            return table[key]
    beginnings = (key for key in table if key.endswith("*") and name.startswith(key[:-1]))
    return next((table[key] for key in beginnings), None)


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
