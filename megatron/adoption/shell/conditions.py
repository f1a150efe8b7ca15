"""The conditions of a shell, ``[ … ]`` and ``[[ … ]]``: true, false, or not known without a run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megatron.adoption.shell.arithmetic import UnknownNumber
from megatron.adoption.shell.state import has_unknown, is_unset
from megatron.adoption.shell.syntax import source_of, words_of
from megatron.adoption.shell.words import Expander, matches

if TYPE_CHECKING:
    from tree_sitter import Node

_NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


class Conditions:
    """Evaluate conditions as an expander's state stands; files are never looked at."""

    def __init__(self, expander: Expander) -> None:
        self._expander = expander

    def of_node(self, node: Node) -> bool | None:
        """Evaluate a ``test_command`` of the syntax tree."""
        children = node.named_children
        if not children:
            return False
        if node.children[0].type == "[[":
            return self._of(children[0])
        # In single brackets the words decide, not the tree: -a binds less than =, and what is empty is no word.
        words = []
        for word in words_of(source_of(node).removeprefix("[").removesuffix("]")):
            fields = self._expander.fields(word)
            words += [field for field in fields if '"' in word or not is_unset(field)]
        return self.of_words(words)

    def of_words(self, words: list[str]) -> bool | None:
        """Evaluate the words of a plain ``test`` command, expanded already."""
        for operator in ("-o", "-a"):
            if operator in words[1:-1]:
                place = words.index(operator, 1)
                left, right = self.of_words(words[:place]), self.of_words(words[place + 1 :])
                return _both(left, right) if operator == "-a" else _not(_both(_not(left), _not(right)))
        if words[:1] == ["!"] and len(words) > 1:
            return _not(self.of_words(words[1:]))
        if len(words) == 3:
            return self._compared(words[0], words[1], words[2], is_pattern=False)
        if len(words) == 2:
            return self._unary(words[0], words[1])
        return _is_filled(words[0]) if len(words) == 1 else False if not words else None

    def _of(self, node: Node) -> bool | None:
        """Evaluate what stands in double brackets."""
        children = node.children
        if node.type == "parenthesized_expression":
            return self._of(children[1])
        if node.type == "unary_expression":
            operator, operand = source_of(children[0]), children[-1]
            if operator == "!":
                return _not(self._of(operand))
            return self._unary(operator, self._expander.text(source_of(operand)))
        if node.type != "binary_expression" or len(children) < 3:
            return _is_filled(self._expander.text(source_of(node)))
        left, operator, right = children[0], source_of(children[1]), children[2]
        if operator == "&&":
            return _both(self._of(left), self._of(right))
        if operator == "||":
            return _not(_both(_not(self._of(left)), _not(self._of(right))))
        # What is compared with may come in several nodes.
        rest = (node.text or b"")[right.start_byte - node.start_byte :].decode().strip()
        is_pattern = operator in ("=", "==", "!=")
        second = self._expander.pattern(rest) if is_pattern else self._expander.text(rest)
        return self._compared(self._expander.text(source_of(left)), operator, second, is_pattern)

    def _unary(self, operator: str, operand: str) -> bool | None:
        filled = _is_filled(operand)
        if operator == "-n":
            return filled
        return _not(filled) if operator == "-z" else None

    def _compared(self, left: str, operator: str, right: str, is_pattern: bool) -> bool | None:
        if right == "" and operator in ("=", "==", "!=") and _is_filled(left) is False:
            return operator != "!="
        if has_unknown(left) or has_unknown(right):
            return None
        if operator in ("=", "==", "!="):
            equal = matches(right, left) if is_pattern else left == right
            return equal == (operator != "!=")
        if operator in _NUMBERS:
            try:
                return bool(_NUMBERS[operator](self._expander.number(left), self._expander.number(right)))
            except UnknownNumber:
                return False
        if operator == "=~":
            return _searched(right, left)
        return (left < right if operator in ("<", "\\<") else left > right) if operator.strip("\\") in "<>" else None


def _searched(expression: str, text: str) -> bool | None:
    try:
        return re.search(expression, text) is not None
    except re.error:
        return None


def _is_filled(text: str) -> bool | None:
    """Tell whether a text is not empty; a variable that nothing sets is."""
    if is_unset(text):
        return False
    return None if has_unknown(text) and not re.sub("\ue000[^\ue001]*\ue001", "", text) else True


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True
