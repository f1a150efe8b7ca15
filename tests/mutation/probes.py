"""Insert a call before each place of a mutant, which notes the tests that execute it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.mutation.mutants import Mutant

Function = ast.FunctionDef | ast.AsyncFunctionDef
Position = tuple[int, int]


def with_probes(source: str, mutants: Iterable[tuple[int, Mutant]]) -> str:
    """Return a source file that calls ``mutation_probe(number)`` where each numbered mutant's statement is executed.

    A default value of an argument counts as executed with the function, and a statement of a class or a module with
    each function of it. So does one of a Triton program, which cannot call Python, and so does a nested function in a
    file that uses FlexAttention, whose compiler traces these functions.
    """
    tree = ast.parse(source)
    is_traced = "torch.nn.attention.flex_attention" in source
    for number, mutant in mutants:
        for block, index in list(_places(tree, _position(source, mutant.start), is_traced)):
            block.insert(index, _probe(number))
    return ast.unparse(ast.fix_missing_locations(tree))


def _probe(number: int) -> ast.stmt:
    return ast.parse(f"getattr(__import__('builtins'), 'mutation_probe', id)({number})").body[0]


def _position(source: str, offset: int) -> Position:
    before = source[:offset]
    return before.count("\n") + 1, len(before.rpartition("\n")[2].encode())


def _contains(node: ast.stmt | ast.expr | ast.arg, position: Position) -> bool:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset) <= position < (node.end_lineno, node.end_col_offset)


def _is_program(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _places(tree: ast.Module, position: Position, is_traced: bool) -> Iterator[tuple[list[ast.stmt], int]]:
    """Yield the lists of statements, and the places in them, where a probe for the position belongs.

    With ``is_traced``, a probe stays outside functions that are nested in others.
    """
    scope: ast.Module | ast.ClassDef | Function = tree
    node: ast.AST = tree
    while (inner := _inner(node, position)) is not None:
        if is_traced and isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            nested = inner[0][inner[1]]
            if isinstance(nested, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield inner
                return
        block, index = inner
        node = block[index]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = node
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_program(scope):
        yield (scope.body, _start(scope)) if node is scope else (block, index)
        return
    functions = list(_functions(scope))
    if isinstance(scope, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in scope.decorator_list):
        maker = ast.parse(f"def __new__(cls, *_, **__):\n    return super({scope.name}, cls).__new__(cls)").body[0]
        scope.body.append(maker)
        functions = list(_functions(maker)) + functions
    for function in functions or _functions(tree):
        yield function.body, _start(function)


def _functions(node: ast.AST) -> Iterator[Function]:
    """Yield the functions in the node that may call Python."""
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_program(each):
            yield each


def _start(function: Function) -> int:
    return 1 if ast.get_docstring(function, clean=False) is not None and len(function.body) > 1 else 0


def _inner(node: ast.AST, position: Position) -> tuple[list[ast.stmt], int] | None:
    """Return the block of the node, and the place in it, whose statement holds the position."""
    for child in (
        node,
        *(each for each in ast.iter_child_nodes(node) if isinstance(each, ast.ExceptHandler | ast.match_case)),
    ):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(child, name, None)
            if isinstance(block, list):
                for index, statement in enumerate(block):
                    if isinstance(statement, ast.stmt) and _contains(statement, position):
                        return block, index
    return None
