"""Interpret a shell script without running it, and collect the programs that it would start.

If a condition is unknown, every branch is followed, and values that differ between branches are unknown afterwards.
Only commands that change variables or only print text are interpreted.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli.adopt.shell_expansion import OUTPUT, Expander, UnknownNumber, matches
from megatron.cli.adopt.shell_syntax import assigned_names, errors_in, parse_script, source_of, words_of
from megatron.cli.adopt.shell_values import (
    ShellState,
    Value,
    has_unknown,
    is_unset,
    merged,
    readable,
    without_placeholders,
)
from megatron.core.errors import ConfigurationError

if TYPE_CHECKING:
    from tree_sitter import Node


class NotText(Exception):
    """Command substitution whose output is known only at run time."""


def output_of(words: list[str], state: ShellState) -> str:
    """Return the output of a command; ``cd`` changes the state's folder.

    Raises:
        NotText: the output is known only at run time.
    """
    name, rest = words[0], words[1:]
    if name == "echo":
        return " ".join(rest[1:] if rest[:1] == ["-n"] else rest) + "\n"
    if name in (":", "true"):
        return ""
    if name == "pwd" and state.folder is not None and not has_unknown(state.folder):
        return state.folder + "\n"
    if not rest or has_unknown(rest[0]):
        raise NotText
    path = rest[0].rstrip("/") or "/"
    if name == "cd":
        state.folder = os.path.normpath(os.path.join(state.folder or os.getcwd(), rest[0]))
        return ""
    if name == "dirname":
        return (os.path.dirname(path) or ".") + "\n"
    if name == "basename":
        base, suffix = os.path.basename(path), "".join(rest[1:2])
        return (base.removesuffix(suffix) if base != suffix else base) + "\n"
    raise NotText


_NUMBERS = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}


class Conditions:
    """Evaluator of conditions in an expander's current state; conditions on files are unknown."""

    def __init__(self, expander: Expander) -> None:
        self._expander = expander

    def of_node(self, node: Node) -> bool | None:
        """Evaluate a ``test_command`` of the syntax tree."""
        children = node.named_children
        if not children:
            return False
        if node.children[0].type == "[[":
            return self._of(children[0])
        # Single brackets are evaluated from the words, not the tree: -a binds weaker than =, and empty words vanish.
        words = []
        for word in words_of(source_of(node).removeprefix("[").removesuffix("]")):
            fields = self._expander.fields(word)
            words += [field for field in fields if '"' in word or not is_unset(field)]
        return self.of_words(words)

    def of_words(self, words: list[str]) -> bool | None:
        """Evaluate the expanded words of a plain ``test`` command."""
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
        """Evaluate an expression in double brackets."""
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
        # The right operand may consist of several nodes.
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
    """Return whether a text is not empty, or None if that is unknown; a variable that is never set is empty."""
    if is_unset(text):
        return False
    return None if has_unknown(text) and not re.sub("\ue000[^\ue001]*\ue001", "", text) else True


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(left: bool | None, right: bool | None) -> bool | None:
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


_WHOLE_OUTPUT = re.compile(f"\ue000x:({OUTPUT}[^\ue001]*)\ue001")


class Assignments:
    """Interpreter of assignments; variables in ``fixed`` keep the values that the user gave."""

    def __init__(self, state: ShellState, expander: Expander, fixed: frozenset[str]) -> None:
        self._variables = state.variables
        self._state = state
        self._expander = expander
        self._fixed = fixed

    def assign(self, node: Node) -> bool:
        """Execute a ``variable_assignment`` of the syntax tree; the status is always true."""
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
        """Execute ``declare``, ``export``, ``local`` and similar commands; the status is always true."""
        is_map = any(re.fullmatch(r"-\w*A\w*", source_of(child)) for child in node.children)
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.assign(child)
            elif is_map and child.type == "variable_name":
                self._variables[source_of(child)] = {}
        return True

    def _named(self, name: str, text: str) -> str:
        """Rename an unknown command output after the variable that it is assigned to."""
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


_MOST_STATEMENTS = 50_000
_CLAUSES = ("elif_clause", "else_clause")


class Ended(Exception):
    """End of the script, of a function, of a loop or of a loop iteration."""

    def __init__(self, what: str) -> None:
        self.what = what


class ShellFlow(abc.ABC):
    """Interpreter of the control flow of statements; a subclass interprets commands.

    During a command substitution, ``_output`` is a list that collects the printed text. ``_input`` is the here-document
    that a command reads.
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
        """Apply a command to the state and return its status, or None if the status is known only at run time."""

    def _run_text(self, text: str) -> bool | None:
        root = parse_script(text)
        self.state.assigned.update(assigned_names(root))
        if root.has_error:
            line = next((node.start_point[0] + 1 for node in errors_in(root)), 1) + self._line_offset
            self.notes.append(f"line {line} cannot be parsed as shell; the rest of the line may be missing")
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
        """Follow every branch from the current state, and continue with the merged state."""
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
        return (
            f"depends on {text[:60]}{'…' if len(text) > 60 else ''} (line {self._line(node)}), whose value is not known"
        )

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
        """Interpret a loop's body once; return whether the loop continues, False after a possible ``break``."""
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
        """Return the text of a command's here-document; None if it has none."""
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
        # The parser merges `A=1 B=2` and the next line into one command.
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
        """Return the output of a command that only prints text, or an unknown."""
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


# These commands are assumed to succeed, so that `mkdir -p out && torchrun …` is followed.
_WORKS = frozenset(
    (":", "chmod", "conda", "cp", "echo", "ln", "mkdir", "module", "mv", "pip", "pip3", "printf", "rm", "set", "shopt")
).union(("sleep", "touch", "trap", "ulimit", "wait"))
_SHELLS = frozenset(("bash", "sh", "zsh", "dash"))


@dataclasses.dataclass(frozen=True)
class StartedProgram:
    """Words of a command that a script would run, and its line number."""

    words: tuple[str, ...]
    line: int


class ShellScript(ShellFlow):
    """Interpreter of one script, which collects started ``programs`` and ``notes``."""

    def __init__(self, path: Path, parameters: Sequence[str], variables: dict[str, str]) -> None:
        super().__init__(ShellState(script=str(path), parameters=list(parameters), variables=dict(variables)))
        self.state.variables["BASH_SOURCE"] = str(path)
        self.programs: list[StartedProgram] = []

    def follow(self, text: str) -> None:
        """Interpret a whole script.

        Raises:
            ConfigurationError: the script does not end.
        """
        try:
            self._run_text(without_placeholders(text, self.state.unknown))
        except Ended:
            return
        except RecursionError:
            raise ConfigurationError(f"{self.state.script} does not end: it calls itself endlessly") from None

    def _words(self, words: list[str], line: int) -> bool | None:
        """Apply a command to the state, or record the program that it starts."""
        if not words:
            return True
        name, rest = words[0], words[1:]
        if name in self.state.functions:
            return self._call(name, rest)
        if name in ("exit", "return", "break", "continue"):
            raise Ended(name)
        if name in ("test", "["):
            return self._conditions().of_words(rest[:-1] if name == "[" else rest)
        if self._output is not None:
            is_here = self._input is not None and words == ["cat"]
            self._output.append((self._input or "") if is_here else output_of(words, self.state))
            return True
        if name == "shift":
            del self.state.parameters[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        elif name == "set" and "--" in rest:
            self.state.parameters = rest[rest.index("--") + 1 :]
        elif name == "eval":
            return self._reread(" ".join(rest), line)
        elif name in (".", "source") and rest:
            return self._source_file(rest[0], rest[1:], line)
        elif name == "cd":
            self.state.folder = os.path.join(self.state.folder or os.getcwd(), rest[0]) if rest else None
        elif name == "let":
            return self._let(rest)
        elif name == "read" and self._input is not None and "-d" in rest and not rest[-1].startswith("-"):
            self.state.variables[rest[-1]] = self._input.strip()
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for target in rest:
                if re.fullmatch(r"[A-Za-z_]\w*", target):
                    self.state.variables[target] = self.state.unknown(target, f"is read at run time (line {line})")
            return None
        elif name in ("true", "false"):
            return name == "true"
        elif name not in _WORKS:
            return self._start(words, line)
        return True

    def _start(self, words: list[str], line: int) -> bool | None:
        """Interpret the script of a shell that a command starts, or record the command as a program."""
        if words[0] == "sbatch":
            text = next((word.removeprefix("--wrap=") for word in words if word.startswith("--wrap=")), None)
            text = words[words.index("--wrap") + 1] if "--wrap" in words[:-1] else text
            if text is not None or self._input is not None:
                return self._inside(text or self._input or "", [], line)
        for place, word in enumerate(words):
            if os.path.basename(word) not in _SHELLS:
                continue
            rest = words[place + 1 :]
            flags = [item for item in rest if item.startswith("-")]
            if any(re.fullmatch(r"-\w*c", flag) for flag in flags):
                text = next((item for item in rest if not item.startswith("-")), "")
                return self._inside(text, words[:place], line)
            script = next((item for item in rest if not item.startswith("-")), None)
            if self._input is not None and (script is None or "-s" in flags):
                return self._inside(self._input, words[:place], line)
            if script is not None and Path(script).is_file():
                before = self.state
                self.state = before.copy()
                try:
                    return self._source_file(script, rest[rest.index(script) + 1 :], line)
                finally:
                    self.state = before
        self.programs.append(StartedProgram(tuple(words), line))
        return None

    def _inside(self, text: str, wrapper: list[str], line: int) -> bool | None:
        """Interpret the text of ``srun … bash -c TEXT``; an ``srun`` wrapper is prepended to the programs it starts."""
        before, self._input = len(self.programs), None
        status = self._reread(text, line)
        if wrapper and os.path.basename(wrapper[0]) == "srun":
            self.programs[before:] = [
                dataclasses.replace(program, words=(*wrapper, *program.words)) for program in self.programs[before:]
            ]
        return status

    def _reread(self, text: str, line: int) -> bool | None:
        before, self._line_offset = self._line_offset, line - 1
        try:
            return self._run_text(without_placeholders(text, self.state.unknown))
        finally:
            self._line_offset = before

    def _call(self, name: str, parameters: list[str]) -> bool | None:
        before = self.state.parameters
        self.state.parameters = parameters
        self._statements += 1
        try:
            return self._statement(self.state.functions[name])
        except Ended as end:
            if end.what != "return":
                raise
            return None
        finally:
            self.state.parameters = before

    def _source_file(self, name: str, parameters: list[str], line: int) -> bool | None:
        folder = self.state.folder or os.getcwd()
        places = [Path(folder, name), Path(self.state.script).parent / name]
        path = next((place for place in places if not has_unknown(name) and place.is_file()), None)
        if path is None:
            self.notes.append(
                f"line {line} reads {readable(name)}, which is missing here: the variables that it sets are not known"
            )
            return None
        before = self.state.parameters
        script, offset = self.state.variables["BASH_SOURCE"], self._line_offset
        self.state.parameters = parameters or before
        self.state.variables["BASH_SOURCE"] = str(path)
        self._line_offset = 0
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            return self._run_text(without_placeholders(text, self.state.unknown))
        finally:
            self.state.variables["BASH_SOURCE"], self._line_offset = script, offset
            self.state.parameters = before

    def _let(self, expressions: list[str]) -> bool | None:
        try:
            return [self._expander().number(expression) for expression in expressions][-1:] != [0]
        except UnknownNumber:
            return None
