"""Requests of OpenAI's API: fields, the context's length, and text with its stops."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron.cli.text_generation_cli import describe_long_text
from megatron.core.inference.inference_request import GenerationRequest, TokenValue
from megatron.serving.openai.answer_forms import ChoiceText
from megatron.serving.openai.request_fields import ApiError, RequestFields, read_chat, read_completion
from tests.harness.mutations import VALUES, mutated_json
from tests.harness.openai_server import Served, served
from tests.unit.core.inference.small_models import odd_config

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 5, "stop": ["a"], "n": 2}
COMPLETION = {"prompt": [[1, 2], [3]], "logprobs": 1, "echo": True, "max_tokens": 0, "logit_bias": {"3": -100}}


def test_what_is_left_out_or_null_has_openais_defaults() -> None:
    assert read_completion(b'{"prompt": "a", "n": null}') == RequestFields(prompts=("a",))
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
        ({"temperature": -1}, "temperature must be a number between 0 and 100, but is -1"),
        ({"temperature": 1e-300}, "temperature must be 0, or at least 1.17549e-38"),
        ({"n": True}, "n must be an integer between 1 and 128, but is True"),
        ({"stop": ["a", ""]}, "stop must be a string or a list of at most 16 strings of 1 to 1000 characters each"),
        ({"logprobs": 21}, "logprobs must be an integer between 0 and 20, but is 21"),
        ({"logit_bias": {"x": 1}}, "logit_bias must be an object of at most 1024 token ids"),
        ({"suffix": "b"}, "suffix is not supported here; omit it"),
        ({"best_of": 3}, "best_of 3 must equal n 1, because choices are not ranked"),
        ({"max_tokens": 0}, "max_tokens 0 requires echo and logprobs"),
        ({"num_beams": 2, "temperature": 0.5}, "num_beams does not sample and does not stream; omit temperature"),
        ({"length_penalty": 0.5}, "length_penalty and early_stopping require num_beams of 2 or more"),
        ({"prompt": []}, "prompt must be a string, token ids, or a list of either, but is []"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompts x choices is 130; at most 128 is accepted"),
        ({"prompt": "\ud800"}, "prompt contains half of a surrogate pair"),
        ({"stream_options": {"include_usage": True}}, "stream_options requires stream: true"),
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
        ({"top_logprobs": 2}, "top_logprobs requires logprobs: true"),
        ({"tools": [{"type": "function"}]}, "tools is not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported here"),
        ({"echo": True}, "echo is supported only in /v1/completions"),
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


LIMIT = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model with rotary positions, which computes longer texts too."""
    folder: Path = tmp_path_factory.mktemp("model")
    with served(folder, position_embedding_type="rope", max_position_embeddings=LIMIT) as running:
        yield running


LONG_IDS = [5] * (LIMIT + 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a" * (LIMIT + 1), "max_tokens": 1}, "prompt"),
        ("completions", {"prompt": LONG_IDS, "max_tokens": 1}, "prompt"),
        ("completions", {"prompt": ["a", "b", "a" * LIMIT], "max_tokens": 1}, "prompt"),
        ("completions", {"prompt": [[5], LONG_IDS], "max_tokens": 1}, "prompt"),
        ("completions", {"prompt": "a" * (LIMIT - 3), "max_tokens": 4}, "prompt"),
        ("completions", {"prompt": "a" * LIMIT}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * LIMIT}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": LIMIT}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": LIMIT},
            "messages",
        ),
    ],
)
def test_a_request_beyond_the_context_is_400(
    server: Served, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    status, answer = server.ask("POST", f"/v1/{path}", {**body, "stream": stream})
    assert status == 400
    error = answer["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "context_length_exceeded",
        param,
    )
    assert error["message"].startswith(f"the maximum context length is {LIMIT} tokens")


def test_what_fits_is_answered_to_the_last_token(server: Served) -> None:
    assert server.ask("GET", "/v1/models")[1]["data"][0]["max_model_len"] == LIMIT
    asked = {"prompt": "a" * (LIMIT - 3), "max_tokens": 3, "ignore_eos": True}
    status, answer = server.ask("POST", "/v1/completions", asked)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    scored = {"prompt": "a" * LIMIT, "max_tokens": 0, "echo": True, "logprobs": 0}
    assert server.ask("POST", "/v1/completions", scored)[0] == 200
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "temperature": 0}
    status, answer = server.ask("POST", "/v1/chat/completions", chat)
    assert (status, answer["usage"]["total_tokens"]) == (200, LIMIT)


def test_the_default_length_fits_the_context(server: Served) -> None:
    for count, expected in ((5, 16), (LIMIT - 3, 3), (LIMIT - 1, 1)):
        asked = {"prompt": "a" * count, "ignore_eos": True}
        status, answer = server.ask("POST", "/v1/completions", asked)
        assert (status, answer["usage"]["completion_tokens"]) == (200, expected)
    status, answer = server.ask("PUT", "/api", {"prompts": ["a" * (LIMIT - 3)]})
    assert (status, len(answer["segments"][0]) <= LIMIT) == (200, True)


def test_the_model_is_described_for_the_page(server: Served) -> None:
    (about,) = server.ask("GET", "/v1/models")[1]["data"]
    count = sum(parameter.numel() for parameter in server.engine.model.parameters())
    described = {name: about[name] for name in ("max_model_len", "num_parameters", "chat_template", "mode")}
    assert described == {
        "max_model_len": LIMIT,
        "num_parameters": count,
        "chat_template": "the tokenizer's",
        "mode": "chat",
    }


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a model without a chat template, with defaults of the command's flags."""
    folder: Path = tmp_path_factory.mktemp("base")
    defaults = {"temperature": 0.0, "ignore_eos": True}
    with served(
        folder, template=None, default_new_tokens=70, defaults=defaults, max_position_embeddings=100
    ) as running:
        yield running


def test_messages_to_a_base_model_are_continued_as_text(base_model: Served) -> None:
    (about,) = base_model.ask("GET", "/v1/models")[1]["data"]
    assert (about["mode"], about["chat_template"]) == ("completion", None)
    assert about["defaults"] == {"temperature": 0.0, "ignore_eos": True}
    text = "be brief\nhello"
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES]
    _, chat = base_model.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 9})
    _, completion = base_model.ask("POST", "/v1/completions", {"prompt": text, "max_tokens": 9})
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": completion["choices"][0]["text"]}
    assert chat["usage"] == completion["usage"]


def test_the_commands_flags_are_defaults_that_a_request_replaces(base_model: Served) -> None:
    for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "hello"})):
        answers = [base_model.ask("POST", f"/v1/{path}", body)[1] for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"], "greedy"
        assert answers[0]["usage"]["completion_tokens"] == 70
        _, drawn = base_model.ask("POST", f"/v1/{path}", {**body, "temperature": 5.0, "seed": 3})
        assert drawn["choices"] != answers[0]["choices"]
    status, longest = base_model.ask("POST", "/v1/completions", {"prompt": "a" * 95})
    assert (status, longest["usage"]["completion_tokens"]) == (200, 5)


def test_megatrons_form_rejects_it_too(server: Served) -> None:
    asked = {"prompts": ["a", "a" * (LIMIT - 3)], "tokens_to_generate": 4}
    status, answer = server.ask("PUT", "/api", asked)
    assert status == 400
    assert f"the maximum context length is {LIMIT}" in json.dumps(answer)
    assert server.ask("PUT", "/api", asked | {"tokens_to_generate": 3})[0] == 200


def test_the_command_line_warns_of_a_text_beyond_the_context() -> None:
    config = odd_config(position_embedding_type="rope", max_position_embeddings=9)
    assert describe_long_text(config, GenerationRequest(prompts=((1, 2), (3,) * 5), max_new_tokens=4)) is None
    warning = describe_long_text(config, GenerationRequest(prompts=((1, 2), (3,) * 6), max_new_tokens=4))
    assert warning is not None
    assert warning.startswith("WARNING: a prompt of 6 tokens and --tokens-to-generate 4 are 10 tokens, but the model")


class Bytes:
    """A tokenizer whose ids are the bytes of UTF-8."""

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def pieces(text: ChoiceText, tokens: bytes, reason: str = "length") -> list[str]:
    """Return what is given out after each token, and at the end."""
    found = []
    for token in tokens:
        text.add(token, None)
        found.append(text.take()[0])
    text.end(reason)  # type: ignore[arg-type]
    return [*found, text.take()[0]]


def test_a_character_is_given_out_whole() -> None:
    text = ChoiceText(Bytes(), b"before ", ())  # type: ignore[arg-type]
    assert pieces(text, "aé😀b".encode()) == ["a", "", "é", "", "", "", "😀", "b", ""]
    assert text.reason == "length"


def test_what_is_no_character_is_shown_at_the_end_or_when_it_cannot_become_one() -> None:
    assert pieces(ChoiceText(Bytes(), b"", ()), b"a\xf0\x9f") == ["a", "", "", "\ufffd"]  # type: ignore[arg-type]
    assert "".join(pieces(ChoiceText(Bytes(), b"", ()), b"\xff" * 9 + b"z")).endswith("z")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stops", "expected", "reason"),
    [
        (("cd",), ["a", "b", "", "", "", ""], "stop"),
        (("cx",), ["a", "b", "", "cd", "e", ""], "length"),
        (("bcde", "d"), ["a", "", "", "bc", "", ""], "stop"),
        (("e",), ["a", "b", "c", "d", "", ""], "stop"),
        (("efg",), ["a", "b", "c", "d", "", "e"], "length"),
    ],
)
def test_a_stop_ends_the_text_and_is_not_in_it(stops: tuple[str, ...], expected: list[str], reason: str) -> None:
    text = ChoiceText(Bytes(), b"x", stops)  # type: ignore[arg-type]
    assert pieces(text, b"abcde") == expected
    assert text.reason == reason


def test_tokens_come_with_the_text_that_they_add_and_end_with_it() -> None:
    text = ChoiceText(Bytes(), b"", ("cd",))  # type: ignore[arg-type]
    text.begin_with(Bytes(), b"cd", [TokenValue(-1.0)])  # type: ignore[arg-type]
    for token in "éabcd".encode():
        text.add(token, TokenValue(-2.0))
    whole, tokens = text.take()
    assert whole == "cdéab"
    assert [(each.text, each.offset, each.value and each.value.log_probability) for each in tokens] == [
        ("c", 0, None),
        ("d", 1, -1.0),
        ("", 2, -2.0),
        ("é", 2, -2.0),
        ("a", 3, -2.0),
        ("b", 4, -2.0),
    ]
    assert (text.reason, text.num_tokens) == ("stop", 6)
