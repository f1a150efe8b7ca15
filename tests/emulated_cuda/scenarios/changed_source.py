"""Let a process import modules of the project from other source than what is on the disk."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
PROBE = "emulated_cuda_hits"
"""The built-in name of the array in which a statement notes that it was executed."""


def project_files() -> list[str]:
    """Return the paths of all modules of the package, relative to the repository, in a fixed order."""
    return sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "megatron").rglob("*.py"))


def is_triton_program(function: ast.AST) -> bool:
    """Return whether a function is compiled by Triton, which cannot call Python."""
    decorators = function.decorator_list if isinstance(function, ast.FunctionDef) else []
    return any("jit" in ast.unparse(decorator) for decorator in decorators)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements of a node, its exception handlers and its cases."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
    for child in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield child.body


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def probed_blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield each list of statements in functions of a module, outer ones first; Triton programs have none.

    A list may be changed once it has been yielded: its statements have been taken.
    """

    def visit(node: ast.AST, is_in_function: bool) -> Iterator[list[ast.stmt]]:
        if is_triton_program(node):
            return
        is_inside = is_in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for block in list(_blocks(node)):
            statements = list(block)
            if is_inside:
                yield block
            for statement in statements:
                yield from visit(statement, is_inside)

    yield from visit(tree, False)


def statements_of(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements in functions of a module that are executed, in the order of their probes."""
    return [each for block in probed_blocks(tree) for each in block if not _is_docstring(each)]


def with_probes(tree: ast.Module, first: int) -> int:
    """Insert before each statement in a function that it notes its number, from ``first`` on; return the next."""
    number = first
    for block in probed_blocks(tree):
        probed: list[ast.stmt] = []
        for statement in block:
            if not _is_docstring(statement):
                probe = ast.parse(f"{PROBE}[{number}] = 1").body[0]
                for node in ast.walk(probe):
                    ast.copy_location(node, statement)
                probed.append(probe)
                number += 1
            probed.append(statement)
        block[:] = probed
    return number


class ChangedSource(MetaPathFinder):
    """Find modules whose code is given, by the path of their files relative to the repository."""

    def __init__(self, codes: Mapping[str, CodeType]) -> None:
        self._codes = {str(REPOSITORY / path): code for path, code in codes.items()}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module as Python does, and give it a loader that executes the given code."""
        if name.partition(".")[0] != "megatron":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None or spec.origin not in self._codes:
            return None
        spec.loader = _CodeLoader(self._codes[spec.origin], spec.loader)
        return spec


class _CodeLoader(Loader):
    def __init__(self, code: CodeType, usual: Any) -> None:
        self._code = code
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)


def install(codes: Mapping[str, CodeType]) -> None:
    """Let later imports in this process take the given code.

    Raises:
        RuntimeError: modules of the project are imported already.
    """
    imported = sorted(name for name in sys.modules if name.partition(".")[0] == "megatron")
    if imported:
        raise RuntimeError(f"imported already, from the source on the disk: {', '.join(imported)}")
    sys.meta_path.insert(0, ChangedSource(codes))
