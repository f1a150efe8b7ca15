"""The integer arithmetic of a shell: ``$(( … ))``, ``(( … ))``, ``let`` and array subscripts."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from megatron.adoption.shell.state import has_unknown

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*|<<=|>>=|\*\*|[-+*/%&|^]=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|.)"
)
_BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda a, b: int(bool(a) or bool(b))),
    "&&": (2, lambda a, b: int(bool(a) and bool(b))),
    "|": (3, operator.or_),
    "^": (4, operator.xor),
    "&": (5, operator.and_),
    "==": (6, lambda a, b: int(a == b)),
    "!=": (6, lambda a, b: int(a != b)),
    "<": (7, lambda a, b: int(a < b)),
    ">": (7, lambda a, b: int(a > b)),
    "<=": (7, lambda a, b: int(a <= b)),
    ">=": (7, lambda a, b: int(a >= b)),
    "<<": (8, lambda a, b: a << _shift(b)),
    ">>": (8, lambda a, b: a >> _shift(b)),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "*": (10, operator.mul),
    "/": (10, lambda a, b: _quotient(a, b)),
    "%": (10, lambda a, b: a - b * _quotient(a, b)),
}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
    "~": operator.invert,
}
_DEPTH = 20


class UnknownNumber(Exception):
    """Report arithmetic whose result cannot be known."""


def _quotient(a: int, b: int) -> int:
    """Divide as C does: towards zero."""
    if b == 0:
        raise UnknownNumber("a division by zero")
    magnitude = abs(a) // abs(b)
    return magnitude if (a < 0) == (b < 0) else -magnitude


def _shift(count: int) -> int:
    """Return how far to shift; C leaves open what other counts do."""
    if not 0 <= count < 63:
        raise UnknownNumber(f"a shift by {count}")
    return count


class Arithmetic:
    """Evaluate one expression; ``lookup`` gives a variable's text, ``assign`` takes a new value."""

    def __init__(
        self, text: str, lookup: Callable[[str], str | None], assign: Callable[[str, str], None], depth: int = 0
    ) -> None:
        self._tokens = _TOKEN.findall(text.strip())
        self._place = 0
        self._text, self._lookup, self._assign, self._depth = text, lookup, assign, depth
        if has_unknown(text) or depth > _DEPTH:
            raise UnknownNumber(text)

    def value(self) -> int:
        """Return the value of the whole expression; of an empty one, 0.

        Raises:
            UnknownNumber: a variable is unknown or the text is no arithmetic.
        """
        if not self._tokens:
            return 0
        result = self._ternary()
        while self._take(","):
            result = self._ternary()
        if self._place < len(self._tokens):
            raise UnknownNumber(self._text)
        return result

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, token: str) -> bool:
        found = self._peek() == token
        self._place += found
        return found

    def _ternary(self) -> int:
        condition = self._binary(1)
        if not self._take("?"):
            return condition
        yes = self._ternary()
        if not self._take(":"):
            raise UnknownNumber(self._text)
        no = self._ternary()
        return yes if condition else no

    def _binary(self, lowest: int) -> int:
        left = self._power()
        while self._peek() in _BINARY and _BINARY[self._peek()][0] >= lowest:
            strength, function = _BINARY[self._tokens[self._place]]
            self._place += 1
            left = function(left, self._binary(strength + 1))
            if abs(left) >= 1 << 63:
                raise UnknownNumber(f"{self._text} does not fit 64 bits")
        return left

    def _power(self) -> int:
        base = self._operand()
        if not self._take("**"):
            return base
        exponent = self._power()
        if exponent < 0 or exponent > 63:
            raise UnknownNumber(self._text)
        if abs(base) ** exponent >= 1 << 63:
            raise UnknownNumber(self._text)
        return int(base**exponent)

    def _operand(self) -> int:
        token = self._peek()
        self._place += 1
        if token in _UNARY:
            return int(_UNARY[token](self._operand()))
        if token in ("++", "--"):
            name = self._peek()
            self._place += 1
            return self._set(name, self._variable(name) + (1 if token == "++" else -1))
        if token == "(":
            result = self._ternary()
            if not self._take(")"):
                raise UnknownNumber(self._text)
            return result
        if re.match(r"[A-Za-z_]", token):
            return self._name(token)
        return self._number(token)

    def _number(self, token: str) -> int:
        try:
            if "#" in token:
                base, digits = token.split("#")
                return int(digits, int(base))
            return int(token, 8) if re.fullmatch(r"0\d+", token) else int(token, 0)
        except ValueError:
            raise UnknownNumber(self._text) from None

    def _name(self, name: str) -> int:
        following = self._peek()
        if following == "=" or (following.endswith("=") and following[:-1] in _BINARY and following not in _BINARY):
            self._place += 1
            right = self._ternary()
            old = 0 if following == "=" else self._variable(name)
            return self._set(name, right if following == "=" else _BINARY[following[:-1]][1](old, right))
        value = self._variable(name)
        if following in ("++", "--"):
            self._place += 1
            self._set(name, value + (1 if following == "++" else -1))
        return value

    def _set(self, name: str, value: int) -> int:
        self._assign(name, str(value))
        return value

    def _variable(self, name: str) -> int:
        text = self._lookup(name)
        if text is None:
            raise UnknownNumber(f"{name} is never set")
        return Arithmetic(text, self._lookup, self._assign, self._depth + 1).value()
