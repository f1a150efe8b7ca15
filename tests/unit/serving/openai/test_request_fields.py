"""Bodies of OpenAI's API: what is read, and what is refused in one line."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from megatron.serving.openai.request_fields import ApiError, RequestFields, read_chat, read_completion
from tests.harness.mutations import VALUES, mutated_json

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 5, "stop": ["a"], "n": 2}
COMPLETION = {"prompt": [[1, 2], [3]], "logprobs": 1, "echo": True, "max_tokens": 0, "logit_bias": {"3": -100}}


def test_what_is_left_out_or_null_has_openais_defaults() -> None:
    assert read_completion(b'{"prompt": "a", "n": null}') == RequestFields(prompts=("a",), max_tokens=16)
    assert read_chat(json.dumps({"messages": MESSAGES}).encode()) == RequestFields(messages=tuple(MESSAGES))


def test_every_form_of_a_prompt_is_taken() -> None:
    for given, expected in (("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], "b"], ((1,), "b"))):
        assert read_completion(json.dumps({"prompt": given}).encode()).prompts == expected
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert read_chat(json.dumps(body).encode()).messages == tuple(MESSAGES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 1}, "max_token is not a known field; did you mean max_tokens?"),
        ({"temperature": -1}, "temperature must be a number between 0 and 100, and is -1"),
        ({"temperature": 1e-300}, "temperature must be 0, or at least 1.17549e-38"),
        ({"n": True}, "n must be a whole number between 1 and 128, and is True"),
        ({"stop": ["a", ""]}, "stop must be a string, or a list of at most 16, of 1 to 1000 characters each"),
        ({"logprobs": 21}, "logprobs must be a whole number between 0 and 20, and is 21"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be an object of at most 1024 token ids"),
        ({"suffix": "b"}, "suffix is not supported here; leave it out"),
        ({"best_of": 3}, "best_of 3 is not n 1: choices are not ranked"),
        ({"max_tokens": 0}, "max_tokens 0 is of use with echo and logprobs only"),
        ({"num_beams": 2, "temperature": 0.5}, "num_beams draws nothing and gives whole texts: leave out temperature"),
        ({"length_penalty": 0.5}, "length_penalty and early_stopping need num_beams 2 or more"),
        ({"prompt": []}, "prompt must be a string, token ids, or a list of either, and is []"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompts x choices are 130; at most 128 are taken"),
        ({"prompt": "\ud800"}, "prompt holds half of a surrogate pair"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream true"),
    ],
)
def test_what_cannot_be_is_named_with_its_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refusal:
        read_completion(json.dumps({"prompt": "a"} | fields).encode())
    assert str(refusal.value).startswith(message)
    assert refusal.value.status == 400
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "messages must be a list of one or more objects with role and content"),
        ({"messages": [{"role": "user"}]}, "messages must be objects whose content is a string"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs true"),
        ({"tools": [{"type": "function"}]}, "tools is not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported here"),
        ({"echo": True}, "echo is of /v1/completions"),
        ({"prompt": "a"}, "prompt is not a known field"),
    ],
)
def test_a_conversation_is_checked_too(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        read_chat(json.dumps({"messages": MESSAGES} | fields).encode())


def test_whatever_a_body_holds_it_is_read_or_refused() -> None:
    random = Random(0)
    outcomes: set[bool | None] = set()
    for number in range(1500):
        read, body = ((read_completion, COMPLETION), (read_chat, CHAT))[number % 2]
        changed = mutated_json(json.dumps(body).encode(), random) if number % 3 else _one_value(random, body)
        try:
            read(changed)
            outcomes.add(None)
        except ApiError as error:
            outcomes.add("\n" in str(error))
    # Some were read, the others refused in one line each.
    assert outcomes == {None, False}


def _one_value(random: Random, body: dict[str, Any]) -> bytes:
    return json.dumps(body | {random.choice(list(body)): random.choice(VALUES)}).encode()
