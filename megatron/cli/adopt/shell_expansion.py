"""Expand shell words: quotes, parameters, arithmetic, patterns, command substitution, word splitting."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from megatron.cli.adopt.shell_syntax import end_of_element
from megatron.cli.adopt.shell_values import ShellState, has_unknown, is_unset, readable

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
    """Arithmetic expression whose result is unknown."""


def _quotient(a: int, b: int) -> int:
    """Divide with truncation towards zero, as C does."""
    if b == 0:
        raise UnknownNumber("a division by zero")
    magnitude = abs(a) // abs(b)
    return magnitude if (a < 0) == (b < 0) else -magnitude


def _shift(count: int) -> int:
    """Check a shift count; other counts are undefined behavior in C."""
    if not 0 <= count < 63:
        raise UnknownNumber(f"a shift by {count}")
    return count


class Arithmetic:
    """Evaluator of one expression; ``lookup`` returns a variable's text, ``assign`` sets a variable."""

    def __init__(
        self, text: str, lookup: Callable[[str], str | None], assign: Callable[[str, str], None], depth: int = 0
    ) -> None:
        self._tokens = _TOKEN.findall(text.strip())
        self._place = 0
        self._text, self._lookup, self._assign, self._depth = text, lookup, assign, depth
        if has_unknown(text) or depth > _DEPTH:
            raise UnknownNumber(text)

    def value(self) -> int:
        """Evaluate the whole expression; an empty expression is 0.

        Raises:
            UnknownNumber: a variable is unknown, or the text is not an arithmetic expression.
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


def glob_expression(pattern: str, greedy: bool = True) -> str:
    """Convert a glob pattern, with ``\\`` as the escape character, to a regular expression."""
    result, place = "", 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\" and place + 1 < len(pattern):
            place += 1
            result += re.escape(pattern[place])
        elif character == "*":
            result += ".*" if greedy else ".*?"
        elif character == "?":
            result += "."
        elif character == "[" and (match := re.compile(r"\[([!^]?)(\]?[^]]*)\]").match(pattern, place)):
            negated = "^" if match[1] else ""
            result += f"[{negated}{match[2]}]"
            place = match.end() - 1
        else:
            result += re.escape(character)
        place += 1
    return result


def without_end(text: str, pattern: str, at_start: bool, greedy: bool) -> str:
    """Remove the shortest, or with ``greedy`` the longest, match of a pattern from one end of a text."""
    lengths = range(len(text) + 1)
    for length in reversed(lengths) if greedy else lengths:
        part = text[:length] if at_start else text[len(text) - length :]
        if re.fullmatch(glob_expression(pattern), part, re.S):
            return text[length:] if at_start else text[: len(text) - length]
    return text


def replaced(text: str, rest: str, pattern_of: Callable[[str], str], text_of: Callable[[str], str]) -> str:
    """Replace as ``${X/pattern/text}`` does; ``rest`` is the text after the first slash."""
    kind = rest[:1] if rest[:1] in ("/", "#", "%") else ""
    pattern, _, new = rest[len(kind) :].partition("/")
    expression = glob_expression(pattern_of(pattern))
    if not expression:
        return text
    expression = {"#": rf"\A(?:{expression})", "%": rf"(?:{expression})\Z"}.get(kind, expression)
    replacement = text_of(new)
    return re.sub(expression, lambda match: replacement, text, count=0 if kind == "/" else 1, flags=re.S)


_PARAMETER = re.compile(
    r"(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!_-])(?:\[(?P<index>(?:[^\[\]]|\[[^]]*\])*)\])?(?P<rest>.*)", re.S
)
OUTPUT = "OUTPUT_"
"""Prefix of the name of an unknown command output, which is renamed after the variable that it is assigned to."""

_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.S)
_BRACES = re.compile(r"(?<!\$)\{([^{}\s]*,[^{}\s]*|-?\d+\.\.-?\d+)\}")
_FILE_PATTERN = re.compile(r"[*?]|\[[^]]*\]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "e": "\x1b"}


class _Fields:
    """Collector of the fields of a word; unquoted expansions are split at white space."""

    def __init__(self) -> None:
        self.done: list[tuple[str, bool]] = []
        self._text: str | None = None
        self._has_pattern = False

    def quoted(self, text: str) -> None:
        self._text = (self._text or "") + text

    def literal(self, text: str) -> None:
        if text.isspace():  # in the default of an unquoted ${X:-a b}
            self.next_field()
            return
        self._has_pattern |= text in "*?["
        self.quoted(text)

    def expanded(self, text: str) -> None:
        if text[:1].isspace():
            self.next_field()
        parts = text.split()
        for number, part in enumerate(parts):
            if number:
                self.next_field()
            self._has_pattern |= any(character in part for character in "*?[")
            self.quoted(part)
        if parts and text[-1:].isspace():
            self.next_field()

    def next_field(self) -> None:
        if self._text is not None:
            self.done.append((self._text, self._has_pattern))
        self._text, self._has_pattern = None, False


class _Text:
    """Collector of a word as one text, for an assignment or the subject of a ``case``."""

    def __init__(self) -> None:
        self.text = ""

    def quoted(self, text: str) -> None:
        self.text += text

    literal = expanded = quoted

    def next_field(self) -> None:
        self.text += " "


class _Pattern:
    """Collector of a word as a glob pattern; quoted parts are escaped."""

    def __init__(self) -> None:
        self.pattern = ""

    def quoted(self, text: str) -> None:
        self.pattern += re.sub(r"([*?\[\]\\!-])", r"\\\1", text)

    def literal(self, text: str) -> None:
        self.pattern += text

    expanded = literal

    def next_field(self) -> None:
        self.pattern += " "


_Sink = _Fields | _Text | _Pattern


class Expander:
    """Expander of words in a script's state; ``substitute`` returns the output of ``$( … )``, or an unknown."""

    def __init__(self, state: ShellState, substitute: Callable[[str], str]) -> None:
        self._state = state
        self._substitute = substitute

    def fields(self, word: str) -> list[str]:
        """Expand an unquoted word to its fields: none, one or several."""
        result = []
        for alternative in _brace_alternatives(word):
            sink = _Fields()
            self._walk(alternative, sink)
            sink.next_field()
            for field, has_pattern in sink.done:
                is_pattern = has_pattern and ("/" in field or "." in field) and _FILE_PATTERN.search(field)
                reason = f"the shell expands the pattern {readable(field)} to file names"
                result.append(self._state.unknown(field, reason) if is_pattern else field)
        return result

    def text(self, word: str) -> str:
        """Expand a word to one text, without splitting."""
        sink = _Text()
        if word == "~" or word.startswith("~/"):
            sink.quoted(self._home())
            word = word[1:]
        self._walk(word, sink)
        return sink.text

    def pattern(self, word: str) -> str:
        """Expand a word to a glob pattern whose quoted parts are escaped."""
        sink = _Pattern()
        self._walk(word, sink)
        return sink.pattern

    def double_quoted(self, text: str) -> str:
        """Expand a text as between double quotes."""
        sink = _Text()
        self._walk(text, sink, double=True)
        return sink.text

    def here_document(self, text: str) -> str:
        """Expand a here-document as between double quotes; double quotes in it are ordinary characters."""
        sink, place = _Text(), 0
        while place < len(text):
            end = end_of_element(text, place, double=True)
            element = text[place:end]
            if element in ('"', '\\"'):
                sink.quoted(element)
            else:
                self._walk(element, sink, double=True)
            place = end
        return sink.text

    def number(self, expression: str) -> int:
        """Evaluate an arithmetic expression.

        Raises:
            UnknownNumber: the value is unknown.
        """
        return Arithmetic(self.double_quoted(expression), self._number_text, self._assign).value()

    def _number_text(self, name: str) -> str | None:
        items = self._state.items(name)
        return items[0] if items else None

    def _assign(self, name: str, value: str) -> None:
        self._state.variables[name] = value

    def _home(self) -> str:
        home = self._state.value("HOME")
        return home if isinstance(home, str) else self._state.unset("HOME")

    def _walk(self, text: str, sink: _Sink, double: bool = False) -> None:
        place = 0
        if not double and isinstance(sink, _Fields) and (text == "~" or text.startswith("~/")):
            sink.quoted(self._home())
            place = 1
        while place < len(text):
            character = text[place]
            end = end_of_element(text, place, double)
            element = text[place:end]
            if character == "\\" and len(element) > 1:
                self._escape(element, sink, double)
            elif element.startswith("$'") and not double:
                sink.quoted(re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), element[2:-1]))
            elif character == "'" and not double:
                sink.quoted(element[1:-1])
            elif character == '"':
                if not double:
                    inner = element[1:-1]
                    self._walk(inner, sink, double=True)
                    if not re.fullmatch(r"\$(@|\{(@|\w+\[@\])[^{}]*\})", inner):
                        sink.quoted("")
            elif character == "$" and len(element) > 1:
                self._dollar(element, sink, double)
            elif character == "`":
                self._emit(self._substitute(re.sub(r"\\([`$\\])", r"\1", element[1:-1])), sink, double)
            elif double:
                sink.quoted(element)
            else:
                sink.literal(element)
            place = end

    def _escape(self, element: str, sink: _Sink, double: bool) -> None:
        if element == "\\\n":
            return
        sink.quoted(element if double and element[1] not in '\\$"`' else element[1])

    def _emit(self, text: str, sink: _Sink, double: bool) -> None:
        (sink.quoted if double else sink.expanded)(text)

    def _dollar(self, element: str, sink: _Sink, double: bool) -> None:
        if element.startswith("$((") and element.endswith("))"):
            try:
                text = str(self.number(element[3:-2]))
            except UnknownNumber:
                reason = f"is {readable(element)} of unknown values"
                text = self._state.unknown(f"{OUTPUT}{element[3:-2]}", reason)
            self._emit(text, sink, double)
        elif element.startswith("$("):
            self._emit(self._substitute(element[2:-1]), sink, double)
        elif element.startswith("${"):
            self._parameter(element[2:-1], sink, double)
        elif element[1] in "@*":
            self._list(self._state.parameters, element[1], sink, double)
        else:
            self._emit(self._plain(element[1:], None), sink, double)

    def _plain(self, name: str, index: str | None) -> str:
        value = self._lookup(name, index)
        return self._state.unset(name) if value is None else value

    def _lookup(self, name: str, index: str | None) -> str | None:
        value = self._state.value(name)
        if isinstance(value, dict):
            return value.get(self.text(index or "0"))
        items = self._state.items(name)
        if items is None:
            return None
        try:
            return items[self.number(index or "0")] if items else None
        except IndexError:
            return None
        except UnknownNumber:
            return self._state.unknown(name, f"the index {index} of ${name} is not known")

    def _list(self, items: list[str], kind: str, sink: _Sink, double: bool) -> None:
        if double and kind == "*":
            sink.quoted(" ".join(items))
            return
        for number, item in enumerate(items):
            if number:
                sink.next_field()
            self._emit(item, sink, double)

    def _parameter(self, inner: str, sink: _Sink, double: bool) -> None:
        """Expand the content of ``${…}``."""
        if inner.startswith("#") and len(inner) > 1:
            self._emit(self._length(inner[1:]), sink, double)
            return
        if inner.startswith("!") and len(inner) > 1:
            self._indirect(inner[1:], sink, double)
            return
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            self._emit(self._state.unknown(inner, f"${{{inner}}} cannot be parsed"), sink, double)
            return
        name, index, rest = match["name"], match["index"], match["rest"]
        if default := _DEFAULT.fullmatch(rest):
            if self._default(name, index, default, sink, double):
                return
            rest = ""
        kind = index if index in ("@", "*") else name if name in ("@", "*") else None
        if kind is None:
            self._emit(self._changed(self._plain(name, index), name, rest), sink, double)
            return
        items = self._state.items(name)
        if items is None:
            items = [self._state.unset(name)] if index else []
        if rest.startswith(":"):
            items = self._slice_of_items(items, rest[1:], name)
        else:
            items = [self._changed(item, name, rest) for item in items]
        self._list(items, kind, sink, double)

    def _length(self, name: str) -> str:
        match = _PARAMETER.fullmatch(name)
        if match and (match["index"] in ("@", "*") or name in ("@", "*")):
            return str(len(self._state.items(match["name"]) or []))
        text = self._plain(match["name"], match["index"]) if match else "\ue000"
        return self._state.unknown(name, f"the length of ${name} is not known") if has_unknown(text) else str(len(text))

    def _indirect(self, name: str, sink: _Sink, double: bool) -> None:
        match = _PARAMETER.fullmatch(name)
        if match and match["index"] in ("@", "*"):
            value = self._state.value(match["name"])
            keys = list(value) if isinstance(value, dict) else [str(i) for i, _ in enumerate(value or [])]
            self._list(keys, match["index"], sink, double)
            return
        target = self._plain(match["name"], match["index"]) if match else "\ue000"
        if match is None or has_unknown(target):
            self._emit(self._state.unknown(name, f"${{!{name}}} refers to an unknown variable"), sink, double)
        else:
            self._parameter(target + match["rest"], sink, double)

    def _default(self, name: str, index: str | None, default: re.Match[str], sink: _Sink, double: bool) -> bool:
        """Expand ``${X:-word}`` and similar forms if they do not expand to the value of X; return whether they did."""
        if index in ("@", "*") or name in ("@", "*"):
            items = self._state.items(name)
            value = None if not items else " ".join(items)
        else:
            value = self._lookup(name, index)
        absent = value is None or (bool(default[1]) and is_unset(value))
        operator, word = default[2], default[3]
        if operator == "+":
            if not absent:
                self._walk(word, sink, double)
            return True
        if operator == "?" or not absent:
            return False
        if operator == "=":
            self._state.variables[name] = self.text(word)
        self._walk(word, sink, double)
        return True

    def _changed(self, text: str, name: str, rest: str) -> str:
        """Apply the operator in ``${name…}``: removal, replacement, substring, upper or lower case."""
        if not rest:
            return text
        if has_unknown(text):
            return self._state.unknown(name, f"${{{name}{rest}}} depends on an unknown value")
        if rest[0] in "#%":
            greedy = rest[:2] in ("##", "%%")
            return without_end(text, self.pattern(rest[1 + greedy :]), rest[0] == "#", greedy)
        if rest[0] == "/":
            return replaced(text, rest[1:], self.pattern, self.text)
        if rest[0] in "^,":
            change = str.upper if rest[0] == "^" else str.lower
            return change(text) if rest[:2] in ("^^", ",,") else change(text[:1]) + text[1:]
        if rest[0] == ":":
            try:
                bounds = [self.number(part) for part in rest[1:].split(":", 1)]
                return text[_slice(bounds, len(text))]
            except UnknownNumber:
                return self._state.unknown(name, f"${{{name}{rest}}} is part of an unknown value")
        return self._state.unknown(name, f"${{{name}{rest}}} cannot be parsed")

    def _slice_of_items(self, items: list[str], rest: str, name: str) -> list[str]:
        try:
            bounds = [self.number(part) for part in rest.split(":", 1)]
        except UnknownNumber:
            return [self._state.unknown(name, f"${{{name}:{rest}}} is part of an unknown value")]
        if name in ("@", "*"):
            items = [self._state.script, *items]
        return items[_slice(bounds, len(items))]


def _slice(bounds: list[int], length: int) -> slice:
    start = bounds[0] if bounds[0] >= 0 else max(length + bounds[0], 0)
    if len(bounds) == 1:
        return slice(start, None)
    return slice(start, start + bounds[1] if bounds[1] >= 0 else length + bounds[1])


def _brace_alternatives(word: str) -> list[str]:
    """Expand the braces in ``a{b,c}`` and ``{1..3}``, except in words with quotes."""
    match = _BRACES.search(word)
    if match is None or "'" in word or '"' in word or "`" in word or "$(" in word or "${" in word[: match.start()]:
        return [word]
    if ".." in match[1]:
        first, last = (int(part) for part in match[1].split(".."))
        step = 1 if last >= first else -1
        parts = [str(number) for number in range(first, last + step, step)]
    else:
        parts = match[1].split(",")
    head, tail = word[: match.start()], word[match.end() :]
    return [result for part in parts for result in _brace_alternatives(head + part + tail)]


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(glob_expression(pattern), text, re.S) is not None
