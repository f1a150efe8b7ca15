"""A shell's patterns: what ``case``, ``[[ == ]]`` and ``${X%…}`` match."""

from __future__ import annotations

import re
from collections.abc import Callable


def glob_expression(pattern: str, greedy: bool = True) -> str:
    """Return a glob pattern, ``\\`` escaping, as a regular expression."""
    result, place = "", 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\" and place + 1 < len(pattern):
            place += 1
            result += re.escape(pattern[place])
        elif character == "*":
            result += ".*" if greedy else ".*?"
        elif character == "?":
            result += "."
        elif character == "[" and (match := re.compile(r"\[([!^]?)(\]?[^]]*)\]").match(pattern, place)):
            negated = "^" if match[1] else ""
            result += f"[{negated}{match[2]}]"
            place = match.end() - 1
        else:
            result += re.escape(character)
        place += 1
    return result


def without_end(text: str, pattern: str, at_start: bool, greedy: bool) -> str:
    """Cut the shortest, or with ``greedy`` the longest, match of a pattern off one end."""
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if greedy else lengths:
        part = text[:length] if at_start else text[len(text) - length :]
        if re.fullmatch(glob_expression(pattern), part, re.S):
            return text[length:] if at_start else text[: len(text) - length]
    return text


def replaced(text: str, rest: str, pattern_of: Callable[[str], str], text_of: Callable[[str], str]) -> str:
    """Replace as ``${X/pattern/text}`` does; ``rest`` is what follows the first slash."""
    kind = rest[:1] if rest[:1] in ("/", "#", "%") else ""
    pattern, _, new = rest[len(kind) :].partition("/")
    expression = glob_expression(pattern_of(pattern))
    if not expression:
        return text
    expression = {"#": rf"\A(?:{expression})", "%": rf"(?:{expression})\Z"}.get(kind, expression)
    replacement = text_of(new)
    return re.sub(expression, lambda match: replacement, text, count=0 if kind == "/" else 1, flags=re.S)
