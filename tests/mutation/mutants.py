"""Draw mutants of the source code by a seed: one small change each, spread over the packages by their size."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = "megatron/core"
TRAINING_STEP = ("megatron/training/training_step.py", "megatron/training/training.py")
"""The step itself and the loop around it, which are mutated beside the core library."""

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.BitXor: "|",
    ast.Pow: "*",
    ast.MatMult: "*",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
SYNCHRONIZATION = frozenset(("synchronize", "wait_stream", "wait_event", "record_stream", "wait", "barrier", "record"))
"""Calls whose removal the emulator of CUDA examines; a CPU shows most of them only by chance."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file: the characters from ``start`` to ``end`` become ``text``.

    ``line`` is the first line of the change, and ``function_lines`` are those of the innermost function or class.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str
    before: str
    function_lines: tuple[int, int]

    def apply(self, source: str) -> str:
        """Return the mutated source."""
        return source[: self.start] + self.text + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {' '.join(self.before.split())} → {' '.join(self.text.split())}"


class _Sites(ast.NodeVisitor):
    """Collect every possible mutant of a file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        lines = source.splitlines(keepends=True)
        self._line_starts = [0]
        for line in lines:
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._lines = lines
        self._scopes: list[tuple[int, int]] = [(1, len(lines))]
        self.found: list[Mutant] = []

    def _offset(self, line: int, byte_column: int) -> int:
        prefix = self._lines[line - 1].encode()[:byte_column].decode()
        return self._line_starts[line - 1] + len(prefix)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, line: int, kind: str, span: tuple[int, int], text: str) -> None:
        before = self.source[span[0] : span[1]]
        self.found.append(Mutant(self.path, line, kind, *span, text, before, self._scopes[-1]))

    def _add_between(self, left: ast.expr, right: ast.expr, kind: str, old: str, text: str) -> None:
        """Replace the operator between two expressions; one that a comment surrounds is left out."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self.source[start:end]
        if between.count(old) == 1 and "#" not in between:
            at = start + between.index(old)
            line = left.end_lineno or left.lineno
            self._add(line + self.source[start:at].count("\n"), kind, (at, at + len(old)), text)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Enter a function without its annotations and decorators."""
        self._scopes.append((node.lineno, node.end_lineno or node.lineno))
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
            self.visit(default)
        self._visit_body(node.body)
        self._scopes.pop()

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Enter the statements of a class without its decorators and bases."""
        self._scopes.append((node.lineno, node.end_lineno or node.lineno))
        self._visit_body(node.body)
        self._scopes.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Enter the value only."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave out what makes a message."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave out what cannot happen."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out what makes a message."""

    def visit_If(self, node: ast.If) -> None:
        """Leave out imports for type checkers."""
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop a call whose result nobody uses."""
        call = node.value
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name not in SYNCHRONIZATION:
                self._add(node.lineno, "dropped call", self._span(node), "pass")
        if not isinstance(call, ast.Constant):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Exchange the first two arguments."""
        if len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
            first, second = (self._span(each) for each in node.args[:2])
            one, other = self.source[slice(*first)], self.source[slice(*second)]
            if one != other:
                text = other + self.source[first[1] : second[0]] + one
                self._add(node.args[0].lineno, "exchanged arguments", (first[0], second[1]), text)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Exchange an operator."""
        if type(node.op) in _OPERATORS and not self._is_text(node):
            old = ast.unparse(ast.BinOp(ast.Name("a"), node.op, ast.Name("b")))[2:-2]
            self._add_between(node.left, node.right, "operator", old, _OPERATORS[type(node.op)])
        self.generic_visit(node)

    @staticmethod
    def _is_text(node: ast.BinOp) -> bool:
        sides = (node.left, node.right)
        return any(isinstance(side, ast.JoinedStr) or _is_string(side) for side in sides)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Exchange a comparison."""
        sides = [node.left, *node.comparators]
        for left, right, operator in zip(sides, sides[1:], node.ops):
            old = ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")]))[2:-2]
            self._add_between(left, right, "comparison", old, _COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange ``and`` and ``or``."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self._add_between(left, right, "boolean operator", old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop a sign or a negation."""
        if isinstance(node.op, (ast.Not, ast.USub)):
            start, end = self._span(node)
            inner = self._span(node.operand)[0]
            self._add(node.lineno, "operator", (start, end), f"({self.source[inner:end]})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a number or a truth value."""
        if isinstance(node.value, bool):
            text = str(not node.value)
        elif isinstance(node.value, int):
            text = str(node.value + 1)
        elif isinstance(node.value, float):
            text = repr(node.value * 2 if node.value else 1.0)
        else:
            return
        self._add(node.lineno, "constant", self._span(node), text)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def sites(path: str, source: str) -> list[Mutant]:
    """Return every mutant of a file; a few of them are no Python."""
    collected = _Sites(path, source)
    collected.visit(ast.parse(source))
    return collected.found


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def sources(repository: Path = REPOSITORY) -> list[str]:
    """Return the files that are mutated."""
    return [*sorted(str(path.relative_to(repository)) for path in (repository / CORE).rglob("*.py")), *TRAINING_STEP]


def _package(path: str) -> str:
    parts = Path(path).parts
    return "/".join(parts[:3]) if path.startswith(f"{CORE}/") and len(parts) > 3 else "/".join(parts[:2])


def draw(seed: int, count: int, repository: Path = REPOSITORY) -> list[Mutant]:
    """Return ``count`` mutants.

    Each package's share follows its lines. Within a package the kinds of change are equally likely, and so are the
    sites of a kind.
    """
    draws = Random(seed)
    texts = {path: (repository / path).read_text(encoding="utf-8") for path in sources(repository)}
    files: dict[str, list[str]] = defaultdict(list)
    for path in texts:
        files[_package(path)].append(path)
    lines = {package: sum(texts[path].count("\n") for path in paths) for package, paths in files.items()}
    exact = {package: count * number / sum(lines.values()) for package, number in lines.items()}
    shares = {package: int(share) for package, share in exact.items()}
    by_remainder = sorted(exact, key=lambda package: exact[package] - shares[package], reverse=True)
    for package in by_remainder[: count - sum(shares.values())]:
        shares[package] += 1
    return [
        mutant
        for package, share in shares.items()
        for mutant in _draw_from({path: texts[path] for path in files[package]}, share, draws)
    ]


def _draw_from(texts: dict[str, str], count: int, draws: Random) -> Iterator[Mutant]:
    """Yield ``count`` mutants of some files, or all that there are."""
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for path, text in texts.items():
        for mutant in sites(path, text):
            by_kind[mutant.kind].append(mutant)
    for kind in by_kind:
        draws.shuffle(by_kind[kind])
    while count and by_kind:
        kind = draws.choice(sorted(by_kind))
        mutant = by_kind[kind].pop()
        if not by_kind[kind]:
            del by_kind[kind]
        if _parses(mutant.apply(texts[mutant.path])):
            yield mutant
            count -= 1
