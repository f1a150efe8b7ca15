"""Chat templates give the text, the tokens and the masks that the package transformers gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.chat_template import choose_template
from megatron.core.datasets.conversation import Conversation
from megatron.core.datasets.conversation_file import ConversationEncoder
from tests.unit.core.datasets.conversations.small_chat import MARKED, write_chat_folder

EVERYTHING = """{#- Tools, dates, loops that end early, and blocks on lines of their own. -#}
{%- if tools is defined and tools %}
    {{- '<|system|>' + (tools | tojson(indent=1)) }}
{%- endif %}
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'tool' %}
        {% continue %}
    {% endif %}
    {%- set ns.count = ns.count + 1 %}
{{ '<|' ~ message['role'] ~ '|>' ~ message.content | trim }}{{ eos_token if message.role == 'assistant' }}

{% endfor %}
{{- ns.count }}{{ strftime_now('%Y') }}{{ undefined_name }}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": ' be <kind> & "brief" '},
    {"role": "user", "content": "ab"},
    {"role": "tool", "content": "x"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e\n"},
    {"role": "assistant", "content": "f"},
]
TOOLS = [{"name": "<look>", "parameters": {"é": 1}}]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the optional package transformers is absent")


@pytest.mark.parametrize("prompts", [False, True])
def test_the_text_is_the_same(transformers: Any, tmp_path: Path, prompts: bool) -> None:
    template = choose_template(write_chat_folder(tmp_path, EVERYTHING), None)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    for tools in (None, TOOLS):
        ours = template._fill(MESSAGES, Conversation(tuple(MESSAGES), tools), add_generation_prompt=prompts)
        assert ours == theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=prompts)


def test_tokens_and_masks_are_the_same(transformers: Any, tmp_path: Path) -> None:
    tokenizer = write_chat_folder(tmp_path, MARKED)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    encoder = ConversationEncoder(tokenizer, choose_template(tokenizer, None))
    (ours,) = encoder.encode_line(json.dumps({"messages": MESSAGES}).encode())
    expected = theirs.apply_chat_template(MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert ours.tokens.tolist() == expected["input_ids"]
    assert ours.loss_mask.tolist() == expected["assistant_masks"]
