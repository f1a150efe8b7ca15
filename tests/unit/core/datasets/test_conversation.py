"""Conversations: what a line may be, which tokens are learned, and templates as transformers applies them."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.chat_template import SFT_TEMPLATE, ChatTemplate, choose_template
from megatron.core.datasets.conversation import Conversation, json_lines, read_conversations
from megatron.core.datasets.conversation_file import ConversationEncoder
from megatron.core.errors import DataError
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.core.tokenizers.tokenizer import NullTokenizer
from tests.unit.core.datasets.small_chat import MARKED, TEMPLATE, write_chat_folder

TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]


def learned(encoder: ConversationEncoder, content: Any) -> list[tuple[str, str]]:
    """Return the text of each conversation of a line, and what of it is learned, other tokens as a dot."""
    spelled = encoder.tokenizer.detokenize
    found = []
    for conversation in encoder.encode_line(json.dumps(content).encode()):
        ids, mask = conversation.tokens.tolist(), conversation.loss_mask.tolist()
        parts = [spelled([token]) if counts else "." for token, counts in zip(ids, mask)]
        found.append((spelled(ids), "".join(parts)))
    return found


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "marks"])
def test_answers_alone_are_learned(tmp_path: Path, template: str) -> None:
    tokenizer = write_chat_folder(tmp_path / "model", template)
    encoder = ConversationEncoder(tokenizer, choose_template(tokenizer, None))
    assert learned(encoder, {"messages": TURNS}) == [
        ("<|system|>s<|user|>ab<|assistant|>cd<|end|><|user|>e<|assistant|>f<|end|>", "......cd<|end|>...f<|end|>")
    ]
    prompt = encoder.template.render_prompt(TURNS[:2])
    assert prompt == "<|system|>s<|user|>ab<|assistant|>"


def test_all_that_the_tokens_depend_on_is_described(tmp_path: Path) -> None:
    tokenizer = write_chat_folder(tmp_path / "model", TEMPLATE)
    template = choose_template(tokenizer, None)
    known = ConversationEncoder(tokenizer, template).describe()
    assert ConversationEncoder(tokenizer, template).describe() == known
    other = ConversationEncoder(tokenizer, ChatTemplate(MARKED, "mine", template.special_tokens)).describe()
    assert (other["tokenizer"], other["chat_template"] == known["chat_template"]) == (known["tokenizer"], False)
    tokenizer.vocab_size += 1
    larger = ConversationEncoder(tokenizer, template).describe()
    assert (larger["tokenizer"] == known["tokenizer"], larger["chat_template"]) == (False, known["chat_template"])
    tokenizer.vocab_size -= 1
    tokenizer.files[0].write_bytes(tokenizer.files[0].read_bytes() + b" ")
    assert ConversationEncoder(tokenizer, template).describe()["tokenizer"] != known["tokenizer"]


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ({"prompt": "a", "completion": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"prompt": TURNS[:2], "completion": "b"}, [("system", "s"), ("user", "ab"), ("assistant", "b")]),
        ({"instruction": "a", "output": "b"}, [("user", "a"), ("assistant", "b")]),
        ({"instruction": "a", "input": "x", "output": "b"}, [("user", "a\nx"), ("assistant", "b")]),
        (
            {"system": "s", "instruction": "a", "input": "", "output": "b"},
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            [("user", "a"), ("assistant", "b")],
        ),
    ],
)
def test_the_forms_of_a_line(content: dict[str, Any], messages: list[tuple[str, str]]) -> None:
    (conversation,) = read_conversations(json.dumps(content).encode())
    assert [(message["role"], message["content"]) for message in conversation.messages] == messages


def test_a_system_message_begins_another_conversation() -> None:
    twice = read_conversations(json.dumps({"messages": [*TURNS, *TURNS[:3]]}).encode())
    assert [len(conversation.messages) for conversation in twice] == [5, 3]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a JSON line"),
        ("[1]", "a JSON object is expected, but the line contains list"),
        ('{"text": "a"}', "the keys are text; use messages"),
        ('{"prompt": "a"}', "the keys are prompt; use messages"),
        ('{"instruction": "a"}', "the keys are instruction; use messages"),
        ('{"output": "a"}', "the keys are output; use messages"),
        ('{"conversations": [{"from": "gpt", "tool_calls": []}]}', "message 1 of 'conversations' has no 'value'"),
        ('{"messages": []}', "'messages' is not a list of messages"),
        ('{"messages": [{"content": "a"}]}', "message 1 of 'messages' has no 'role'"),
        ('{"messages": [{"role": "user"}]}', "message 1 of 'messages' has no 'content'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message has the role assistant (roles: user)"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "the first message has the role assistant"),
        ('{"conversations": [{"from": "bot", "value": "a"}]}', "a message has the role 'bot'; known roles are human"),
        ('{"prompt": 1, "completion": "a"}', "'prompt' contains int; a string is expected"),
    ],
)
def test_a_line_that_is_no_conversation_is_refused(line: str, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        read_conversations(line.encode())


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages }}\n{% for %}", "mine, line 2: "),
        ("a\n\n{{ raise_exception('no system') }}", "mine, line 3: no system"),
        ("a\n{{ messages[0].name + 1 }}", "mine, line 2: UndefinedError: "),
        ("{{ messages[0].__class__.__mro__ }}\n{{ messages.append(1) }}", "SecurityError"),
        ('{{ "text" * 10 ** 13 }}', "4 x 10000000000000 characters or items exceed the limit of"),
        ('{{ 10 ** 10 * ["item"] }}', "1 x 10000000000 characters or items exceed the limit of"),
        ("{{ 10 ** (10 ** 9) }}", "a power of 1000000000 is too large"),
        (
            "{% if add_generation_prompt %}X{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
            "up to message 3 differently if messages follow",
        ),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "differently if messages follow"),
    ],
)
def test_a_template_that_fails_names_its_line(template: str, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        ChatTemplate(template, "mine", {}).render(*read_conversations(json.dumps({"messages": TURNS}).encode()))


def test_where_a_template_is_found(tmp_path: Path) -> None:
    several = [{"name": "default", "template": "d"}, {"name": "tools", "template": "t"}]
    tokenizer = write_chat_folder(tmp_path / "model", several)  # type: ignore[arg-type]
    assert choose_template(tokenizer, None).source == "d"
    assert choose_template(tokenizer, "tools").source == "t"
    file = tmp_path / "mine.jinja"
    file.write_text("m")
    assert choose_template(tokenizer, str(file)).source == "m"
    (tmp_path / "model" / "chat_template.jinja").write_text("j")
    tokenizer = type(tokenizer)(tmp_path / "model")
    assert choose_template(tokenizer, None).source == "j"
    with pytest.raises(
        DataError, match=r"--chat-template other is neither a file nor .* known templates are default, tools, chatml"
    ):
        choose_template(tokenizer, "other")
    bare = write_chat_folder(tmp_path / "bare", None)
    assert choose_template(bare, None) is None
    fallback = choose_template(bare, None, SFT_TEMPLATE)
    assert fallback is not None
    assert (fallback.name, fallback.label) == ("the built-in template chatml, because the tokenizer has none", "chatml")
    assert fallback.source == choose_template(bare, "chatml").source
    assert choose_template(tokenizer, None, SFT_TEMPLATE).source == "j", "a tokenizer's own template is used"


ITEMS = [{"prompt": "a, ]\n[", "completion": "é"}, {"messages": [], "x": {"y": [1, "}"]}}, 7]


@pytest.mark.parametrize("num_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"ensure_ascii": False, "separators": (",", ":")}])
@pytest.mark.parametrize("beginning", ["", "\ufeff", " \n"])
def test_the_items_of_a_json_array_are_lines(
    num_bytes: int, options: dict[str, Any], beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.datasets.conversation._ARRAY_BYTES", num_bytes)
    file = io.BufferedReader(io.BytesIO((beginning + json.dumps(ITEMS, **options) + "\n").encode()))
    names, lines = zip(*json_lines(file, "talk.json"), strict=True)
    assert names == ("talk.json, item 1", "talk.json, item 2", "talk.json, item 3")
    assert [json.loads(line) for line in lines] == ITEMS
    assert all(line.count(b"\n") == 1 for line in lines)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'[{"a": 1}, {"a": ]', "talk.json, item 2: not a JSON array: Expecting value"),
        (b'[{"a": 1} {"a": 2}]', "talk.json, item 1: not a JSON array: expected ,, found {"),
        (b'[{"a": 1},', "talk.json, item 2: not a JSON array: Expecting value"),
        (b'[{"a": 1}', "talk.json, item 1: not a JSON array: expected ,, found the end of the file"),
        (b'[{"a": 1}]\n{}', "talk.json, item 1: not a JSON array: text follows the end of the array"),
        (b'[{"a": "\xe9"}]', "talk.json, item 0: not a JSON array: 'utf-8' codec can't decode byte 0xe9"),
    ],
)
def test_a_damaged_array_is_named_with_its_item(content: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        list(json_lines(io.BufferedReader(io.BytesIO(content)), "talk.json"))


def test_lines_and_an_empty_array_are_read_too() -> None:
    lines = json_lines(io.BufferedReader(io.BytesIO(b'{"a": 1}\n\n{"a": 2}')), "talk.jsonl")
    assert list(lines) == [("talk.jsonl:1", b'{"a": 1}\n'), ("talk.jsonl:2", b"\n"), ("talk.jsonl:3", b'{"a": 2}')]
    assert list(json_lines(io.BufferedReader(io.BytesIO(b" [ ] ")), "talk.json")) == []


def test_a_tokenizer_without_a_spelling_ends_answers_all_the_same(sentence_piece_file: Path) -> None:
    null = NullTokenizer(99)
    encoder = ConversationEncoder(null, choose_template(null, "plain"))
    assert learned(encoder, {"prompt": "1 2 ", "completion": "7 8"}) == [("1 2 7 8 99", "..7899")]
    identity = ConversationEncoder(null, choose_template(null, "identity"))
    assert learned(identity, {"prompt": "1 2 ", "completion": "7 8"}) == [("1 2 7 8", "..78")]
    # Llama2Tokenizer begins each text with a token: the template says whether a conversation has one.
    piece = SentencePieceTokenizer(sentence_piece_file, "Llama2Tokenizer")
    encoder = ConversationEncoder(piece, choose_template(piece, "plain"))
    (encoded,) = encoder.encode_line(b'{"prompt": "the parser", "completion": " adds"}')
    assert piece.tokenize("")[0] not in encoded.tokens
    assert encoded.tokens[-1] == piece.eod_id
    assert encoded.loss_mask[-1] == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(DataError, match=r"the chat template mine needs the package jinja2.* pip install jinja2"):
        ChatTemplate("", "mine", {})


def test_a_template_that_writes_without_end_is_stopped() -> None:
    loop = "{% for i in range(90000) %}{{ block }}{% endfor %}"
    template = "{% set block = 'x' * 4000000 %}" + loop
    with pytest.raises(DataError, match="the text of one conversation is longer than 67108864 characters"):
        ChatTemplate(template, "mine", {}).render(*read_conversations(json.dumps({"messages": TURNS}).encode()))


@pytest.mark.parametrize("character", ["\ufdd0", "\ufdd1", "\ufdd2"])
def test_a_message_with_a_reserved_character_is_rejected(character: str) -> None:
    """A template's own marks of answers are these characters."""
    message = {"role": "user", "content": f"a{character}b"}
    conversation = read_conversations(json.dumps({"messages": [message, TURNS[2]]}).encode())
    for template in (TEMPLATE, MARKED):
        with pytest.raises(
            DataError, match=("a message contains one of the noncharacters U\\+FDD0, U\\+FDD1 and U\\+FDD2")
        ):
            ChatTemplate(template, "mine", {}).render(*conversation)
        with pytest.raises(DataError, match="a message contains one of the noncharacters"):
            ChatTemplate(template, "mine", {}).render_prompt([message])


def test_the_place_of_a_tokenizer_does_not_matter_and_its_arguments_do(tmp_path: Path) -> None:
    described = []
    for folder, extra in (("a", 0), ("b", 0), ("b", 5)):
        tokenizer = write_chat_folder(tmp_path / folder)
        size = tokenizer.vocab_size
        tokenizer = HuggingFaceTokenizer(tmp_path / folder, extra_vocab_size=extra)
        tokenizer.vocab_size = size
        described.append(ConversationEncoder(tokenizer, choose_template(tokenizer, None)).describe()["tokenizer"])
    assert described[0] == described[1] != described[2]


def test_templates_that_are_none_are_passed_over(tmp_path: Path) -> None:
    write_chat_folder(tmp_path / "model")
    entries = [3, {"name": "default"}, {"name": "default", "template": 5}, {"name": "default", "template": MARKED}]
    (tmp_path / "model/tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": entries})
    )
    assert choose_template(HuggingFaceTokenizer(tmp_path / "model"), None).source == MARKED


def test_an_answer_may_be_a_call_of_a_tool() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    (conversation,) = read_conversations(json.dumps({"messages": [TURNS[1], call]}).encode())
    assert conversation.messages[1] == call


def test_answers_are_found_where_the_text_goes_on_otherwise_than_the_prompt(tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{ '<|assistant|>' }}", "{{ '<|assistant|>~' }}")
    tokenizer = write_chat_folder(tmp_path / "model", template)
    encoder = ConversationEncoder(tokenizer, choose_template(tokenizer, None))
    # The message after an answer is none of it.
    assert learned(encoder, {"messages": TURNS[1:4]}) == [
        ("<|user|>ab<|assistant|>cd<|end|><|user|>e", "....cd<|end|>..")
    ]


def test_a_token_across_the_beginning_of_an_answer_is_learned(tmp_path: Path) -> None:
    write_chat_folder(tmp_path / "model")
    path = tmp_path / "model/tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["bc"] = 200
    content["model"]["merges"] = [["b", "c"]]
    path.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(tmp_path / "model")
    encoder = ConversationEncoder(tokenizer, choose_template(tokenizer, "identity"))
    assert learned(encoder, {"prompt": "xab", "completion": "cd"}) == [("xabcd", "..bcd")]


def test_a_template_sees_the_special_tokens_of_the_files_alone(tmp_path: Path) -> None:
    settings = {"eos_token": "<|end|>", "pad_token": {"content": "<|user|>"}, "bos_token": None, "chat_template": "x"}
    write_chat_folder(tmp_path / "model")
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(settings))
    template = choose_template(HuggingFaceTokenizer(tmp_path / "model"), None)
    assert template.special_tokens == {"eos_token": "<|end|>", "pad_token": "<|user|>"}


@pytest.mark.parametrize(
    ("source", "length", "problem"),
    [
        ("{{ 'x' * 60 }}{{ 'y' * 40 }}", 100, None),
        ("{{ 'x' * 60 }}{{ 'y' * 41 }}", 0, "the text of one conversation is longer than 100 characters"),
        ("{{ 'xy' * 50 }}", 100, None),
        ("{{ ('xy' * 51) | length }}", 0, "2 x 51 characters or items exceed the limit of 100"),
        ("{{ (50 * 'xy') | length }}", 3, None),
        ("{{ 3 ** 50 }}", 24, None),
        ("{{ 3 ** 51 }}", 0, "a power of 51 is too large"),
        ("{{ 4 ** 0.5 }}{{ 3 * 100 }}", 6, None),
    ],
)
def test_a_template_makes_no_more_than_it_may(source: str, length: int, problem: str | None, monkeypatch) -> None:
    monkeypatch.setattr("megatron.core.datasets.chat_template._LONGEST", 100)
    template = ChatTemplate(source, "mine", {})
    if problem is None:
        assert len(template.render_prompt(TURNS)) == length
    else:
        with pytest.raises(DataError, match=re.escape(problem)):
            template.render_prompt(TURNS)


def test_the_spelling_of_an_end_may_follow_a_token_that_begins_every_text(tmp_path: Path, monkeypatch) -> None:
    tokenizer = write_chat_folder(tmp_path / "model")
    for ids, spelling in (([5, tokenizer.eod_id], "<|end|>"), ([tokenizer.eod_id, 5], "\ufdd2")):
        monkeypatch.setattr(tokenizer, "tokenize", lambda text, ids=ids: ids)
        assert choose_template(tokenizer, None).special_tokens["eos_token"] == spelling


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
