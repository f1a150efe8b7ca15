"""The command serve as its users run it: over processes, until a signal; and its refusals."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

from megatron.cli import serve
from tests.e2e.test_text_generation import LLAMA_SHAPE, NULL_TOKENIZER, expected_text, save
from tests.harness.free_port import free_port
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY

FLAGS = f"{LLAMA_SHAPE} {NULL_TOKENIZER}"
START_S = 300.0


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(folder, FLAGS)
    return folder


def ask(port: int, path: str, body: object) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    connection.request("POST", path, json.dumps(body), {"Authorization": "Bearer secret"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


@pytest.mark.parametrize(
    ("words", "num_processes"),
    [
        ("", 1),
        pytest.param("", 2, marks=pytest.mark.long),
        pytest.param("--pipeline-model-parallel-size 2", 2, marks=pytest.mark.long),
        pytest.param("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, marks=pytest.mark.long),
    ],
)
def test_processes_answer_and_end_on_a_signal(llama: Path, words: str, num_processes: int, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    command = [sys.executable, "-m", "megatron", "serve", "--load", str(llama), "--port", "0", *words.split()]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    processes = [
        subprocess.Popen(
            [*command, "--served-model-name", "llama", "--api-key-file", str(tmp_path / "key")],
            cwd=REPOSITORY,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        assert processes[0].stdout is not None
        watchdog = threading.Timer(START_S, processes[0].kill)
        watchdog.start()
        line = processes[0].stdout.readline()
        watchdog.cancel()
        assert line.startswith("serving llama at http://127.0.0.1:")
        port = int(line.rsplit(":", 1)[1])
        body = {"model": "llama", "prompt": "3 14 15", "max_tokens": 7, "temperature": 0, "echo": True, "logprobs": 1}
        status, answer = ask(port, "/v1/completions", body)
        assert status == 200
        (choice,) = answer["choices"]  # type: ignore[misc]
        assert choice["text"] == expected_text(FLAGS, "3 14 15", 7)
        assert choice["logprobs"]["token_logprobs"][3:] == [
            max(top.values()) for top in choice["logprobs"]["top_logprobs"][3:]
        ]
        status, answer = ask(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "5"}]})
        assert status == 400
        remedy = "give the command serve its flag --chat-template: a file, or one of chatml, plain, identity"
        assert remedy in str(answer)
        processes[-1].send_signal(signal.SIGTERM)
        assert [process.wait(60.0) for process in processes] == [0] * num_processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-waiting 0 --port -1", "--port -1 is not between 0 and 65535; --max-waiting 0 is not positive"),
        ("--api-key a --api-key-file b", "--api-key and --api-key-file are two keys; give one of them"),
        ("--api-key-file {folder}/none", "cannot read --api-key-file {folder}/none"),
        ("--api-key ä", "--api-key gives no key: it must be one or more visible ASCII characters"),
        ("--port 0 --chat-template none", "--chat-template none is no file and no template that is known"),
        ("--host 1.2.3.4", "cannot listen at 1.2.3.4:8000"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(words: str, message: str, llama: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        status = serve.main(["--load", str(llama), *words.format(folder=llama).split()])
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message.format(folder=llama) in err
    assert err.count("\n") == 1


def test_a_missing_package_is_named_with_what_installs_it(llama: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "megatron.serving.openai.http_server", raising=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert serve.main(["--load", str(llama)]) == 2
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(number, handler)
    assert "uvicorn cannot be imported; install them with: pip install fastapi uvicorn" in capsys.readouterr().err
