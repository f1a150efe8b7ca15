"""What a shell's assignments and declarations do to its variables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megatron.adoption.shell.arithmetic import UnknownNumber
from megatron.adoption.shell.state import ShellState, Value
from megatron.adoption.shell.syntax import source_of
from megatron.adoption.shell.words import OUTPUT, Expander

if TYPE_CHECKING:
    from tree_sitter import Node

_WHOLE_OUTPUT = re.compile(f"\ue000x:({OUTPUT}[^\ue001]*)\ue001")


class Assignments:
    """Carry out assignments; variables in ``fixed`` keep what the user gave them."""

    def __init__(self, state: ShellState, expander: Expander, fixed: frozenset[str]) -> None:
        self._variables = state.variables
        self._state = state
        self._expander = expander
        self._fixed = fixed

    def assign(self, node: Node) -> bool:
        """Carry out a ``variable_assignment`` of the syntax tree; the status is always true."""
        target, value = node.named_children[0], node.child_by_field_name("value")
        is_more = any(child.type == "+=" for child in node.children)
        name = source_of(target)
        if name in self._fixed:
            return True
        if target.type == "subscript":
            self._assign_element(target, self._expander.text(source_of(value)))
        elif value is not None and value.type == "array":
            self._variables[name] = self._array(name, value, is_more)
        else:
            text = self._named(name, self._expander.text(source_of(value)))
            old = self._variables.get(name) if is_more else None
            if isinstance(old, list):
                self._variables[name] = [(old[0] if old else "") + text, *old[1:]]
            else:
                self._variables[name] = (old if isinstance(old, str) else "") + text
        return True

    def declare(self, node: Node) -> bool:
        """Carry out ``declare``, ``export``, ``local`` and their kin; the status is always true."""
        is_map = any(re.fullmatch(r"-\w*A\w*", source_of(child)) for child in node.children)
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.assign(child)
            elif is_map and child.type == "variable_name":
                self._variables[source_of(child)] = {}
        return True

    def _named(self, name: str, text: str) -> str:
        """Give an output that cannot be known the name of the variable that takes all of it."""
        match = _WHOLE_OUTPUT.fullmatch(text)
        return self._state.unknown(name, self._state.unknowns[match[1]]) if match else text

    def _array(self, name: str, value: Node, is_more: bool) -> Value:
        elements = [source_of(child) for child in value.named_children if child.type != "comment"]
        keyed = [re.fullmatch(r"\[([^]]*)\]=(.*)", element, re.S) for element in elements]
        if elements and all(keyed):
            pairs = {self._expander.text(match[1]): self._expander.text(match[2]) for match in keyed if match}
            old = self._variables.get(name)
            return {**old, **pairs} if is_more and isinstance(old, dict) else pairs
        items = [field for element in elements for field in self._expander.fields(element)]
        return [*(self._state.items(name) or []), *items] if is_more else items

    def _assign_element(self, target: Node, text: str) -> None:
        name, _, index = source_of(target).removesuffix("]").partition("[")
        value = self._variables.get(name, [])
        if not isinstance(value, dict):
            items = [value] if isinstance(value, str) else list(value)
            try:
                place = self._expander.number(index)
            except UnknownNumber:
                value = {}
            else:
                items += [""] * (place + 1 - len(items))
                items[place] = text
                self._variables[name] = items
                return
        self._variables[name] = {**value, self._expander.text(index): text}
