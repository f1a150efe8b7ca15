"""Offsets of rows in Triton programs have 64 bits: a program of so many elements is too large to run in a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated_cuda.scenarios.changed_source import is_triton_program

PROGRAMS = sorted((Path(__file__).resolve().parents[4] / "megatron/core/ops/triton").glob("*.py"))


def overflowing_products(source: str) -> Iterator[str]:
    """Yield the products of a 32-bit number that depends on ``tl.program_id(0)`` with an argument of the program.

    Axis 0 of a grid counts rows or tokens, of which there may be so many that the product passes 2^31.
    """
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and is_triton_program(function):
            constants = {
                each.arg
                for each in function.args.args
                if each.annotation is not None and "constexpr" in ast.unparse(each.annotation)
            }
            yield from _overflowing_products_of(function, constants)


def _overflowing_products_of(function: ast.FunctionDef, constants: set[str]) -> Iterator[str]:
    narrow: set[str] = set()
    for statement in ast.walk(function):
        if isinstance(statement, ast.Assign) and _is_narrow(statement.value, narrow):
            narrow |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                names = {each.id for each in ast.walk(other) if isinstance(each, ast.Name)} - constants
                if _is_narrow(one, narrow) and names:
                    yield f"{function.name}: {ast.unparse(node)}"


def _is_narrow(expression: ast.expr, narrow: set[str]) -> bool:
    """Return whether an expression depends on the number of the program's instance and has 32 bits."""
    if ast.unparse(expression).endswith(".to(tl.int64)") and isinstance(expression, ast.Call):
        return False
    if isinstance(expression, ast.Name):
        return expression.id in narrow
    if isinstance(expression, ast.BinOp):
        return _is_narrow(expression.left, narrow) or _is_narrow(expression.right, narrow)
    return ast.unparse(expression) == "tl.program_id(0)"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_offsets_of_rows_have_64_bits(path: Path) -> None:
    assert list(overflowing_products(path.read_text())) == []


def test_an_offset_of_32_bits_is_found() -> None:
    program = (
        "@triton.jit\n"
        "def f(x, width, BLOCK: tl.constexpr):\n"
        "    row = tl.program_id(0){}\n"
        "    x += row * BLOCK * width\n"
    )
    assert list(overflowing_products(program.format(".to(tl.int64)"))) == []
    assert list(overflowing_products(program.format(""))) == ["f: row * BLOCK * width"]
