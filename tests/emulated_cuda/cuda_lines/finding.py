"""Find by the syntax tree the statements that only a process with a CUDA device executes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.emulated_cuda.scenarios.changed_source import (
    REPOSITORY,
    is_triton_program,
    probed_blocks,
    project_files,
    statements_of,
)

SIMULATION = "megatron/planner/simulation/"
"""Code that pretends a CUDA device on any machine."""
LAUNCHERS = "megatron/core/ops/triton/"
"""Functions that launch Triton programs, which compile for a GPU."""
_NAMES = frozenset(("is_cuda", "on_cuda", "is_on_device"))
_CUDA = frozenset(("cuda", "nccl"))
_ASKED_ANYWHERE = frozenset(("is_available", "device_count"))
"""Functions of torch.cuda that a process without a device calls too."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Found:
    """A statement, with its number among all probes, the function or class around it, and what it mentions."""

    number: int
    path: str
    node: ast.stmt
    scope: str
    names: frozenset[str]
    is_cuda_only: bool = False


def truth_on_cuda(test: ast.expr, names: frozenset[str] = _NAMES) -> bool | None:
    """Return True for a condition that only CUDA devices can fulfil, False for one that only they can fail; or None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth_on_cuda(test.operand, names)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [truth_on_cuda(each, names) for each in test.values]
        if isinstance(test.op, ast.And):
            return True if True in parts else False if all(each is False for each in parts) else None
        return False if False in parts else True if all(each is True for each in parts) else None
    if isinstance(test, ast.Call):
        called = ast.unparse(test.func)
        if called == "torch.cuda.is_available":
            return True
        if called in ("all", "any") and test.args and isinstance(test.args[0], ast.GeneratorExp):
            return truth_on_cuda(test.args[0].elt, names)
    if isinstance(test, ast.Name) and test.id in names:
        return True
    if isinstance(test, ast.Attribute) and test.attr == "is_cuda":
        return True
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        value = test.comparators[0]
        text = value.value if isinstance(value, ast.Constant) else "cuda" if ast.unparse(value) == "_DEVICE" else None
        is_equal = isinstance(test.ops[0], ast.Eq)
        if text in _CUDA and isinstance(test.ops[0], ast.Eq | ast.NotEq):
            return is_equal
        if text == "cpu" and isinstance(test.ops[0], ast.Eq | ast.NotEq):
            return not is_equal
    return None


def _ends(block: list[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _head(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes that are evaluated with a statement itself, without those of statements in it."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "body", "orelse", "finalbody", "handlers", "cases") and not isinstance(
                node, ast.Lambda | ast.IfExp
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    pending.append(child)


def _mentioned(statement: ast.stmt) -> frozenset[str]:
    names = set()
    for node in _head(statement):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return frozenset(names)


def _uses_cuda(statement: ast.stmt) -> bool:
    """Return whether a statement calls or reads something of torch.cuda that needs a device."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda" and node.attr not in _ASKED_ANYWHERE
        for node in _head(statement)
    )


class _Marks:
    """The statements that only CUDA devices execute, found from conditions, and then from what refers to functions."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self._of_node: dict[int, Found] = {}
        self._definitions: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._references: dict[str, list[Found | None]] = defaultdict(list)
        self._of_scope: dict[tuple[str, str], list[Found]] = defaultdict(list)
        for path in project_files():
            self._read(path)

    def _read(self, path: str) -> None:
        tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
        scopes = dict(scopes_of(tree))
        for statement in statements_of(tree):
            scope = scopes[id(statement)]
            each = Found(len(self.found), path, statement, scope, _mentioned(statement))
            self.found.append(each)
            self._of_node[id(statement)] = each
            parts = scope.split(".")
            for length in range(1, len(parts) + 1):
                self._of_scope[path, ".".join(parts[:length])].append(each)
            for name in each.names:
                self._references[name].append(each)
            is_simulation = path.startswith(SIMULATION)
            each.is_cuda_only = not is_simulation and (path.startswith(LAUNCHERS) or _uses_cuda(statement))
        self._note_references_outside_functions(tree)
        for block in [] if path.startswith(SIMULATION) else probed_blocks(tree):
            self._mark_branches(block)
        for definition, scope in _definitions(tree):
            self._definitions[definition].append((path, scope))

    def _note_references_outside_functions(self, tree: ast.Module) -> None:
        inside = {id(node) for statement in statements_of(tree) for node in ast.walk(statement)}
        for node in ast.walk(tree):
            if id(node) not in inside and isinstance(node, ast.Name):
                self._references[node.id].append(None)

    def _mark(self, block: list[ast.stmt]) -> None:
        for statement in block:
            for node in ast.walk(statement):
                if id(node) in self._of_node:
                    self._of_node[id(node)].is_cuda_only = True

    def _mark_branches(self, block: list[ast.stmt]) -> None:
        for index, statement in enumerate(block):
            if not isinstance(statement, ast.If):
                continue
            truth = truth_on_cuda(statement.test)
            if truth is True:
                self._mark(statement.body)
                if _ends(statement.orelse):
                    self._mark(block[index + 1 :])
            elif truth is False:
                self._mark(statement.orelse)
                if _ends(statement.body):
                    self._mark(block[index + 1 :])

    def follow_references(self) -> None:
        """Mark functions and classes that only marked statements refer to, until there are no more."""
        is_changed = True
        while is_changed:
            is_changed = False
            for name, places in self._definitions.items():
                own = self._of_scope[places[0]]
                if len(places) > 1 or all(each.is_cuda_only for each in own):
                    continue
                others = [each for each in self._references[name] if each is None or each not in own]
                if others and all(each is not None and each.is_cuda_only for each in others):
                    for each in own:
                        each.is_cuda_only = True
                    is_changed = True


def scopes_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the id of each statement with the qualified name of the function or class around it."""

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[int, str]]:
        inner = (*scope, node.name) if isinstance(node, Function | ast.ClassDef) else scope
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield id(child), ".".join(inner)
            yield from visit(child, inner)

    yield from visit(tree, ())


def _definitions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the qualified name of each function and class, but for special methods and Triton programs."""

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, Function | ast.ClassDef):
                inner = (*scope, child.name)
                if not child.name.startswith("__") and not is_triton_program(child):
                    yield child.name, ".".join(inner)
            yield from visit(child, inner)

    yield from visit(tree, ())


def all_found() -> list[Found]:
    """Return all statements in functions, in the order of their probes, with those marked that are for CUDA only."""
    marks = _Marks()
    marks.follow_references()
    return marks.found
