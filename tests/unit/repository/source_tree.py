"""The project's own files, and what their code imports."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = REPOSITORY / "megatron"


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
    nodes = list(runtime_nodes(syntax_tree(path)))
    aliases: dict[str, str] = {}
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and (dotted_name(node.func) or "").endswith("import_module"):
            names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    for node in nodes:
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
