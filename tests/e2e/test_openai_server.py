"""OpenAI's API as its clients use it, and its page in a real browser engine."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron.cli import chat, text_generation_cli
from megatron.cli.terminal import printable
from megatron.core.inference.inference_request import GenerationRequest, StopRule
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.serving.job_queue import Job
from megatron.serving.openai import http_server
from megatron.serving.openai.guard import Limits
from megatron.serving.openai.translator import COMPLETION_MODE
from tests.e2e.test_text_generation import GPT2_SHAPE, expected_text, save
from tests.harness.browser import browse, require_browser
from tests.harness.openai_server import NAME, Served, served
from tests.unit.core.datasets.small_chat import write_chat_folder

pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

GREEDY = SamplingConfig(greedy=True)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer secret\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served"), max_rows=64) as running:
        yield running


def client_of(server: Served) -> Any:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def alone(server: Served, prompt: str, count: int, sampling: SamplingConfig = GREEDY, copies: int = 1) -> list[str]:
    """Return what the engine gives by itself."""
    eod = server.tokenizer.eod_id
    request = GenerationRequest(
        prompts=(tuple(server.tokenizer.tokenize(prompt)),) * copies,
        max_new_tokens=count,
        sampling=sampling,
        stop=StopRule(end_tokens=frozenset(() if eod is None else (eod,))),
    )
    return [server.tokenizer.detokenize(each.tokens) for each in server.engine.generate(request)]


def events(text: str) -> list[Any]:
    """Return the chunks of a stream, which must have ended."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def until(condition: Any) -> None:
    """Wait for what must come to be."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "it has not come to be"
        time.sleep(0.01)


@pytest.mark.default
def test_the_openai_client_completes_and_chats(server: Served) -> None:
    client = client_of(server)
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    given = client.completions.create(model=NAME, prompt=["once", "up"], max_tokens=9, temperature=0)
    assert [choice.text for choice in given.choices] == [*alone(server, "once", 9), *alone(server, "up", 9)]
    assert given.usage.prompt_tokens == 6
    assert given.usage.total_tokens == 6 + given.usage.completion_tokens
    drawn = client.completions.create(model=NAME, prompt="on", max_tokens=12, n=3, seed=5, temperature=1.5, top_p=0.9)
    expected = alone(server, "on", 12, SamplingConfig(temperature=1.5, top_p=0.9, seed=5), copies=3)
    assert [choice.text for choice in drawn.choices] == expected

    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (expected_answer,) = alone(server, "<|system|>be brief<|user|>hi<|assistant|>", 8)
    answer = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == expected_answer
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == expected_answer
    assert [entry.top_logprobs[0].logprob for entry in entries] == [entry.logprob for entry in entries]

    chunks = list(
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected_answer
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    stream = client.completions.create(
        model=NAME, prompt="once", max_tokens=9, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].text for part in parts) == alone(server, "once", 9)[0]
    assert last.usage.prompt_tokens == 4

    import openai

    with pytest.raises(openai.NotFoundError, match="the model 'gpt-4' does not exist here; use 'tiny'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="the maximum context length is 500") as refusal:
        client.completions.create(model=NAME, prompt="a", max_tokens=500)
    assert refusal.value.code == "context_length_exceeded"


def test_scores_of_a_prompt_are_told_as_evaluations_ask_for_them(server: Served) -> None:
    """As lm-eval does: token ids, echo, one token more, and whether the likeliest value is the token's own."""
    ids = server.tokenizer.tokenize("evaluate this")
    body = {"model": NAME, "prompt": [ids, ids[:5]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    status, given = server.ask("POST", "/v1/completions", body | {"seed": 1234})
    assert status == 200
    request = GenerationRequest(prompts=(tuple(ids), tuple(ids[:5])), max_new_tokens=1, log_probabilities=True)
    for choice, known in zip(given["choices"], server.engine.generate(request), strict=True):
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        length = len(known.log_probabilities)
        assert found["token_logprobs"][1:length] == pytest.approx(known.log_probabilities[: length - 1])
        assert "".join(found["tokens"]) == choice["text"]
        assert [choice["text"][at:].startswith(each) for at, each in zip(found["text_offset"], found["tokens"])]
        for value, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
            assert value <= max(top.values())
            assert value in top.values()
        # The new token is the likeliest: the two numbers are the same, bit by bit.
        assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())
    status, given = server.ask(
        "POST", "/v1/completions", {"prompt": "ab", "max_tokens": 0, "logprobs": 0, "echo": True}
    )
    assert (status, given["choices"][0]["text"], given["usage"]["completion_tokens"]) == (200, "ab", 0)
    assert given["choices"][0]["logprobs"]["top_logprobs"] is None


def test_stops_penalties_biases_and_beams_count(server: Served) -> None:
    (text,) = alone(server, "tell", 20)
    body = {"prompt": "tell", "max_tokens": 20, "temperature": 0}
    choice = server.ask("POST", "/v1/completions", body | {"stop": [text[2:4], "never"]})[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[2:4])], "stop")
    status, content = server.ask("POST", "/v1/completions", body | {"stop": text[2:4], "stream": True})
    parts = [chunk["choices"][0] for chunk in events(content)]
    assert ("".join(part["text"] for part in parts), parts[-1]["finish_reason"]) == (choice["text"], "stop")
    forced = server.ask("POST", "/v1/completions", body | {"logit_bias": {"65": 100}})[1]["choices"][0]
    assert forced["text"] == "A" * 20
    penalized = server.ask(
        "POST", "/v1/completions", body | {"logit_bias": {"65": 10, "66": 9.5}, "frequency_penalty": 2}
    )[1]
    assert penalized["choices"][0]["text"] not in ("", "A" * 20)
    again = server.ask("POST", "/v1/completions", body | {"repetition_penalty": 50.0})[1]["choices"][0]["text"]
    assert again == alone(server, "tell", 20, SamplingConfig(greedy=True, repetition_penalty=50.0))[0] != text
    beams = server.ask("POST", "/v1/completions", {"prompt": "tell", "max_tokens": 6, "num_beams": 3, "n": 2})[1]
    status, own = server.ask("PUT", "/api", {"prompts": ["tell"], "tokens_to_generate": 6, "beam_width": 3})
    assert (status, ["tell" + choice["text"] for choice in beams["choices"]]) == (200, own["text"][:2])
    drawn = server.ask("PUT", "/api", {"prompts": ["tell", "me"], "tokens_to_generate": 20, "top_k": 1})[1]["text"]
    assert drawn == ["tell" + text, "me" + alone(server, "me", 20)[0]]


def test_what_cannot_be_answered_is_said_in_openais_form(server: Served) -> None:
    for method, path, body, status, message in (
        ("POST", "/v1/completions", b"{", 400, "the body is not valid JSON"),
        (
            "POST",
            "/v1/completions",
            {"prompt": [128 + 50]},
            400,
            "prompt 1 of 1 contains token 178, which is outside the model's vocabulary 0..134",
        ),
        (
            "POST",
            "/v1/completions",
            {"prompt": "a", "logit_bias": {"999": 1}},
            400,
            "the logit bias contains token 999",
        ),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "\ufdd2"}]},
            400,
            "a message contains",
        ),
        ("POST", "/v1/embeddings", {"input": "a"}, 404, "POST /v1/embeddings: Not Found"),
        ("DELETE", "/v1/models", None, 405, "DELETE /v1/models: Method Not Allowed"),
        ("GET", "/v1/models/other", None, 404, "the model 'other' does not exist here"),
    ):
        found, content = server.ask(method, path, body)
        assert found == status, (path, body, content)
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert content["error"]["message"].startswith(message)
    assert server.ask("GET", "/health") == (200, {"status": "ok"})


def test_two_hundred_streams_at_once_lose_nothing(server: Served) -> None:
    def read(number: int) -> str:
        body = {"prompt": f"{number}", "max_tokens": 6, "temperature": 0, "stream": True, "ignore_eos": True}
        status, content = server.ask("POST", "/v1/completions", body)
        assert status == 200
        return "".join(chunk["choices"][0]["text"] for chunk in events(content))

    with ThreadPoolExecutor(200) as pool:
        texts = list(pool.map(read, range(200)))
    requests = GenerationRequest(
        prompts=tuple(tuple(server.tokenizer.tokenize(f"{number}")) for number in range(200)),
        max_new_tokens=6,
        sampling=GREEDY,
    )
    assert texts == [server.tokenizer.detokenize(each.tokens) for each in server.engine.generate(requests)]
    assert server.jobs.counts() == (0, 0)


def test_clients_that_leave_free_their_rows_whether_they_stream_or_wait(server: Served) -> None:
    body = {"prompt": "a", "max_tokens": 400, "temperature": 2.0, "ignore_eos": True, "n": 3}
    connections = []
    for number in range(20):
        connection = http.client.HTTPConnection(*server.address, timeout=60.0)
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": number % 2 == 0}))
        connections.append(connection)
    until(lambda: server.continuous.num_rows > 20)
    streams = [connection.getresponse() for connection in connections[::2][:3]]
    assert all(stream.readline().startswith(b"data: ") for stream in streams)
    for connection in connections:
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    for stream in streams:
        stream.close()
    until(lambda: server.jobs.counts() == (0, 0) and not server.continuous.is_busy)
    text = server.ask("GET", "/metrics")[1]
    assert 'megatron_requests_total{status="200"}' in text
    assert "\nmegatron_requests_running 0\n" in text
    left = next(line for line in text.splitlines() if line.startswith("megatron_clients_left_total "))
    assert int(left.split()[1]) >= 17
    assert server.ask("POST", "/v1/completions", {"prompt": "b", "max_tokens": 3, "temperature": 0})[0] == 200


def test_who_comes_when_twenty_have_left_waits_for_one_token_of_theirs_at_most(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in steps, of which each is a token of all that run: no clock, and no other load, has a say."""
    steps: list[int] = []
    step = server.continuous.step

    def counted() -> Any:
        steps.append(server.continuous.num_rows)
        return step()

    monkeypatch.setattr(server.continuous, "step", counted)

    def request(count: int) -> GenerationRequest:
        return GenerationRequest(prompts=((1, 2),), max_new_tokens=count, sampling=GREEDY)

    # Beside 20 there is room for another, beside 24 there is none.
    for number in (20, 24):
        leaving = [Job(request(400), lambda news: None) for _ in range(number)]
        for job in leaving:
            server.jobs.start(job)
        until(lambda number=number: server.continuous.num_rows == number)
        came = threading.Event()
        at_first: list[int] = []

        def listen(news: Any, at_first: list[int] = at_first, came: threading.Event = came) -> None:
            at_first.append(len(steps))
            came.set()

        for job in leaving:
            server.jobs.leave(job)
        before = len(steps)
        server.jobs.start(Job(request(1), listen))
        assert came.wait(60.0)
        # One step may have been about to begin, and one is the newcomer's own, alone.
        assert at_first[0] - before <= 2
        until(lambda: not server.continuous.is_busy)
    assert server.jobs.counts() == (0, 0)


def test_keys_bodies_and_queues_have_limits(tmp_path) -> None:
    limits = Limits(body_bytes=2000, body_seconds=1.0, requests=3)
    long = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "n": 2}
    with served(tmp_path, max_rows=2, max_waiting=1, limits=limits, key="secret") as server:
        key = {"Authorization": "Bearer secret"}
        for wrong in ({}, {"Authorization": "Bearer public"}, {"Authorization": "secret"}):
            status, content = server.ask("POST", "/v1/completions", {"prompt": "a"}, **wrong)
            assert (status, content["error"]["code"]) == (401, "invalid_api_key")
        assert server.ask("GET", "/metrics")[0] == 401
        assert server.ask("GET", "/health")[0] == 200
        assert server.ask("POST", "/v1/completions", {"prompt": "a" * 3000}, **key)[0] == 413
        part = b"5dc\r\n" + b" " * 1500 + b"\r\n"
        for parts, status in ((1, 400), (2, 413)):
            assert _send_raw(server, b"Transfer-Encoding: chunked\r\n\r\n" + part * parts + b"0\r\n\r\n") == status
        assert _send_raw(server, b"Content-Length: 100\r\n\r\n{") == 408
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.ask, "POST", "/v1/completions", long, **key)
            until(lambda: server.jobs.counts() == (0, 1))
            second = pool.submit(server.ask, "POST", "/v1/completions", long, **key)
            until(lambda: server.jobs.counts() == (1, 1))
            status, content = server.ask("POST", "/v1/completions", long, **key)
            assert (status, content["error"]["code"]) == (429, "queue_full")
            assert (first.result()[0], second.result()[0]) == (200, 200)

        with contextlib.ExitStack() as slow:

            def is_full() -> bool:
                connection = slow.enter_context(socket.create_connection(server.address))
                connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
                return server.ask("GET", "/health")[0] == 503

            until(is_full)
            until(lambda: server.ask("GET", "/health")[0] == 200)


def _send_raw(server: Served, rest: bytes) -> int:
    with socket.create_connection(server.address, timeout=30.0) as connection:
        connection.sendall(HEAD + rest)
        return int(connection.recv(1000).split()[1])


def test_a_connection_without_a_request_is_closed(server: Served, monkeypatch) -> None:
    monkeypatch.setattr(http_server, "_FIRST_REQUEST_S", 0.2)
    with socket.create_connection(server.address, timeout=30.0) as silent:
        silent.sendall(b"GET /hea")
        assert silent.recv(100) == b""
    assert server.ask("GET", "/health")[0] == 200


def test_who_waits_when_the_server_ends_is_told(tmp_path) -> None:
    with ThreadPoolExecutor(2) as pool:
        with served(tmp_path, max_rows=1) as server:
            body = {"prompt": "a", "max_tokens": 450, "ignore_eos": True}
            waiting = [pool.submit(server.ask, "POST", "/v1/completions", body) for _ in range(2)]
            until(lambda: server.jobs.counts() == (1, 1))
        for result in waiting:
            status, content = result.result()
            assert (status, content["error"]["message"]) == (503, "the server is shutting down")


def test_a_chat_in_the_terminal_streams_and_goes_on_after_an_error(server: Served, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n" + "x" * 600 + "\n/reset\nhi\n/exit\nnever\n"))
    assert chat.main(["--url", server.url, "--temperature", "0", "--max-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    (answer,) = alone(server, "<|user|>hi<|assistant|>", 8)
    printable = "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in answer)
    assert out == f"{printable}\n{printable}\n"
    assert err.startswith("error: status 400: the maximum context length is 500 tokens")
    assert err.endswith("\n/reset starts a new conversation\n")
    assert err.count("\n") == 2


def test_a_chat_with_a_checkpoint_needs_no_server(tmp_path, monkeypatch, capsys) -> None:
    tokenizer = write_chat_folder(tmp_path / "tokenizer")
    flags = f"{GPT2_SHAPE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tokenizer"
    save(tmp_path / "run", flags)
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n" + "x" * 50 + "\n"))
    words = ["--load", str(tmp_path / "run"), "--temperature", "0", "--max-tokens", "6"]
    status = chat.main(words)
    out, err = capsys.readouterr()
    assert status == 0, err
    prompt = "<|user|>hi<|assistant|>"
    answer = expected_text(flags, prompt, 6).removeprefix(prompt)
    assert out == "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in answer) + "\n"
    assert err.startswith("error: the maximum context length is 40 tokens")
    assert err.endswith("\n/reset starts a new conversation\n")
    assert len(tokenizer.tokenize(prompt)) == 4


def test_a_base_model_continues_the_text_and_says_so_once(tmp_path, monkeypatch, capsys) -> None:
    write_chat_folder(tmp_path / "tokenizer", None)
    flags = f"{GPT2_SHAPE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tokenizer"
    save(tmp_path / "run", flags)
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n/reset\n" + "x" * 37 + "\n"))
    status = chat.main([str(tmp_path / "run"), "--greedy"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, f"{COMPLETION_MODE}\n")
    texts = (expected_text(flags, "hi", 38).removeprefix("hi"), expected_text(flags, "x" * 37, 3)[37:])
    assert out == "".join(f"{printable(text)}\n" for text in texts), "the answers fit the context of 40 tokens"


def test_a_fine_tuned_model_is_asked_in_the_format_of_its_training(tmp_path, monkeypatch, capsys) -> None:
    write_chat_folder(tmp_path / "tokenizer", None)
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tokenizer"
    shape = GPT2_SHAPE.replace("40", "100")
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    prompts = {"": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "--chat-template plain": "hi"}
    (tmp_path / "talk.json").write_text("[]")
    for number, (chosen, prompt) in enumerate(prompts.items()):
        save(tmp_path / str(number), f"{shape} {tokenizer} --sft --train-data-path {tmp_path}/talk.json {chosen}")
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        assert chat.main([str(tmp_path / str(number)), "--temperature", "0", "--max-tokens", "5"]) == 0
        answer = expected_text(f"{shape} {tokenizer}", prompt, 5).removeprefix(prompt)
        assert capsys.readouterr() == (f"{printable(answer)}\n", "")


def test_generate_asks_a_server_at_an_address_until_stop(server: Served, monkeypatch, capsys) -> None:
    address = server.url.removeprefix("http://")
    expected = [
        server.ask("PUT", "/api", {"prompts": [text], "tokens_to_generate": 6, "top_k": 1})[1]["text"][0]
        for text in ("ab", "c")
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n" + "x" * 600 + "\nc\nstop\nd\n"))
    assert text_generation_cli.main([address, "--tokens-to-generate", "6", "--greedy"]) == 0
    out, err = capsys.readouterr()
    separator = f"\n{text_generation_cli.SEPARATOR}\n"
    assert out == f"{printable(expected[0])}{separator}{text_generation_cli.SEPARATOR}\n{printable(expected[1])}\n"
    assert err.startswith(f"error: the server at {address} reports status 400: ")
    assert err.count("\n") == 1
    assert (
        text_generation_cli.main(["--load", server.url, "--prompt", "ab", "--max-tokens", "6", "--temperature", "0"])
        == 0
    )
    assert capsys.readouterr().out == f"{expected[0]}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("127.0.0.1:9 --prompt a", "no server responds at 127.0.0.1:9"),
        ("127.0.0.1:9 --prompt a --ckpt-step 3 --repetition-penalty 2", "--ckpt-step does not apply to a server"),
        ("nowhere:x --prompt a", "--load nowhere:x is not a folder"),
    ],
)
def test_a_server_that_cannot_be_asked_is_one_line(words: str, message: str, capsys) -> None:
    assert text_generation_cli.main(words.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_beams_of_a_chat_give_whole_answers_here_and_from_a_server(
    server: Served, tmp_path, monkeypatch, capsys
) -> None:
    write_chat_folder(tmp_path / "tokenizer")
    flags = f"{GPT2_SHAPE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tokenizer"
    save(tmp_path / "run", flags)
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    beams = ["--num-beams", "3", "--max-tokens", "5"]
    for words in (["--url", server.url], [str(tmp_path / "run")]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        assert chat.main([*words, *beams]) == 0
        out, err = capsys.readouterr()
        assert (len(out) > 1, err) == (True, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--url nowhere", "--url nowhere is not a URL; use for example http://127.0.0.1:8000"),
        ("--url http://127.0.0.1:9", "no server responds at http://127.0.0.1:9"),
        (". --url http://127.0.0.1:9", "--url applies to a server; omit it, or the checkpoint"),
        (
            "--temperature -1 --max-tokens 0",
            "--temperature -1 is not positive and finite; use --greedy to select the most likely token; "
            "--max-tokens (--tokens-to-generate) 0 is not positive",
        ),
        ("--greedy --top-k 5", "--greedy or --temperature 0 does not sample; omit it"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_in_one_line(words: str, message: str, capsys) -> None:
    assert chat.main(words.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

MARKUP = "<b>bold</b>"
SEND = "byId('temperature').value = 0; byId('max-tokens').value = {}; byId('question').value = {}; byId('send').click()"
STEPS = [
    {
        "do": "0",
        "until": "model",
        "ask": "[document.title, byId('model').textContent, byId('error').textContent, byId('about').textContent]",
    },
    {
        "do": SEND.format(64, json.dumps(MARKUP)),
        "until": "!running && conversation.length == 2",
        "ask": "[...document.querySelectorAll('.message')].map(each => [each.className, each.firstChild.textContent])",
    },
    {
        # The server would generate for long. It is stopped at the first letters.
        "do": SEND.format(300, "'go on'")
        + "; stop = byId('stop-chat'); before = [stop.hidden, byId('send').disabled]; "
        "timer = setInterval(() => { if (document.querySelector('.growing .text')?.textContent) { "
        "clearInterval(timer); stop.click(); } }, 1)",
        "until": "!running && conversation.length == 4",
        "ask": "[before, [stop.hidden, byId('send').disabled], document.querySelectorAll('.facts')[1].textContent]",
    },
    {
        "do": "byId('reset').click()",
        "until": "conversation.length == 0",
        "ask": "[document.querySelectorAll('.message').length, byId('welcome').textContent]",
    },
    {
        "do": SEND.format(64, "'x'.repeat(600)"),
        "until": "!running && byId('error').textContent",
        "ask": "[byId('error').textContent, conversation.length, byId('question').value.length]",
    },
    {
        "do": "byId('tab-tokens').click(); byId('prompt').value = 'abc'; byId('max-tokens').value = 5; "
        "byId('continue').click()",
        "until": "!running && document.querySelectorAll('.token').length > 3",
        "ask": "[[...document.querySelectorAll('.token')].map(each => each.textContent), byId('chat').hidden, "
        "document.querySelectorAll('b').length]",
    },
    {
        "do": "document.querySelectorAll('.token')[3].click()",
        "until": "document.querySelectorAll('#detail tr').length",
        "ask": "[document.querySelectorAll('#detail tr').length, document.querySelector('#detail td').textContent, "
        "document.documentElement.scrollWidth > document.documentElement.clientWidth]",
    },
    {
        "do": "byId('score').click()",
        "until": "!running && document.querySelectorAll('.token').length == 3",
        "ask": "performance.getEntriesByType('resource').every(each => each.name.startsWith(location.origin))",
    },
]


def likeliest(server: Served, prompt: str, count: int) -> list[str]:
    """Return the texts of the tokens that the engine takes by itself."""
    eod = server.tokenizer.eod_id
    assert eod is not None
    request = GenerationRequest(
        prompts=(tuple(server.tokenizer.tokenize(prompt)),),
        max_new_tokens=count,
        sampling=SamplingConfig(greedy=True),
        stop=StopRule(end_tokens=frozenset((eod,))),
    )
    return [server.tokenizer.detokenize([token]) for token in server.engine.generate(request)[0].tokens]


def test_a_browser_chats_and_looks_at_probabilities(tmp_path: Path) -> None:
    require_browser()
    with served(tmp_path / "served") as server:
        shown = browse("browser_driver.py", server.url, str(tmp_path), given=json.dumps(STEPS))
        lines: list[Any] = [json.loads(line) for line in shown if line[:1] in '["tf']
        answer = "".join(likeliest(server, f"<|user|>{MARKUP}<|assistant|>", 64))
        tokens = likeliest(server, "abc", 5)
    name, messages, stopped, cleared, refused, continued, (num_rows, best, overflows), is_local = lines
    shown_tokens, chat_is_hidden, num_bold = continued
    assert name[:3] == [NAME, NAME, ""]
    assert "context 500 tokens" in name[3]
    assert stopped[:2] == [[False, True], [True, False]]
    assert stopped[2].startswith("stopped")
    assert cleared == [0, "Send a message to start a conversation."]
    assert messages == [["message user", MARKUP], ["message assistant", answer]]
    assert (refused[0].startswith("the maximum context length is 500 tokens"), refused[1:]) == (True, [0, 600])
    assert (shown_tokens, chat_is_hidden, num_bold) == (["a", "b", "c", *tokens], True, 0)
    assert (num_rows, best, overflows) == (10, json.dumps(tokens[0], ensure_ascii=False), False)
    assert is_local
    assert len(list(tmp_path.glob("*.png"))) == len(STEPS)
