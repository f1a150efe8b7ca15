"""Read conversations from JSONL: messages, prompt and completion, or instruction, input and output."""

from __future__ import annotations

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
        is_array = line.lstrip().startswith(b"[")
        advice = "; write one object per line, as jq -c '.[]' does for an array" if is_array else ""
        raise DataError(f"not a JSON line: {error}{advice}") from error
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
