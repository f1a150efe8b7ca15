"""Requests that are longer than the model's context are rejected, whatever its positions are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.text_generation_cli import describe_long_text
from megatron.core.inference.inference_request import GenerationRequest
from tests.harness.openai_server import Served, served
from tests.unit.core.inference.small_models import odd_config

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
        ("completions", {"prompt": "a" * (LIMIT - 3)}, "prompt"),
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
    assert warning.startswith("WARNING: a prompt of 6 tokens and --tokens-to-generate 4 are 10 tokens, and the model")
