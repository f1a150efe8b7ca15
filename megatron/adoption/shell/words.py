"""Expand a shell's words: quotes, parameters, arithmetic, command substitution, splitting into fields."""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron.adoption.shell.arithmetic import Arithmetic, UnknownNumber
from megatron.adoption.shell.patterns import glob_expression, replaced, without_end
from megatron.adoption.shell.state import ShellState, has_unknown, is_unset, readable
from megatron.adoption.shell.syntax import end_of_element

_PARAMETER = re.compile(
    r"(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!_-])(?:\[(?P<index>(?:[^\[\]]|\[[^]]*\])*)\])?(?P<rest>.*)", re.S
)
OUTPUT = "OUTPUT_"
"""How the name of an unknown begins that is better named after the variable which takes it."""

_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.S)
_BRACES = re.compile(r"(?<!\$)\{([^{}\s]*,[^{}\s]*|-?\d+\.\.-?\d+)\}")
_FILE_PATTERN = re.compile(r"[*?]|\[[^]]*\]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "e": "\x1b"}


class _Fields:
    """Collect the fields of a word: what comes from an unquoted expansion is split at white space."""

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
    """Collect a word as one text: an assignment, or what a ``case`` looks at."""

    def __init__(self) -> None:
        self.text = ""

    def quoted(self, text: str) -> None:
        self.text += text

    literal = expanded = quoted

    def next_field(self) -> None:
        self.text += " "


class _Pattern:
    """Collect a word as a pattern: what is quoted stands for itself."""

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
    """Expand words as the script's state stands; ``substitute`` gives the output of ``$( … )`` or an unknown."""

    def __init__(self, state: ShellState, substitute: Callable[[str], str]) -> None:
        self._state = state
        self._substitute = substitute

    def fields(self, word: str) -> list[str]:
        """Return the fields that an unquoted word becomes: none, one or several."""
        result = []
        for alternative in _brace_alternatives(word):
            sink = _Fields()
            self._walk(alternative, sink)
            sink.next_field()
            for field, has_pattern in sink.done:
                is_pattern = has_pattern and ("/" in field or "." in field) and _FILE_PATTERN.search(field)
                reason = f"the shell fills in the files that {readable(field)} names"
                result.append(self._state.unknown(field, reason) if is_pattern else field)
        return result

    def text(self, word: str) -> str:
        """Return a word as one text, without splitting."""
        sink = _Text()
        if word == "~" or word.startswith("~/"):
            sink.quoted(self._home())
            word = word[1:]
        self._walk(word, sink)
        return sink.text

    def pattern(self, word: str) -> str:
        """Return a word as a glob pattern whose quoted parts are escaped."""
        sink = _Pattern()
        self._walk(word, sink)
        return sink.pattern

    def double_quoted(self, text: str) -> str:
        """Return what a text becomes between double quotes."""
        sink = _Text()
        self._walk(text, sink, double=True)
        return sink.text

    def here_document(self, text: str) -> str:
        """Return what a here-document becomes: as between double quotes, which are characters like others in it."""
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
            UnknownNumber: it cannot be known.
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
                reason = f"is {readable(element)} of values that are not known"
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
        """Expand what stands between ``${`` and ``}``."""
        if inner.startswith("#") and len(inner) > 1:
            self._emit(self._length(inner[1:]), sink, double)
            return
        if inner.startswith("!") and len(inner) > 1:
            self._indirect(inner[1:], sink, double)
            return
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            self._emit(self._state.unknown(inner, f"${{{inner}}} cannot be read"), sink, double)
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
            self._emit(self._state.unknown(name, f"${{!{name}}} names a variable that is not known"), sink, double)
        else:
            self._parameter(target + match["rest"], sink, double)

    def _default(self, name: str, index: str | None, default: re.Match[str], sink: _Sink, double: bool) -> bool:
        """Expand ``${X:-word}`` and its kin where the word is what they become; tell whether it was."""
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
        """Apply what follows the name in ``${name…}``: cutting, replacing, a part, upper or lower case."""
        if not rest:
            return text
        if has_unknown(text):
            return self._state.unknown(name, f"${{{name}{rest}}} is made of a value that is not known")
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
                return self._state.unknown(name, f"${{{name}{rest}}} is a part that is not known")
        return self._state.unknown(name, f"${{{name}{rest}}} cannot be read")

    def _slice_of_items(self, items: list[str], rest: str, name: str) -> list[str]:
        try:
            bounds = [self.number(part) for part in rest.split(":", 1)]
        except UnknownNumber:
            return [self._state.unknown(name, f"${{{name}:{rest}}} is a part that is not known")]
        if name in ("@", "*"):
            items = [self._state.script, *items]
        return items[_slice(bounds, len(items))]


def _slice(bounds: list[int], length: int) -> slice:
    start = bounds[0] if bounds[0] >= 0 else max(length + bounds[0], 0)
    if len(bounds) == 1:
        return slice(start, None)
    return slice(start, start + bounds[1] if bounds[1] >= 0 else length + bounds[1])


def _brace_alternatives(word: str) -> list[str]:
    """Return the words that ``a{b,c}`` and ``{1..3}`` stand for; those in quotes stay."""
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
    """Tell whether the whole text fits a glob pattern."""
    return re.fullmatch(glob_expression(pattern), text, re.S) is not None
