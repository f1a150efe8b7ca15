"""Find the chat template of a run, render conversations with it, and locate the answers in the text.

The template comes from a file, from `NAMED_TEMPLATES`, or from the tokenizer's files.
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
"""Placeholder in rendered text for the end-of-document token if the tokenizer has no spelling for it."""
_BEGIN, _END = "\ufdd0", "\ufdd1"
# The three code points are Unicode noncharacters: the text of a conversation must not contain them.
_RESERVED: Final = re.compile(f"[{_BEGIN}{_END}{END_OF_DOCUMENT}]")
_GENERATION: Final = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_FILE: Final = "<template>"
_LONGEST: Final = 2**26
"""Limit on the characters of one rendered conversation: more than any context length, in little memory."""


@dataclass(frozen=True)
class RenderedConversation:
    """Text of a conversation, and the start and end offset of each answer in it."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Jinja chat template in a sandbox that reads no files, modifies no values and limits the output's length.

    A template has the variables of Hugging Face chat templates: ``messages``, ``tools``, ``add_generation_prompt``,
    the special tokens by name, ``raise_exception``, ``strftime_now`` and ``tojson``. The text between
    ``{% generation %}`` and ``{% endgeneration %}`` is the answer. A template without these tags is rendered once up to
    each answer and once including it; the difference is the answer.

    ``name`` is for messages. ``label`` is short, contains no path, and is shown to the clients of a server.

    Raises:
        DataError: the package jinja2 is missing, or the template has a syntax error; the message names the line.
    """

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str], label: str = "") -> None:
        self.name = name
        self.label = label or name
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
            # Replace the generation tags by a filter block on the same line.
            marked = _GENERATION.sub(lambda m: f"{m[1]}{'endfilter' if m[2] else 'filter answer'}{m[3]}", source)
            self._template = environment.from_string(marked)
        except Exception as error:
            if not hasattr(error, "lineno"):
                raise
            raise DataError(f"{name}, line {error.lineno}: {error}") from error

    def render(self, conversation: Conversation) -> RenderedConversation:
        """Render a conversation to text and locate its answers.

        Raises:
            DataError: the template fails (the message names the line), or the answers cannot be located.
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
        """Render messages to a prompt that ends where the assistant's answer starts.

        Raises:
            DataError: the template fails.
        """
        conversation = Conversation(tuple(messages))
        _refuse_reserved(conversation)
        text = self._fill(messages, conversation, add_generation_prompt=True)
        return _take_marks(text).text

    def _begin(self, conversation: Conversation, number: int, text: str) -> int:
        """Return the start offset of an answer: the end of the generation prompt."""
        before = conversation.messages[:number]
        begin = _common_length(self._fill(before, conversation, add_generation_prompt=True), text)
        if begin < _common_length(self._fill(before, conversation).rstrip(), text):
            self._refuse_changed_beginning(number)
        return begin

    def _end(self, conversation: Conversation, number: int, text: str) -> int:
        """Return the end offset of an answer. The last answer includes the text at the end of the template."""
        if number == len(conversation.messages) - 1:
            return len(text)
        through = self._fill(conversation.messages[: number + 1], conversation)
        end = _common_length(through, text)
        if through[end:].strip() not in ("", self.special_tokens.get("eos_token")):
            self._refuse_changed_beginning(number)
        return end

    def _refuse_changed_beginning(self, number: int) -> NoReturn:
        raise DataError(
            f"{self.name} renders the conversation up to message {number + 1} differently if messages follow, so the "
            "answers cannot be located; mark them in the template with {% generation %} … {% endgeneration %}, or "
            "use conversations with one answer"
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
        raise DataError("a message contains one of the noncharacters U+FDD0, U+FDD1 and U+FDD2; remove it")


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
            raise DataError(f"{len(repeated)} x {times} characters or items exceed the limit of {_LONGEST}")
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
"""Built-in templates. ``plain`` ends each answer with the end-of-document token."""

TEMPLATE_FILE: Final = "chat_template.jinja"
_SETTINGS_FILES: Final = ("tokenizer_config.json", "chat_template.json")
_TOKEN_FILES: Final = ("special_tokens_map.json", "tokenizer_config.json")


SFT_TEMPLATE: Final = "chatml"
"""Built-in template of fine-tuning with a tokenizer that has no template."""


@dataclass(frozen=True)
class TemplateSource:
    """Source of a chat template, its name for messages, and its short label."""

    text: str
    name: str
    label: str


def find_template(tokenizer: Tokenizer, choice: str | None, fallback: str | None = None) -> TemplateSource | None:
    """Return the template with the file name or template name ``choice``, or the tokenizer's template if it is None.

    If ``choice`` is None and the tokenizer's files hold no template, return the built-in template ``fallback``, or
    None without it.

    Raises:
        DataError: the template does not exist; the message lists the available templates.
    """
    own = _own_templates(tokenizer)
    if choice is not None and Path(choice).is_file():
        return TemplateSource(read_text(Path(choice)), choice, Path(choice).name)
    name = choice or "default"
    if name in own:
        place, text = own[name]
        return TemplateSource(text, place, "the tokenizer's" if choice is None else name)
    if name in NAMED_TEMPLATES:
        return TemplateSource(NAMED_TEMPLATES[name], f"the template {name}", name)
    if choice is not None:
        there = ", ".join(dict.fromkeys((*own, *NAMED_TEMPLATES)))
        raise DataError(f"--chat-template {choice} is neither a file nor a known template; known templates are {there}")
    if fallback is None:
        return None
    name = f"the built-in template {fallback}, because the tokenizer has none"
    return TemplateSource(NAMED_TEMPLATES[fallback], name, fallback)


def choose_template(tokenizer: Tokenizer, choice: str | None, fallback: str | None = None) -> ChatTemplate | None:
    """Return the template that `find_template` finds, ready to render.

    Raises:
        DataError: the template does not exist, has a syntax error, or jinja2 is missing.
    """
    found = find_template(tokenizer, choice, fallback)
    return None if found is None else ChatTemplate(found.text, found.name, _special_tokens(tokenizer), found.label)


def _own_templates(tokenizer: Tokenizer) -> dict[str, tuple[str, str]]:
    """Return the templates in the tokenizer's files by name: a description for messages, and the source."""
    found: dict[str, tuple[str, str]] = {}
    files = {path.name: path for path in tokenizer.files}
    for name in _SETTINGS_FILES:
        entry: Any = read_json_object(files[name]).get("chat_template") if name in files else None
        named = [{"name": "default", "template": entry}] if isinstance(entry, str) else entry
        for item in named if isinstance(named, list) else ():
            if isinstance(item, dict) and isinstance(item.get("template"), str):
                key = str(item.get("name", "default"))
                found.setdefault(key, (f"chat_template of {files[name]}", item["template"]))
    if TEMPLATE_FILE in files:
        found["default"] = (str(files[TEMPLATE_FILE]), read_text(files[TEMPLATE_FILE]))
    return found


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens by the names that templates use.

    ``eos_token`` always encodes to the end-of-document token. If its spelling is unknown, or does not encode to that
    token, it is `END_OF_DOCUMENT`.
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
