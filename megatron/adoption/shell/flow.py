"""Follow the statements of a shell script without running it: conditions, loops, functions, substitutions.

Where a condition cannot be known, every way is followed, and what differs between them is unknown afterwards.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from megatron.adoption.shell.arithmetic import UnknownNumber
from megatron.adoption.shell.assignments import Assignments
from megatron.adoption.shell.conditions import Conditions
from megatron.adoption.shell.output import NotText
from megatron.adoption.shell.state import ShellState, has_unknown, merged
from megatron.adoption.shell.syntax import assigned_names, errors_in, parse_script, source_of
from megatron.adoption.shell.words import OUTPUT, Expander, matches
from megatron.core.errors import ConfigurationError

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST_STATEMENTS = 50_000
_CLAUSES = ("elif_clause", "else_clause")


class Ended(Exception):
    """Report that the script ends, or that a function, a loop or a turn of one does."""

    def __init__(self, what: str) -> None:
        self.what = what


class ShellFlow(abc.ABC):
    """Follow statements; what a command does, a subclass says.

    ``output`` is a list while the text that commands print is wanted, in a command substitution; ``input`` is the here
    document that a command reads.
    """

    def __init__(self, state: ShellState) -> None:
        self.state = state
        self.notes: list[str] = []
        self._fixed = frozenset(state.variables)
        self._output: list[str] | None = None
        self._input: str | None = None
        self._statements = 0
        self._line_offset = 0
        self._may_have_left = False

    @abc.abstractmethod
    def _words(self, words: list[str], line: int) -> bool | None:
        """Do what a command does to the state; return its status, or None where only a run can tell."""

    def _run_text(self, text: str) -> bool | None:
        root = parse_script(text)
        self.state.assigned.update(assigned_names(root))
        if root.has_error:
            line = next((node.start_point[0] + 1 for node in errors_in(root)), 1) + self._line_offset
            self.notes.append(f"line {line} cannot be read as shell; what follows there may be missing")
        return self._run(root.named_children)

    def _run(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if node.type != "comment":
                status = self._statement(node)
        return status

    def _statement(self, node: Node) -> bool | None:
        self._statements += 1
        if self._statements > _MOST_STATEMENTS:
            raise ConfigurationError(
                f"the script does not end within {_MOST_STATEMENTS} statements (line {self._line(node)})"
            )
        handler: Callable[[Node], bool | None] | None = {
            "variable_assignment": lambda node: self._assignments().assign(node),
            "variable_assignments": lambda node: self._run(node.named_children),
            "command": self._command,
            "declaration_command": lambda node: self._assignments().declare(node),
            "unset_command": self._unset,
            "redirected_statement": self._redirected,
            "list": self._and_or,
            "pipeline": self._pipeline,
            "negated_command": lambda node: _negated(self._statement(node.named_children[-1])),
            "test_command": lambda node: self._conditions().of_node(node),
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "c_style_for_statement": self._c_style_for,
            "while_statement": self._while,
            "compound_statement": self._compound,
            "do_group": lambda node: self._run(node.named_children),
            "subshell": self._subshell,
            "function_definition": self._function,
        }.get(node.type)
        return handler(node) if handler else None

    def _line(self, node: Node) -> int:
        return int(node.start_point[0]) + 1 + self._line_offset

    def _expander(self) -> Expander:
        return Expander(self.state, self._substitute)

    def _conditions(self) -> Conditions:
        return Conditions(self._expander())

    def _assignments(self) -> Assignments:
        return Assignments(self.state, self._expander(), self._fixed)

    def _unset(self, node: Node) -> bool | None:
        for child in node.named_children:
            self.state.variables.pop(source_of(child), None)
        return True

    def _fork(self, ways: Sequence[Callable[[], object]], reason: str) -> None:
        """Follow every way from the present state, and go on with what they have in common."""
        before, ends = self.state, []
        for way in ways:
            self.state = before.copy()
            try:
                way()
            except Ended as end:
                if end.what in ("exit", "return"):
                    continue
                self._may_have_left |= end.what == "break"
            ends.append(self.state)
        if not ends:
            raise Ended("exit")
        self.state = merged(ends, reason)

    def _reason(self, node: Node) -> str:
        text = " ".join(source_of(node).split())
        return f"follows from {text[:60]}{'…' if len(text) > 60 else ''} (line {self._line(node)}), which is not known"

    def _if(self, node: Node) -> bool | None:
        clauses = [child for child in node.named_children if child.type in _CLAUSES]
        return self._if_clause(node, clauses)

    def _if_clause(self, node: Node, others: list[Node]) -> bool | None:
        tokens = [child.type for child in node.children]
        if "then" not in tokens:  # else
            return self._run(node.named_children)
        then = tokens.index("then")
        condition = [child for child in node.children[:then] if child.is_named]
        body = [child for child in node.children[then:] if child.is_named and child.type not in _CLAUSES]

        def otherwise() -> bool | None:
            return self._if_clause(others[0], others[1:]) if others else True

        status = self._run(condition)
        if status is None:
            self._fork([lambda: self._run(body), otherwise], self._reason(condition[0]))
            return None
        return self._run(body) if status else otherwise()

    def _case(self, node: Node) -> bool | None:
        subject = node.child_by_field_name("value")
        assert subject is not None
        value = self._expander().text(source_of(subject))
        items = [child for child in node.named_children if child.type == "case_item"]
        if has_unknown(value):
            self._fork([*(self._body_of(item) for item in items), lambda: None], self._reason(subject))
            return None
        for item in items:
            for pattern in item.children_by_field_name("value"):
                if matches(self._expander().pattern(source_of(pattern)), value):
                    return self._body_of(item)()
        return True

    def _body_of(self, item: Node) -> Callable[[], bool | None]:
        closing = [child.type for child in item.children].index(")")
        return lambda: self._run(child for child in item.children[closing:] if child.is_named)

    def _for(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        name = source_of(node.child_by_field_name("variable"))
        values = node.children_by_field_name("value")
        has_list = any(child.type == "in" for child in node.children)
        words = [word for value in values for word in self._expander().fields(source_of(value))]
        for word in words if has_list else list(self.state.parameters):
            self.state.variables[name] = word
            if not self._turn(body):
                break
        return True

    def _turn(self, body: Node | None) -> bool:
        """Follow a loop's body once; tell whether the loop goes on, which it does not where it may have been left."""
        outer, self._may_have_left = self._may_have_left, False
        try:
            self._run(body.named_children if body else ())
            return not self._may_have_left
        except Ended as end:
            if end.what not in ("break", "continue"):
                raise
            return end.what == "continue" and not self._may_have_left
        finally:
            self._may_have_left = outer

    def _c_style_for(self, node: Node) -> bool | None:
        header = re.match(r"for\s*\(\((.*?);(.*?);(.*?)\)\)", source_of(node), re.S)
        body = node.child_by_field_name("body")
        try:
            parts = header.groups() if header else ("", "", "")
            self._expander().number(parts[0])
            while self._expander().number(parts[1] or "1") and self._turn(body):
                self._expander().number(parts[2])
                self._statements += 1
                if self._statements > _MOST_STATEMENTS:
                    break
        except UnknownNumber:
            self._fork([lambda: self._turn(body), lambda: None], self._reason(node))
        return True

    def _while(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        condition = [child for child in node.named_children if child != body]
        goes_on = node.children[0].type == "while"
        while True:
            status = self._run(condition)
            if status is None:
                self._fork([lambda: self._turn(body), lambda: None], self._reason(condition[0]))
                return None
            if status != goes_on or not self._turn(body):
                return True

    def _and_or(self, node: Node) -> bool | None:
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        status = self._statement(left)
        if status is None:
            self._fork([lambda: self._statement(right), lambda: None], self._reason(left))
            return None
        return self._statement(right) if status == (operator == "&&") else status

    def _compound(self, node: Node) -> bool | None:
        if node.children[0].type == "((":
            try:
                return self._expander().number(source_of(node)[2:-2]) != 0
            except UnknownNumber:
                return None
        return self._run(node.named_children)

    def _subshell(self, node: Node) -> bool | None:
        before = self.state
        self.state = before.copy()
        try:
            return self._run(node.named_children)
        except Ended as end:
            if end.what not in ("exit", "return"):
                raise
            return None
        finally:
            self.state = before

    def _pipeline(self, node: Node) -> bool | None:
        if self._output is not None:
            raise NotText
        before = self.state
        for child in node.named_children:
            self.state = before.copy()
            try:
                self._statement(child)
            except Ended:
                continue
            finally:
                self.state = before
        return None

    def _redirected(self, node: Node) -> bool | None:
        if self._output is not None and any(b">" in (child.text or b"")[:2] for child in node.named_children[1:]):
            raise NotText
        body = node.child_by_field_name("body")
        before, self._input = self._input, self._here_document(node)
        try:
            return self._statement(body) if body else None
        finally:
            self._input = before

    def _here_document(self, node: Node) -> str | None:
        """Return what ``<<EOF`` gives a command to read; None where it has no such input."""
        here = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
        if here is None:
            return None
        parts = {child.type: child for child in here.named_children}
        body = parts.get("heredoc_body")
        text = "" if body is None else (body.text or b"").decode()
        if (here.text or b"").startswith(b"<<-"):
            text = re.sub(r"(?m)^\t+", "", text)
        if any(mark in source_of(parts.get("heredoc_start")) for mark in ("'", '"', "\\")):
            return text
        return self._expander().here_document(text)

    def _function(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.state.functions[source_of(node.child_by_field_name("name"))] = body
        return True

    def _command(self, node: Node) -> bool | None:
        children = node.children
        # The parser takes `A=1 B=2` and the line below it for one command.
        source, start = source_of(node).encode(), node.start_byte
        assignments = [child for child in children if child.type == "variable_assignment"]
        name = node.child_by_field_name("name")
        following = [*assignments[1:], *([name] if name else [])]
        gaps = [source[a.end_byte - start : b.start_byte - start] for a, b in zip(assignments, following)]
        if any(b"\n" in gap.replace(b"\\\n", b"") for gap in gaps):
            last = max(number for number, gap in enumerate(gaps) if b"\n" in gap.replace(b"\\\n", b""))
            self._run(assignments[: last + 1])
        expander = self._expander()
        texts = [
            source_of(child)
            for child in children
            if child.is_named
            and child.type not in ("variable_assignment", "comment", "file_redirect", "herestring_redirect")
        ]
        words = [field for text in texts for field in expander.fields(text)]
        return self._words(words, self._line(node))

    def _substitute(self, text: str) -> str:
        """Return the output of a command that only makes text, or an unknown."""
        before, outer = self.state, self._output
        self.state, self._output = before.copy(), []
        try:
            self._run(parse_script(text).named_children)
            return "".join(self._output).rstrip("\n")
        except (NotText, Ended):
            name = (text.split() or ["command"])[0]
            return before.unknown(f"{OUTPUT}{name}", f"is the output of $({' '.join(text.split())})")
        finally:
            self.state, self._output = before, outer


def _negated(status: bool | None) -> bool | None:
    return None if status is None else not status
