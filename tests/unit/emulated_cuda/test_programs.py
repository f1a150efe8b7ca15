"""Programs besides training on emulated devices: generation, serving, and a run whose rank is killed and replaced."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.test_inprocess_restart import PATIENCE_S, RESTARTED, Run
from tests.e2e.test_text_generation import LLAMA_SHAPE, NULL_TOKENIZER, TOOL, expected_text, save
from tests.emulated_cuda.build import BuildError, built_libraries
from tests.emulated_cuda.environment import emulated_environment
from tests.emulated_cuda.training import STATUS_OF_REPORTS
from tests.harness.free_port import free_port
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY, launch_prefix, run_command

pytestmark = pytest.mark.full

FLAGS = f"{LLAMA_SHAPE} {NULL_TOKENIZER}"
PROMPT = "3 14 15"
NUM_TOKENS = 9


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Path:
    """Build the emulator, or skip where it cannot be: on a CUDA build of torch, or without a compiler."""
    try:
        return built_libraries()
    except BuildError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(folder, FLAGS)
    return folder


@pytest.mark.parametrize("nproc", [1, 2])
def test_generated_text_is_that_of_the_cpu(llama: Path, nproc: int) -> None:
    command = [*launch_prefix(nproc), TOOL, "--load", llama, "--prompt", PROMPT]
    result = run_command(
        [*command, "--tokens-to-generate", str(NUM_TOKENS), "--greedy"],
        env=emulated_environment(nproc, triton=False),
        timeout_s=300.0,
    ).check()
    assert result.stdout == expected_text(FLAGS, PROMPT, NUM_TOKENS) + "\n"


def test_served_text_is_that_of_the_cpu(llama: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
    pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")
    port = free_port()
    environment = emulated_environment(1, triton=False)
    environment = {name: value for name, value in environment.items() if name not in LAUNCHER_VARIABLES}
    command = [sys.executable, "-m", "megatron", "serve", "--load", str(llama), "--port", str(port)]
    server = subprocess.Popen(command, cwd=REPOSITORY, env=environment | {"OMP_NUM_THREADS": "1"})
    try:
        body = {"model": "", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
        answer = _ask(server, port, body)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60.0) not in (1, STATUS_OF_REPORTS)
    finally:
        server.kill()
        server.wait()
    text = answer["choices"][0]["text"]
    assert f"{PROMPT} {text.strip()}" == expected_text(FLAGS, PROMPT, NUM_TOKENS)


def _ask(server: subprocess.Popen[bytes], port: int, body: dict[str, object]) -> dict[str, list[dict[str, str]]]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert server.poll() is None, "the server has ended"
        assert time.monotonic() < deadline, "the server does not listen"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
        try:
            connection.request("GET", "/v1/models")
            models = json.loads(connection.getresponse().read())
        except OSError:
            time.sleep(0.2)
            continue
        body["model"] = models["data"][0]["id"]
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, list[dict[str, str]]] = json.loads(response.read())
        assert response.status == 200, answer
        return answer


def test_a_killed_rank_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_environment(2, triton=False, base={"PYTHONPATH": str(REPOSITORY)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.delenv("MEGATRON_DEVICE", raising=False)
    flags = "--train-iters 12 --lr-decay-iters 12 --save-interval 4 --use-distributed-optimizer --bf16"
    run = Run(tmp_path / "attacked", 2, flags, "--distributed-backend nccl")
    try:
        run.wait_for("iteration        5/")
        before = run.launch.ranks()
        run.kill(1)
        run.wait_for(RESTARTED)
        run.wait_for_an_iteration(1)
        after = run.launch.ranks()
        assert (before[0] == after[0], before[1] == after[1]) == (True, False)
        figures = run.figures()
    finally:
        run.launch.close()
    assert [line[0] for line in figures if line[1] is None][-1] == 12
    assert "emulated CUDA: " not in run.launch.text
