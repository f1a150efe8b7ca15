"""Read conversations from JSONL or a JSON array: messages, prompt and completion, or instruction, input and output."""

from __future__ import annotations

import codecs
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron.core.errors import DataError

ASSISTANT: Final = "assistant"
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
"""Role of each sender name in ``conversations``."""
_FORMATS: Final = (
    "messages (role and content each), conversations (from and value each), prompt and completion, or instruction, "
    "input and output"
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages of a conversation, each with its ``role`` and ``content``, and the tools that it may call."""

    messages: tuple[Message, ...]
    tools: Any = None


def read_conversations(line: bytes) -> list[Conversation]:
    """Read the conversations of one line. Each ``system`` message starts a new conversation, as in Megatron-LM.

    Raises:
        DataError: the line is not a JSON object of a known format, or a conversation has no answer to learn.
    """
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError
        raise DataError(f"not a JSON line: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"a JSON object is expected, but the line contains {type(content).__name__}")
    conversations = [Conversation(part, content.get("tools")) for part in _split(_read_messages(content))]
    for conversation in conversations:
        roles = [message["role"] for message in conversation.messages]
        if ASSISTANT not in roles:
            raise DataError(
                f"no message has the role {ASSISTANT} (roles: {', '.join(roles) or 'none'}), so there is nothing to "
                "train on"
            )
        if roles[0] == ASSISTANT:
            raise DataError(f"the first message has the role {ASSISTANT}; begin with a message that it answers")
    return conversations


def _read_messages(content: Mapping[str, Any]) -> list[Message]:
    if "messages" in content:
        return _checked(content["messages"], "messages", "role", "content")
    if "conversations" in content:
        senders = _checked(content["conversations"], "conversations", "from", "value")
        return [{"role": _role(message["from"]), "content": message["value"]} for message in senders]
    if "prompt" in content and "completion" in content:
        return [*_side(content, "prompt", "user"), *_side(content, "completion", ASSISTANT)]
    if "instruction" in content and "output" in content:
        parts = [_text(content, "instruction"), _text(content, "input") if content.get("input") else ""]
        messages = [{"role": "user", "content": "\n".join(filter(None, parts))}, *_side(content, "output", ASSISTANT)]
        return [*_side(content, "system", "system"), *messages] if content.get("system") else messages
    raise DataError(f"not a conversation: the keys are {', '.join(content) or 'none'}; use {_FORMATS}")


def _checked(messages: Any, key: str, role: str, value: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{key!r} is not a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get(role), str):
            raise DataError(f"message {number} of {key!r} has no {role!r}")
        if value not in message and not (key == "messages" and "tool_calls" in message):
            raise DataError(f"message {number} of {key!r} has no {value!r}")
    return messages


def _role(sender: str) -> str:
    if sender not in _ROLES:
        raise DataError(f"a message has the role {sender!r}; known roles are {', '.join(_ROLES)}")
    return _ROLES[sender]


def _side(content: Mapping[str, Any], key: str, role: str) -> list[Message]:
    """Return a value such as a prompt or a completion, a string or a list of messages, as messages."""
    if isinstance(content[key], list):
        return _checked(content[key], key, "role", "content")
    return [{"role": role, "content": _text(content, key)}]


def _text(content: Mapping[str, Any], key: str) -> str:
    if not isinstance(content[key], str):
        raise DataError(f"{key!r} contains {type(content[key]).__name__}; a string is expected")
    return str(content[key])


def _split(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    starts = [0, *(i for i, message in enumerate(messages) if i and message["role"] == "system"), len(messages)]
    for begin, end in itertools.pairwise(starts):
        yield tuple(messages[begin:end])


_ARRAY_BYTES: Final = 1 << 20
_BEGINNING_BYTES: Final = 4096


def is_array(beginning: bytes) -> bool:
    """Return whether a file with this beginning is a JSON array, rather than JSONL."""
    return beginning.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def json_lines(file: io.BufferedReader, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each line, for messages, and the line; an item of a JSON array is converted to a line.

    Raises:
        DataError: the file starts like a JSON array and is none; the message names the item.
    """
    is_whole = is_array(file.peek(_BEGINNING_BYTES))
    place = ", item " if is_whole else ":"
    for number, line in enumerate(array_lines(file, name) if is_whole else file, start=1):
        yield f"{name}{place}{number}", line


def array_lines(file: io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """Yield each item of a JSON array as a JSON line; only a part of the array is in memory.

    Raises:
        DataError: the file is not a JSON array in UTF-8; the message names the item.
    """
    array = _ArrayReader(file, name)
    array.skip("[")
    is_first = True
    while array.next_character() != "]":
        if not is_first:
            array.skip(",")
        is_first = False
        yield array.item()
    array.skip("]")
    if array.next_character():
        raise array.error("text follows the end of the array")


class _ArrayReader:
    """Reads the text of a JSON array in parts, and parses one item at a time."""

    def __init__(self, file: io.BufferedIOBase, name: str) -> None:
        self._file = file
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._parser = json.JSONDecoder()
        self._text, self._position, self._number = "", 0, 0

    def next_character(self) -> str:
        """Skip white space and return the next character without taking it; "" at the end of the file."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in " \t\r\n":
                    return self._text[self._position]
                self._position += 1
            if not self._read():
                return ""

    def skip(self, expected: str) -> None:
        """Take the next character.

        Raises:
            DataError: it is another one.
        """
        found = self.next_character()
        if found != expected:
            raise self.error(f"expected {expected}, found {found or 'the end of the file'}")
        self._position += 1

    def item(self) -> bytes:
        """Take the next item, and return it as a JSON line.

        Raises:
            DataError: it is not valid JSON.
        """
        self._number += 1
        self.next_character()
        while True:
            try:
                _, end = self._parser.raw_decode(self._text, self._position)
            except (ValueError, RecursionError) as error:
                if not self._read():
                    raise self.error(str(error)) from error
                continue
            if end < len(self._text) or not self._read():
                break
        item = self._text[self._position : end]
        self._position = end
        return item.replace("\r", " ").replace("\n", " ").encode() + b"\n"

    def error(self, reason: str) -> DataError:
        return DataError(f"{self._name}, item {self._number}: not a JSON array: {reason}")

    def _read(self) -> bool:
        """Read more text, twice as much for an item that is longer; return whether there was more."""
        self._text = self._text[self._position :]
        self._position = 0
        data = self._file.read(max(_ARRAY_BYTES, len(self._text)))
        try:
            self._text += self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self.error(str(error)) from error
        return bool(data)
