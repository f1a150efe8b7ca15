"""Whatever a client sends, it gets one line and a status, and the server stays as it was."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from megatron.core.inference.inference_request import Continuation, NewToken, PromptEnded, PromptSearched
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.serving.job_queue import Job
from megatron.serving.text_generation_server import ApiTranslator, BadRequest, GenerationServer, read_body
from tests.harness.bounded import bad_cases
from tests.harness.mutations import VALUES, mutated_json
from tests.unit.core.inference.small_models import odd_config

BODY = {"prompts": ["1 2", "3"], "tokens_to_generate": 3, "temperature": 1.0, "top_k": 2, "top_p": 0.5}
FIELDS = (
    *(
        "logprobs",
        "top_p_decay",
        "top_p_bound",
        "add_BOS",
        "stop_on_double_eol",
        "stop_on_eol",
        "random_seed",
        "no_log",
    ),
    *("prevent_newline_after_colon", "stop_token", "no_repeat_ngram_size", "beam_width", "length_penalty"),
)


@pytest.fixture(scope="module")
def translator() -> ApiTranslator:
    tokenizer = NullTokenizer(vocab_size=98)
    config = odd_config(vocab_size=tokenizer.vocab_size, max_position_embeddings=90)
    return ApiTranslator(tokenizer, config, max_tokens=300, max_batch_size=4)


@pytest.fixture(scope="module")
def server(translator: ApiTranslator) -> Iterator[GenerationServer]:
    """A server whose model continues each prompt with a 7."""
    server = GenerationServer("127.0.0.1", 0)
    server.start(translator, seed=1)

    def answer() -> None:
        begun: list[Job] = []
        while True:
            server.jobs.take(lambda: True, begun.append, 0.1)
            for job in begun:
                prompts = range(len(job.request.prompts))
                job.listener(
                    [each for n in prompts for each in (NewToken(n, 7, None), PromptEnded(n, "length"))]
                    if job.request.beams is None
                    else [PromptSearched(n, Continuation(tokens=[7])) for n in prompts]
                )
                server.jobs.finish([job.number])
            begun.clear()

    threading.Thread(target=answer, daemon=True).start()
    yield server
    server.stop(1.0)


def send(server: GenerationServer, data: bytes) -> bytes:
    """Send bytes and return all that is answered."""
    with socket.create_connection(server.server_address[:2], timeout=20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answered = b""
        while part := connection.recv(65536):
            answered += part
    return answered


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ("Content-Length: " + "9" * 5000, 413, "at most 16777216 bytes are accepted"),
        ("Content-Length: 99999999", 413, "at most 16777216 bytes are accepted"),
        ("Content-Length: -5", 400, "Content-Length -5 is not a number of bytes"),
        ("Content-Length: 0x10", 400, "Content-Length 0x10 is not a number of bytes"),
        ("Content-Length: \u00b2", 400, "is not a number of bytes"),
        ("Content-Length: 2\r\nContent-Length: 3", 400, "Content-Length 2, 3 is not a number of bytes"),
        ("Transfer-Encoding: chunked", 400, "Transfer-Encoding is not supported"),
        ("Accept: */*", 411, "send a Content-Length"),
    ],
)
def test_a_length_that_is_none_is_refused(headers: str, status: int, message: str, server: GenerationServer) -> None:
    answered = send(server, f"PUT /api HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode("latin-1"))
    assert answered.startswith(f"HTTP/1.1 {status} ".encode())
    assert message in json.loads(answered.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    "body",
    [
        *(
            b"[" * 100_000,
            b"{" * 5000,
            b'{"a":' * 5000,
            b"9" * 5000,
            b'{"top_k": ' + b"9" * 5000 + b"}",
            b"",
            b"\xff\xfe",
        ),
        *("{}".encode("utf-16"), "{}".encode("utf-32"), b"\x00", b'{"prompts": ["\\ud800"]}', b"NaN", b"-", b'"' * 999),
    ],
)
def test_a_body_that_is_none_is_refused(body: bytes, server: GenerationServer) -> None:
    answered = send(server, b"PUT /api HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert isinstance(json.loads(answered.partition(b"\r\n\r\n")[2]), str)


def test_the_server_still_answers(server: GenerationServer) -> None:
    body = json.dumps(BODY).encode()
    answered = send(server, b"PUT /api HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answered.partition(b"\r\n\r\n")[2])["text"] == ["1 2 7", "3 7"]


def read_mutated(translator: ApiTranslator, number: int) -> None:
    """Read a mutated request as the server does."""
    draw = Random(f"request {number}")
    body: dict[str, Any] = dict(BODY)
    for name in draw.sample(FIELDS, draw.randint(0, 3)):
        body[name] = draw.choice(VALUES)
    message = "none"
    try:
        translator.generation_request(read_body(mutated_json(json.dumps(body).encode(), draw)), 1)
    except BadRequest as error:
        message = str(error)
    assert 0 < len(message) < 1000


def test_mutated_requests_are_read_or_refused(translator: ApiTranslator) -> None:
    assert bad_cases(functools.partial(read_mutated, translator), 1000) == []


@pytest.mark.long
def test_ten_thousand_mutated_requests_are_read_or_refused(translator: ApiTranslator) -> None:
    assert bad_cases(functools.partial(read_mutated, translator), 10_000) == []
