"""Text that a reader of a script is to replace: ``<name>``, ``{{ name }}``, ``...``.

A published script has it where a value of the reader's goes; a template engine fills it in. What it will be is as
unknown as a variable that nothing sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron.adoption.shell.state import MARK

_ANGLED = r"<(?P<angled>[A-Za-z_][\w.:/-]*(?:[ ,]+[\w.:/-]+)*)>"
_BRACED = r"\$?\{\{-?\s*(?P<braced>[^{}\n]*?)\s*-?\}\}"
_PLACEHOLDER = re.compile(f"{_ANGLED}|{_BRACED}")
_OF_WORDS = re.compile(f"(?=<[^>]* |\\$?{{{{)(?:{_ANGLED}|{_BRACED})")
_DOTS = ("...", "…", "[...]", "<...>")
"""A word that stands for more words."""
# Quoted text, comments and here-documents with their bodies are passed over: there, angles are no redirections.
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
"""Note a name and why its value is unknown; return the text that stands for the value."""


def without_placeholders(text: str, note: Note) -> str:
    """Replace the placeholders that a shell would read as redirections or as several words with marks."""

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
        return note("MORE", f"{word} stands for words that the file does not say")
    if _OF_TOKENS.search(flag):
        return word
    return _PLACEHOLDER.sub(lambda match: _marked(match, note), word)


def is_unresolved(word: str) -> bool:
    """Tell whether nothing of a word is known."""
    return bool(MARK.fullmatch(word))


def _marked(match: re.Match[str], note: Note) -> str:
    name = match["angled"] or match["braced"]
    return match[0] if name is None else note(name, f"{match[0]} is to be replaced in the file")
