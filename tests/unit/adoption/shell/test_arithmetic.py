"""Arithmetic is a shell's: held against bash on random expressions."""

from __future__ import annotations

import random
import subprocess

import pytest

from megatron.cli.adopt.shell_expansion import Arithmetic, UnknownNumber

VALUES = {"A": "7", "B": "A + 1", "N": "-3"}
BINARY = ["+", "-", "*", "/", "%", "<<", ">>", "<", "<=", "==", "!=", ">", ">=", "&", "|", "^", "&&", "||"]


def random_expression(source: random.Random, depth: int) -> str:
    if depth == 0:
        return source.choice(["1", "2", "010", "0x1f", "2#101", *VALUES])
    left, right = (random_expression(source, source.randrange(depth)) for _ in range(2))
    kind = source.randrange(8)
    if kind == 0:
        return f"({left} {source.choice(BINARY)} {right})"
    if kind == 1:
        return f"{source.choice(['-', '!', '~', '+'])} ({left})"
    if kind == 2:
        return f"({left} ? {right} : {left})"
    operator = source.choice(BINARY)
    # Divisors are not 0 and shifts are short.
    return f"{left} {operator} {source.randrange(1, 9) if operator in ('/', '%', '<<', '>>') else right}"


def value_of(expression: str) -> int | None:
    try:
        return Arithmetic(expression, VALUES.get, lambda name, value: None).value()
    except UnknownNumber:
        return None


def test_random_expressions_are_what_bash_computes() -> None:
    source = random.Random(1)
    drawn = [random_expression(source, 3) for _ in range(300)]
    expressions = [expression for expression in drawn if value_of(expression) is not None]
    assert len(expressions) > 250
    script = "".join(f"{name}='{value}'\n" for name, value in VALUES.items())
    script += "".join(f"echo $(({expression}))\n" for expression in expressions)
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert [str(value_of(expression)) for expression in expressions] == result.stdout.split()


def test_assignments_are_given_back() -> None:
    values = dict(VALUES)
    assert Arithmetic("A += 2, C = A++ * 2, --A", values.get, values.__setitem__).value() == 9
    assert (values["A"], values["C"]) == ("9", "18")


@pytest.mark.parametrize(
    "text", ["NONE + 1", "1 +", "1 / 0", "(1", "1 ? 2", "$X", "2 ** -1", "2 ** 63", "1 << 64", "09"]
)
def test_what_cannot_be_computed_is_unknown(text: str) -> None:
    with pytest.raises(UnknownNumber):
        Arithmetic(text, VALUES.get, lambda name, value: None).value()
