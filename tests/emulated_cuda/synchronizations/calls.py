"""Find every call that may order streams, or let the host wait for a device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.emulated_cuda.scenarios.changed_source import REPOSITORY, project_files
from tests.emulated_cuda.synchronizations.known import apart

OF_TORCH = frozenset(
    (
        "wait",
        "wait_stream",
        "wait_event",
        "record",
        "record_event",
        "record_stream",
        "synchronize",
        "blockCurrentStream",
    )
)
"""Methods of torch's streams, events, tensors, devices and communications."""
OF_PROJECT = frozenset(
    (
        # Of Device, HostCopies, FlatParameters and WeightShards: each does nothing but wait.
        *("_synchronize", "wait_on_host", "wait_for_all", "finish_param_gather", "reach"),
        # A hook in front of each module, which waits for the module's parameters.
        "await_in_forward",
    )
)
"""Functions of the project that only call these: one call of them can be missing where others are there."""
WAITING_RECEIVERS = frozenset(
    (
        # Send queues of the pipeline.
        *("self.activations_out.finish", "self.gradients_out.finish", "self._out.finish", "self.staged.finish"),
        # Weights that come from the host or from other ranks.
        *("layer.use", "self._weights[index].use"),
    )
)
"""Calls of methods with common names that wait as well."""


@dataclass(frozen=True)
class Call:
    """One call: where it is, and its text. ``function`` is the qualified name of the function or class around it.

    ``number`` counts the equal calls of one function.
    """

    path: str
    line: int
    function: str
    text: str
    start: int
    name_end: int
    end: int
    number: int = 0

    @property
    def key(self) -> str:
        """Return the name of the call, which does not change with its line."""
        return f"{self.path}:{self.function}: {self.text}" + (f" #{self.number + 1}" if self.number else "")


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.calls: list[Call] = []
        self._path, self._source = path, source
        self._starts = [0]
        for text in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(text))
        self._lines = source.splitlines(keepends=True)
        self._scopes: list[str] = []

    def _offset(self, line: int, byte_column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:byte_column].decode())

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope

    def visit_Call(self, node: ast.Call) -> None:
        """Note a call of one of the names."""
        self.generic_visit(node)
        called = ast.unparse(node.func)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else called
        if name in OF_TORCH | OF_PROJECT or called in WAITING_RECEIVERS:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            assert node.func.end_lineno is not None
            assert node.func.end_col_offset is not None
            function, text = ".".join(self._scopes), ast.unparse(node)
            number = sum(each.function == function and each.text == text for each in self.calls)
            start = self._offset(node.lineno, node.col_offset)
            name_end = self._offset(node.func.end_lineno, node.func.end_col_offset)
            end = self._offset(node.end_lineno, node.end_col_offset)
            line = node.func.end_lineno
            self.calls.append(Call(self._path, line, function, text, start, name_end, end, number))


def calls_in(path: str, source: str) -> list[Call]:
    """Return the calls in a source file, in the order in which they end."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.calls


def all_calls(repository: Path = REPOSITORY) -> Iterator[Call]:
    """Yield the calls of all files of the package."""
    for path in project_files():
        yield from calls_in(path, (repository / path).read_text(encoding="utf-8"))


def removable_calls() -> list[Call]:
    """Return the calls that are not listed apart, whose places are their numbers."""
    return [call for call in all_calls() if apart(call.key) is None]
