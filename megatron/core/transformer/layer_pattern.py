"""Megatron's notation for per-layer patterns (all but every Nth layer, or a list of 1 and 0) and attention windows."""

from __future__ import annotations

import ast
from collections.abc import Sequence


def parse_layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether the pattern selects it.

    ``N`` selects all layers except every Nth. A list has a 1 or 0 per layer and may be an expression:
    ``([1]*5+[0])*4``.

    Raises:
        ValueError: the text is neither a number nor such a list; the message gives the reason.
    """
    expected = "a number or a list such as ([1]*5+[0])*4 is expected"
    try:
        found = evaluate_pattern(text)
    except ValueError as error:
        raise ValueError(expected) from error
    if isinstance(found, str):
        raise ValueError(expected)
    if isinstance(found, int):
        if found < 1:
            raise ValueError("a number greater than 0 is expected")
        return tuple((layer + 1) % found != 0 for layer in range(num_layers))
    if len(found) != num_layers:
        raise ValueError(
            f"the list has {len(found)} entries, but the model has {num_layers} layers; use a list of {num_layers}"
        )
    if not set(found) <= {0, 1}:
        raise ValueError("a list of 1 and 0 is expected")
    return tuple(map(bool, found))


def parse_window(text: str) -> int:
    """Return the number of keys that a query in a windowed layer attends to, including its own position.

    Raises:
        ValueError: the text is not ``N,0``.
    """
    before, comma, after = text.strip("() ").partition(",")
    if not (before.strip().isdecimal() and comma and after.strip() == "0"):
        raise ValueError("N,0 is expected, where N is the number of previous positions that a query attends to")
    return int(before) + 1


def format_layer_pattern(kinds: Sequence[bool]) -> str:
    """Return the shortest text that `parse_layer_pattern` parses to this pattern."""
    for number in range(1, len(kinds) + 1):
        if list(kinds) == [(layer + 1) % number != 0 for layer in range(len(kinds))]:
            return str(number)
    return str([int(kind) for kind in kinds])


_MOST_LAYERS = 100_000


def evaluate_pattern(text: str) -> int | str | list[int | str]:
    """Evaluate a number, a name, or an expression of lists of numbers and names.

    Raises:
        ValueError: the text is anything else, or the list is too long.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError) as error:
        raise ValueError(f"{text} is neither a number nor a list") from error


def _value(node: ast.expr) -> int | str | list[int | str]:
    """Evaluate an expression to a number, a name, or a list of numbers and names.

    Raises:
        TypeError: the expression contains anything else, or the list is longer than ``_MOST_LAYERS``.
    """
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return name
        case ast.List(elts=items):
            return [_element(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list(left) + _list(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            part, count = _list(left), _element(right)
            if isinstance(count, int) and len(part) * count <= _MOST_LAYERS:
                return part * count
    raise TypeError(ast.dump(node))


def _element(node: ast.expr) -> int | str:
    value = _value(node)
    if isinstance(value, list):
        raise TypeError(value)
    return value


def _list(node: ast.expr) -> list[int | str]:
    value = _value(node)
    if not isinstance(value, list):
        raise TypeError(value)
    return value
