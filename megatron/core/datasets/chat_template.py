"""Find the chat template of a run, render conversations with it, and locate the answers in the text.

The template is a file, a named template of this module, or the template in the tokenizer's files.
"""

from __future__ import annotations

import datetime
import json
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from megatron.core.datasets.conversation import ASSISTANT, Conversation, Message
from megatron.core.errors import DataError, InputError
from megatron.core.tokenizers import Tokenizer, load_package, read_json_object, read_text

END_OF_DOCUMENT: Final = "\ufdd2"
"""Stands in a rendered text for the tokenizer's end-of-document token where no spelling gives it."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
# None of the three is a character: no text of a conversation may hold them.
_RESERVED: Final = re.compile(f"[{_BEGIN}{_END}{END_OF_DOCUMENT}]")
_GENERATION: Final = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_FILE: Final = "<template>"
_LONGEST: Final = 2**26
"""Characters that a template may make of one conversation: more than any context, and little memory."""


@dataclass(frozen=True)
class RenderedConversation:
    """Hold a conversation's text, and where its answers begin and end in it."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Render with a Jinja template in a sandbox, which reads no files, changes no values and makes no endless text.

    A template sees what those of Hugging Face's models see: ``messages``, ``tools``, ``add_generation_prompt``, the
    special tokens by name, ``raise_exception``, ``strftime_now`` and ``tojson``. What it has between
    ``{% generation %}`` and ``{% endgeneration %}`` is the answer; a template without these marks is rendered up to
    each answer, and through it, and the answer is what lies between.

    Raises:
        DataError: the package jinja2 is missing, or the template has a mistake; the message names its line.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str]) -> None:
        self.name = name
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._has_marks = _GENERATION.search(source) is not None
        sandbox = load_package("jinja2.sandbox", f"the chat template {name}", DataError)
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.filters["answer"] = lambda text: f"{_BEGIN}{text}{_END}"
        environment.intercepted_binops = frozenset(("*", "**"))
        environment.binop_table.update({"*": _product, "**": _power})
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            # A filter block takes the marks' place, on the same line.
            marked = _GENERATION.sub(lambda m: f"{m[1]}{'endfilter' if m[2] else 'filter answer'}{m[3]}", source)
            self._template = environment.from_string(marked)
        except Exception as error:
            if not hasattr(error, "lineno"):
                raise
            raise DataError(f"{name}, line {error.lineno}: {error}") from error

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Return the text of a conversation and its answers.

        Raises:
            DataError: the template fails (its line is named), or its text does not show where the answers are.
        """
        _refuse_reserved(conversation)
        text = self._fill(conversation.messages, conversation)
        if self._has_marks:
            return _take_marks(text)
        answers = [
            (self._begin(conversation, number, text), self._end(conversation, number, text))
            for number, message in enumerate(conversation.messages)
            if message["role"] == ASSISTANT
        ]
        return RenderedConversation(text, tuple(answers))

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Return the text that the assistant goes on from.

        Raises:
            DataError: the template fails.
        """
        conversation = Conversation(tuple(messages))
        _refuse_reserved(conversation)
        text = self._fill(messages, conversation, add_generation_prompt=True)
        return _take_marks(text).text

    def _begin(self, conversation: Conversation, number: int, text: str) -> int:
        """Return where an answer begins: behind all that invites it."""
        before = conversation.messages[:number]
        begin = _common_length(self._fill(before, conversation, add_generation_prompt=True), text)
        if begin < _common_length(self._fill(before, conversation).rstrip(), text):
            self._refuse_changed_beginning(number)
        return begin

    def _end(self, conversation: Conversation, number: int, text: str) -> int:
        """Return where an answer ends; only the last one has what the template writes at the end of all."""
        if number == len(conversation.messages) - 1:
            return len(text)
        through = self._fill(conversation.messages[: number + 1], conversation)
        end = _common_length(through, text)
        if through[end:].strip() not in ("", self.special_tokens.get("eos_token")):
            self._refuse_changed_beginning(number)
        return end

    def _refuse_changed_beginning(self, number: int) -> NoReturn:
        raise DataError(
            f"{self.name} renders the conversation up to message {number + 1} differently if messages follow, so that "
            "the answers cannot be found; mark them in the template with {% generation %} … {% endgeneration %}, or "
            "give conversations with one answer"
        )

    def _fill(
        self, messages: Sequence[Message], conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            text = _joined(
                self._template.generate(
                    **self.special_tokens,
                    messages=list(messages),
                    tools=conversation.tools,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except Exception as error:
            frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
            line = f", line {frames[-1]}" if frames else ""
            said = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            raise DataError(f"{self.name}{line}: {said}") from error
        return text


def _refuse_reserved(conversation: Conversation) -> None:
    if _RESERVED.search(json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)):
        raise DataError("a message holds one of the noncharacters U+FDD0, U+FDD1 and U+FDD2; take it out")


def _take_marks(text: str) -> RenderedConversation:
    answers: list[tuple[int, int]] = []
    clean = ""
    begin = 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN:
            begin = len(clean)
        elif part == _END:
            answers.append((begin, len(clean)))
        else:
            clean += part
    return RenderedConversation(clean, tuple(answers))


def _common_length(left: str, right: str) -> int:
    if right.startswith(left):
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def _joined(parts: Iterable[str]) -> str:
    found, length = [], 0
    for part in parts:
        found.append(part)
        length += len(part)
        if length > _LONGEST:
            raise DataError(f"the text of one conversation is longer than {_LONGEST} characters")
    return "".join(found)


def _product(left: Any, right: Any) -> Any:
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, (str, list, tuple)) and isinstance(times, int) and len(repeated) * times > _LONGEST:
            raise DataError(f"{len(repeated)} x {times} characters or items are more than {_LONGEST}")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _LONGEST:
        raise DataError(f"a power of {exponent} is too large")
    return base**exponent


def _refuse(message: str) -> NoReturn:
    raise DataError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


NAMED_TEMPLATES: Final[Mapping[str, str]] = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "identity": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
"""Templates that no file is needed for. ``plain`` ends each answer with the end of a document."""

_TEMPLATE_FILE: Final = "chat_template.jinja"
_SETTINGS_FILES: Final = ("tokenizer_config.json", "chat_template.json")
_TOKEN_FILES: Final = ("special_tokens_map.json", "tokenizer_config.json")


def choose_template(tokenizer: Tokenizer, choice: str | None, flag: str = "--chat-template") -> ChatTemplate:
    """Return the template that ``choice`` names, a file or a name; the tokenizer's own without one.

    ``flag`` is what the reader of the message can give one with.

    Raises:
        DataError: there is none of that name, or none at all; the message says which there are.
    """
    own = _own_templates(tokenizer)
    tokens = _special_tokens(tokenizer)
    if choice is not None and Path(choice).is_file():
        return ChatTemplate(read_text(Path(choice)), choice, tokens)
    name = choice or "default"
    if name in own:
        place, source = own[name]
        return ChatTemplate(source, place, tokens)
    if name in NAMED_TEMPLATES:
        return ChatTemplate(NAMED_TEMPLATES[name], f"the template {name}", tokens)
    there = ", ".join(dict.fromkeys((*own, *NAMED_TEMPLATES)))
    if choice is None:
        raise DataError(
            f"the tokenizer's files hold no chat template ({_TEMPLATE_FILE}, or chat_template in "
            f"{_SETTINGS_FILES[0]}); give {flag} a file, or one of {there}"
        )
    raise DataError(f"--chat-template {choice} is no file and no template that is known; known are {there}")


def _own_templates(tokenizer: Tokenizer) -> dict[str, tuple[str, str]]:
    """Return the templates in the tokenizer's files by name: what to call each in a message, and its text."""
    found: dict[str, tuple[str, str]] = {}
    files = {path.name: path for path in tokenizer.files}
    for name in _SETTINGS_FILES:
        entry: Any = read_json_object(files[name]).get("chat_template") if name in files else None
        named = [{"name": "default", "template": entry}] if isinstance(entry, str) else entry
        for item in named if isinstance(named, list) else ():
            if isinstance(item, dict) and isinstance(item.get("template"), str):
                key = str(item.get("name", "default"))
                found.setdefault(key, (f"chat_template of {files[name]}", item["template"]))
    if _TEMPLATE_FILE in files:
        found["default"] = (str(files[_TEMPLATE_FILE]), read_text(files[_TEMPLATE_FILE]))
    return found


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens by name, as templates write them.

    ``eos_token`` always ends a document: where its spelling is only text, or is not told, a sign stands for it.
    """
    tokens: dict[str, str] = {}
    files = {path.name: path for path in tokenizer.files}
    for name in _TOKEN_FILES:
        for key, entry in read_json_object(files[name]).items() if name in files else ():
            text = entry.get("content") if isinstance(entry, dict) else entry
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    if tokenizer.eod_id is not None:
        spelling = tokens.get("eos_token")
        if spelling is None or tokenizer.tokenize(spelling)[-1:] != [tokenizer.eod_id]:
            tokens["eos_token"] = END_OF_DOCUMENT
    return tokens
