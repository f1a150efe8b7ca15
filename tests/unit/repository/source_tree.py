"""The project's own files, and what their code imports."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = REPOSITORY / "megatron"
IMPORTING_FUNCTIONS = ("import_module", "load_package")
"""Ends of the names of functions that import the module that their first argument names."""


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def exposed_names(init: Path) -> dict[str, str]:
    """Return the names that a package exposes, with the modules that define them."""
    imports = (node for node in ast.walk(syntax_tree(init)) if isinstance(node, ast.ImportFrom))
    package = module_name(init)
    return {
        alias.name: node.module
        for node in imports
        if node.module is not None and node.module.startswith(f"{package}.")
        for alias in node.names
        if node.module != "megatron.core.lazy_exports"
    }


def is_for_type_checkers(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that is not under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(tree):
        if is_for_type_checkers(child):
            assert isinstance(child, ast.If)
            for statement in child.orelse:
                yield from runtime_nodes(statement)
            continue
        yield child
        yield from runtime_nodes(child)


def dotted_name(node: ast.AST) -> str | None:
    """Return ``a.b.c`` for an attribute chain that starts at a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def used_names(path: Path) -> set[str]:
    """Return the dotted names that a file imports or reaches through its imports, aliases resolved."""
    return set().union(*names_by_definition(path).values())


@functools.cache
def names_by_definition(path: Path) -> dict[str, set[str]]:
    """Return the names of `used_names` by the function or class at the top of the file that uses them.

    The key of the file's imports is "import", and the key of its other statements is "".
    """
    tree = syntax_tree(path)
    aliases = _aliases(runtime_nodes(tree))
    found: dict[str, set[str]] = {}
    for statement in tree.body:
        if is_for_type_checkers(statement):
            # What its `else` has is a statement of the file.
            nodes = [node for each in statement.orelse for node in (each, *runtime_nodes(each))]
        else:
            nodes = [statement, *runtime_nodes(statement)]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            key = statement.name
        else:
            key = "import" if isinstance(statement, ast.Import | ast.ImportFrom) else ""
        found.setdefault(key, set()).update(_names(nodes, aliases))
    return found


def _aliases(nodes: Iterable[ast.AST]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def _names(nodes: Iterable[ast.AST], aliases: Mapping[str, str]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and (dotted_name(node.func) or "").endswith(IMPORTING_FUNCTIONS):
            names |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
        name = dotted_name(node)
        if name is not None:
            first, _, rest = name.partition(".")
            if first in aliases:
                names.add(f"{aliases[first]}.{rest}" if rest else aliases[first])
    return names


def tracked_files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so which files belong to the project is not known")
    return [REPOSITORY / name for name in listed.stdout.split("\0") if name]
