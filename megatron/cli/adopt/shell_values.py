"""Values of a shell script that are unknown without running it: unknown variables and placeholders.

An unknown value is text between two marks, so that it can be joined, assigned and passed on like any other text.
A placeholder (``<name>``, ``{{ name }}``, ``...``) is text that the reader of a published script or a template engine
replaces.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node


MARK = re.compile("\ue000([ux]):([^\ue001]*)\ue001")
"""Unknown value in a text: its kind (u for a variable that is never set, x for others) and its name."""

Value = str | list[str] | dict[str, str]


def unknown_mark(name: str, kind: str = "x") -> str:
    return f"\ue000{kind}:{name}\ue001"


def plain_name(text: str) -> str:
    return re.sub(r"[^\w./*?-]+", "_", text).strip("_") or "VALUE"


def has_unknown(text: str) -> bool:
    return "\ue000" in text


def is_unset(text: str) -> bool:
    """Return whether the text consists only of variables that are never set: it is empty in an empty environment."""
    return MARK.sub(lambda match: "" if match[1] == "u" else match[0], text) == ""


def unknown_names(text: str) -> list[str]:
    """List the names of the unknown values in a text."""
    return [match[2] for match in MARK.finditer(text)]


def readable(text: str) -> str:
    """Replace the unknown values in a text by ``<NAME>``."""
    return MARK.sub(lambda match: f"<{match[2]}>", text)


@dataclasses.dataclass
class ShellState:
    """Variables, positional parameters and functions of a script.

    Copies share ``unknowns`` (name to reason), ``assigned`` (variables that the script sets anywhere) and ``asked_for``
    (variables whose value was read).
    """

    script: str
    parameters: list[str] = dataclasses.field(default_factory=list)
    variables: dict[str, Value] = dataclasses.field(default_factory=dict)
    functions: dict[str, Node] = dataclasses.field(default_factory=dict)
    assigned: set[str] = dataclasses.field(default_factory=set)
    asked_for: set[str] = dataclasses.field(default_factory=set)
    folder: str | None = None
    unknowns: dict[str, str] = dataclasses.field(default_factory=dict)

    def copy(self) -> ShellState:
        """Return a copy with independent variables, parameters and functions."""
        return dataclasses.replace(
            self,
            parameters=list(self.parameters),
            variables={
                name: value if isinstance(value, str) else value.copy() for name, value in self.variables.items()
            },
            functions=dict(self.functions),
        )

    def unknown(self, name: str, reason: str, kind: str = "x") -> str:
        """Return the marked text of an unknown value, and record the reason."""
        name = plain_name(name)
        self.unknowns.setdefault(name, reason)
        return unknown_mark(name, kind)

    def value(self, name: str) -> Value | None:
        """Return the value of a variable or a positional parameter; None if it is not set."""
        self.asked_for.add(name)
        if name == "0":
            return self.script
        if name.isdigit():
            return self.parameters[int(name) - 1] if int(name) <= len(self.parameters) else None
        if name in ("@", "*"):
            return list(self.parameters)
        if name == "#":
            return str(len(self.parameters))
        if name in ("$", "!", "?", "-", "_"):
            return self.unknown(
                {"?": "STATUS", "$": "PID", "!": "PID"}.get(name, "VALUE"), f"${name} exists only at run time"
            )
        return self.variables.get(name)

    def items(self, name: str) -> list[str] | None:
        """Return the elements of an array, or the value of a plain variable as a list; None if it is not set."""
        value = self.value(name)
        if value is None or isinstance(value, list):
            return value
        return list(value.values()) if isinstance(value, dict) else [value]

    def unset(self, name: str) -> str:
        """Return the text of a variable that is not set: empty if the script sets it anywhere, or an unknown."""
        if name in self.assigned:
            return ""
        if name.isdigit():
            return self.unknown(f"ARG{name}", f"${name} is not set: add it after --", "u")
        return self.unknown(name, f"never set in the script: pass --set {name}=VALUE", "u")


def merged(states: Sequence[ShellState], reason: str) -> ShellState:
    """Merge the states after alternative branches: values that differ become unknown."""
    result = states[0].copy()
    for name in {name: None for state in states for name in state.variables}:
        values = [state.variables.get(name) for state in states]
        first = values[0]
        if first is None or any(value != first for value in values):
            result.variables[name] = result.unknown(name, reason)
    for state in states[1:]:
        result.functions.update(state.functions)
    return result


_ANGLED = r"<(?P<angled>[A-Za-z_][\w.:/-]*(?:[ ,]+[\w.:/-]+)*)>"
_BRACED = r"\$?\{\{-?\s*(?P<braced>[^{}\n]*?)\s*-?\}\}"
_PLACEHOLDER = re.compile(f"{_ANGLED}|{_BRACED}")
_OF_WORDS = re.compile(f"(?=<[^>]* |\\$?{{{{)(?:{_ANGLED}|{_BRACED})")
_DOTS = ("...", "…", "[...]", "<...>")
"""Words that stand for omitted words."""
# Quoted text, comments and the bodies of here-documents are skipped: angle brackets in them are not redirections.
# ``<in>out`` is two redirections.
_HERE_DOCUMENT = (
    r"""(?P<start>(?<!<)<<-?[ \t]*['"\\]?(?P<end>\w+)['"]?)"""
    r"(?P<line>[^\n]*)(?P<body>\n(?:[^\n]*\n)*?\t*(?P=end)(?![^\n]))"
)
_UNQUOTED = re.compile(
    r"""\\.|'[^']*'|"(?:[^"\\]|\\.)*"|(?<!\S)\#[^\n]*|"""
    + f"{_HERE_DOCUMENT}|"
    + r"<<-?\s*\S+|"
    + f"(?<![<])(?:{_ANGLED})(?![>(\\w])|{_BRACED}",
    re.DOTALL,
)
_OF_TOKENS = re.compile("-token$|-special-tokens$|^--fim-(?:split-sample|no-prefix)$")
"""Flags whose values look like placeholders: ``--fim-prefix-token <fim_prefix>``."""

Note = Callable[[str, str], str]
"""Function that records a name and why its value is unknown, and returns the text that represents the value."""


def without_placeholders(text: str, note: Note) -> str:
    """Replace placeholders with marks if a shell would parse them as redirections or as several words."""

    def replaced(match: re.Match[str]) -> str:
        if match[0][0] in "'\"":
            return _OF_WORDS.sub(lambda inner: _marked(inner, note), match[0])
        if match["end"] is not None:
            return match["start"] + _UNQUOTED.sub(replaced, match["line"]) + match["body"]
        return _marked(match, note)

    return _UNQUOTED.sub(replaced, text)


def without_placeholder(word: str, flag: str, note: Note) -> str:
    """Replace the placeholders of a word with marks; ``flag`` is the flag before the word, if any."""
    if word in _DOTS:
        return note("MORE", f"{word} expands to words that the file does not contain")
    if _OF_TOKENS.search(flag):
        return word
    return _PLACEHOLDER.sub(lambda match: _marked(match, note), word)


def is_unresolved(word: str) -> bool:
    return bool(MARK.fullmatch(word))


def _marked(match: re.Match[str], note: Note) -> str:
    name = match["angled"] or match["braced"]
    return match[0] if name is None else note(name, f"{match[0]} must be replaced in the file")
