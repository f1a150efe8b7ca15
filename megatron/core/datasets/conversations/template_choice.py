"""Find the chat template of a run: a file, one that has a name here, or the one among the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megatron.core.datasets.conversations.chat_template import END_OF_DOCUMENT, ChatTemplate
from megatron.core.errors import DataError
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_file import read_json_object, read_text

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
