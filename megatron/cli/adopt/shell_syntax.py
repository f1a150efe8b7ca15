"""Syntax of shell scripts: syntax tree, words, and the ends of quotations and expansions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from megatron.core.errors import ConfigurationError

try:
    import tree_sitter
    import tree_sitter_bash
except ImportError:
    _HAS_PARSER = False
else:
    _HAS_PARSER = True

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_CLOSING = {"(": ")", "{": "}"}


def require_parser() -> None:
    """Check that the parser for shell scripts is installed.

    Raises:
        ConfigurationError: the parser is missing.
    """
    if not _HAS_PARSER:
        raise ConfigurationError(
            "reading a shell script needs tree-sitter and tree-sitter-bash: pip install tree-sitter tree-sitter-bash"
        )


@functools.cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parse_script(text: str) -> tree_sitter.Node:
    return _parser().parse(text.encode()).root_node


def source_of(node: tree_sitter.Node | None) -> str:
    """Return the text of a node without the white space that the parser sometimes includes."""
    return "" if node is None else (node.text or b"").decode().strip(" \t")


def errors_in(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    """Yield the nodes that could not be parsed."""
    for child in node.children:
        if child.type == "ERROR" or child.is_missing:
            yield child
        elif child.has_error:
            yield from errors_in(child)


def assigned_names(node: tree_sitter.Node) -> Iterator[str]:
    """Yield the variables that a script sets anywhere."""
    for child in node.named_children:
        if child.type == "variable_assignment":
            yield source_of(child.named_children[0]).partition("[")[0]
        yield from assigned_names(child)


def end_of_element(text: str, place: int, double: bool = False) -> int:
    """Return the end of the element that starts at ``place``: a character, an escape, a quotation or an expansion.

    Inside double quotes a single quote is an ordinary character. An element that is never closed ends with the text.
    """
    character = text[place]
    if character == "\\":
        return min(place + 2, len(text))
    if character == "'" and not double:
        return _after(text, place + 1, "'")
    if character == '"':
        return place + 1 if double else _closed(text, place + 1, '"', double=True)
    if character == "`":
        return _closed(text, place + 1, "`", double=True)
    if character != "$":
        return place + 1
    if text.startswith("$'", place) and not double:
        return _closed(text, place + 2, "'", double=True)
    if text[place + 1 : place + 2] in _CLOSING:
        return _closed(text, place + 2, _CLOSING[text[place + 1]], double=double and text[place + 1] == "{")
    match = _NAME.match(text, place + 1)
    return match.end() if match else place + 1


def words_of(text: str) -> list[str]:
    """Split a text into words, without removing quotes."""
    words, place, start = [], 0, 0
    text = text.replace("\\\n", " ")
    while place < len(text):
        if text[place].isspace():
            words.append(text[start:place])
            place = start = place + 1
        else:
            place = end_of_element(text, place)
    return [word for word in (*words, text[start:]) if word]


def _after(text: str, place: int, character: str) -> int:
    found = text.find(character, place)
    return len(text) if found < 0 else found + 1


def _closed(text: str, place: int, closing: str, double: bool) -> int:
    """Return the index after the closing character of an element whose content starts at ``place``."""
    while place < len(text):
        if text[place] == closing:
            return place + 1
        if closing == ")" and text[place] == "(":
            place = _closed(text, place + 1, ")", double=False)
        elif closing == ")" and text[place] == "#" and text[place - 1].isspace():
            place = _after(text, place, "\n")
        else:
            place = end_of_element(text, place, double and closing != "}")
    return len(text)
