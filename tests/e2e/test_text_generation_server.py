"""Text over HTTP by the servers' commands, as their users run them: over processes, until a signal."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.save import CommonState
from megatron.checkpoint.train_state import TrainProgress
from megatron.cli import run_text_generation_server, serve
from megatron.core.dist_checkpointing.planner import CheckpointState
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest, StopRule
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from tests.e2e.test_text_generation import LLAMA_SHAPE, NULL_TOKENIZER, call_tool, expected_text, run_config, save
from tests.harness.child_process import ends_with_parent
from tests.harness.free_port import free_port
from tests.harness.saved_checkpoint import save_checkpoint
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY
from tests.unit.core.inference.small_models import build, whole_logits

SERVER = REPOSITORY / "tools" / "run_text_generation_server.py"
# Room for texts that do not end while a test runs.
FLAGS = f"{LLAMA_SHAPE} {NULL_TOKENIZER} --max-position-embeddings 2000000"
START_S = 300.0
END_S = 15.0


@dataclass(frozen=True)
class Running:
    """Hold the processes of a server and the port that the first one listens at."""

    processes: list[subprocess.Popen[str]]
    port: int

    def put(self, body: Any, path: str = "/api", method: str = "PUT") -> tuple[int, Any]:
        """Send a request and return status and content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60.0)
        with contextlib.closing(connection):
            connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def end(self, number: signal.Signals, ranks: list[int]) -> list[int]:
        """Send a signal to some of the processes and return the statuses of all."""
        for rank in ranks:
            self.processes[rank].send_signal(number)
        return [process.wait(END_S) for process in self.processes]


@contextlib.contextmanager
def serving(folder: Path, num_processes: int, *words: str) -> Iterator[Running]:
    """Start a server as torchrun starts its processes, and wait until it listens."""
    command = [sys.executable, str(SERVER), "--load", str(folder), "--port", "0", *words]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
            preexec_fn=ends_with_parent(),
        )
        for rank in range(num_processes)
    ]
    try:
        yield Running(processes, _listening_port(processes[0]))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _listening_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    assert line.startswith("serving at http://127.0.0.1:"), line
    # What else it prints must not fill the pipe.
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return int(line.rsplit(":", 1)[1].removesuffix("/api\n"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    config, _ = run_config(FLAGS)
    model = build(config.model, single_rank_group(), 77)
    common = CommonState(progress=TrainProgress(iteration=10), config=config.to_dict())
    state = describe_parallel_state(0, 1)
    save_checkpoint(folder, CheckpointState(models=[model]), common, state, config.checkpoint, lambda line: None)
    return folder


def log_probabilities(segments: list[str]) -> list[float]:
    """By a whole forward pass without a cache, in this process; one for every token but the first."""
    config, _ = run_config(FLAGS)
    model = build(config.model, single_rank_group(), seed=77)
    tokens = torch.tensor([[int(segment) for segment in segments]])
    logits = whole_logits(model, tokens)[:-1, 0, : config.model.vocab_size]
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1).tolist()


def check_answers(server: Running) -> None:
    """Compare answers to real requests with what this process computes; greedy where top_k is 1."""
    prompts = ["3 14 15", "92", "6 5 35 8 97 9 3"]
    status, answer = server.put({"prompts": prompts, "tokens_to_generate": 7, "top_k": 1, "logprobs": True})
    assert status == 200
    assert answer["text"] == [expected_text(FLAGS, prompt, 7) for prompt in prompts]
    assert [" ".join(row) for row in answer["segments"]] == answer["text"]
    for segments, values in zip(answer["segments"], answer["logprobs"], strict=True):
        assert values == pytest.approx(log_probabilities(segments), abs=1e-5)
    assert server.put({"prompts": ["5"], "tokens_to_generate": 3, "top_k": 1})[1]["logprobs"] is None
    status, answer = server.put({"prompts": ["3 14 15"], "tokens_to_generate": 0, "logprobs": True})
    assert (status, answer["text"], len(answer["logprobs"][0])) == (200, ["3 14 15"], 2)
    stop = int(expected_text(FLAGS, "92", 7).split()[4])
    status, answer = server.put({"prompts": ["92"], "tokens_to_generate": 7, "top_k": 1, "stop_token": stop})
    expected = expected_text(FLAGS, "92", 7).split()
    assert answer["text"] == [" ".join(expected[: expected.index(str(stop), 1)])]


def check_beams(server: Running) -> None:
    """Compare the texts and scores of a search with those that this process finds."""
    body = {"prompts": ["3 14 15", "92"], "tokens_to_generate": 6, "beam_width": 3, "length_penalty": 0.5}
    status, answer = server.put(body | {"stop_token": 7, "no_repeat_ngram_size": 2})
    assert status == 200
    config, _ = run_config(FLAGS)
    engine = InferenceEngine(build(config.model, single_rank_group(), seed=77), describe_parallel_state(0, 1))
    request = GenerationRequest(
        prompts=((3, 14, 15), (92,)),
        max_new_tokens=6,
        sampling=SamplingConfig(no_repeat_ngram_size=2),
        stop=StopRule(end_tokens=frozenset((7,))),
        beams=BeamConfig(num_beams=3, length_penalty=0.5),
    )
    found = [
        ([*prompt, *hypothesis.tokens], hypothesis.score)
        for prompt, continuation in zip(request.prompts, engine.generate(request), strict=True)
        for hypothesis in continuation.hypotheses
    ]
    assert len(found) == 6
    assert answer["text"] == [" ".join(map(str, tokens)) for tokens, _ in found]
    assert [" ".join(row) for row in answer["segments"]] == answer["text"]
    assert answer["scores"] == pytest.approx([score for _, score in found], abs=1e-5)
    assert server.put(body | {"beam_width": 200})[1].startswith("num_beams 200 is too large: ")


def check_seeds(server: Running) -> None:
    body = {"prompts": ["3 14"], "tokens_to_generate": 12, "temperature": 2.0}
    seeded = [server.put(body | {"random_seed": 5})[1]["text"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    drawn = [server.put(body)[1]["text"][0] for _ in range(3)]
    assert len(set(drawn)) == 3


def check_refusals(server: Running) -> None:
    assert server.put(b"{")[0] == 400
    assert server.put({}) == (400, "prompts is missing; pass a list of 1 to 128 strings")
    status, text = server.put({"prompts": ["five"]})
    assert (status, "NullTokenizer reads token ids" in text) == (400, True)
    status, text = server.put({"prompts": ["5"], "tokens_to_generate": 2_000_000})
    assert (status, "the maximum context length is" in text) == (400, True)
    assert server.put({"prompts": ["5"]}, path="/other")[0] == 404
    assert server.put({"prompts": ["5"]}, method="POST")[0] == 405
    assert server.put(b"", method="GET")[0] == 405
    check_hostile(server)


def check_hostile(server: Running) -> None:
    for fields in ({"temperature": 1e-320}, {"top_p": 10**400}, {"beam_width": 2, "length_penalty": 1e308}):
        assert server.put({"prompts": ["5"]} | fields)[0] == 400
    assert server.put({"prompts": ["5"], "temperature": 1.2e-38, "top_p": 1e-320, "tokens_to_generate": 2})[0] == 200
    assert server.put({"prompts": ["5"], "tokens_to_generate": 1})[0] == 200


def check_concurrent_requests(server: Running) -> None:
    counts = range(2, 12)
    with ThreadPoolExecutor(len(counts)) as pool:
        bodies = [{"prompts": [str(n)] * (n % 3 + 1), "tokens_to_generate": n, "top_k": 1} for n in counts]
        answers = list(pool.map(server.put, bodies))
    for n, (status, answer) in zip(counts, answers):
        assert (status, answer["text"]) == (200, [expected_text(FLAGS, str(n), n)] * (n % 3 + 1))


def check_end_during_answers(server: Running) -> None:
    """One is under way and one waits; neither would end by itself while the test runs."""
    body = {"prompts": ["5"], "tokens_to_generate": 1_000_000, "stop_token": -1}
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.put, body) for _ in range(2)]
        time.sleep(1.0)
        assert server.end(signal.SIGINT, [0]) == [0]
        assert [result.result() for result in waiting] == [(503, "the server is shutting down")] * 2


def test_one_process_answers_and_ends_on_an_interrupt(llama: Path) -> None:
    with serving(llama, 1, "--max-tokens-to-oom", "2000000") as server:
        check_answers(server)
        check_beams(server)
        check_seeds(server)
        check_refusals(server)
        check_concurrent_requests(server)
        check_end_during_answers(server)


@pytest.mark.parametrize(
    ("pipeline", "ranks"),
    [pytest.param("1", [1], marks=pytest.mark.long), pytest.param("2", [0, 1], marks=pytest.mark.long)],
)
def test_two_processes_answer_and_all_end_when_some_are_asked_to(llama: Path, pipeline: str, ranks: list[int]) -> None:
    with serving(llama, 2, "--pipeline-model-parallel-size", pipeline) as server:
        check_answers(server)
        check_beams(server)
        check_hostile(server)
        assert server.end(signal.SIGTERM, ranks) == [0, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--load {llama} --port 70000", "--port 70000 is not between 0 and 65535"),
        ("--load {llama} --port 0 --seed -1 --max-tokens-to-oom 0", "--seed -1 is negative; --max-tokens-to-oom 0 is"),
        ("--load {nowhere} --port 0", "--load {nowhere} is not a folder"),
        ("--load {llama} --port {taken}", "cannot listen at 127.0.0.1:{taken}"),
        ("--load {llama} --prompt 5", "there is no --prompt; see --help"),
        ("--load {llama} --tensor-model-parallel-size 2", "run torchrun --nproc_per_node 2"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    words: str, message: str, llama: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        places = {"llama": llama, "nowhere": tmp_path / "nowhere", "taken": other.getsockname()[1]}
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            status, out, err = call_tool(
                monkeypatch, capsys, *(word.format(**places) for word in words.split()), tool=run_text_generation_server
            )
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
                signal.signal(number, handler)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message.format(**places) in err
    assert err.count("\n") == 1


pytest.importorskip("fastapi", reason="the extra serve is not installed: no fastapi")
pytest.importorskip("uvicorn", reason="the extra serve is not installed: no uvicorn")

SERVE_FLAGS = f"{LLAMA_SHAPE} {NULL_TOKENIZER}"


@pytest.fixture(scope="module")
def served_llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save(folder, SERVE_FLAGS)
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
def test_processes_answer_and_end_on_a_signal(
    served_llama: Path, words: str, num_processes: int, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("secret\n")
    command = [sys.executable, "-m", "megatron", "serve", "--load", str(served_llama), "--port", "0", *words.split()]
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
        assert choice["text"] == expected_text(SERVE_FLAGS, "3 14 15", 7)
        assert choice["logprobs"]["token_logprobs"][3:] == [
            max(top.values()) for top in choice["logprobs"]["top_logprobs"][3:]
        ]
        # A base model continues the text of the messages.
        body = {"messages": [{"role": "user", "content": "3 14"}], "max_tokens": 4, "temperature": 0}
        status, answer = ask(port, "/v1/chat/completions", body)
        assert status == 200
        (choice,) = answer["choices"]  # type: ignore[misc]
        assert "3 14" + choice["message"]["content"] == expected_text(SERVE_FLAGS, "3 14", 4)
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
        ("--api-key a --api-key-file b", "--api-key and --api-key-file exclude each other; omit one of them"),
        ("--api-key-file {folder}/none", "cannot read --api-key-file {folder}/none"),
        ("--api-key ä", "--api-key contains no valid key: a key is one or more visible ASCII characters"),
        ("--port 0 --chat-template none", "--chat-template none is neither a file nor a known template"),
        ("--host 1.2.3.4", "cannot listen at 1.2.3.4:8000"),
    ],
)
def test_wrong_input_is_one_line_and_status_2_of_serve(
    words: str, message: str, served_llama: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        status = serve.main(["--load", str(served_llama), *words.format(folder=served_llama).split()])
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message.format(folder=served_llama) in err
    assert err.count("\n") == 1


def test_a_missing_package_is_named_with_what_installs_it(served_llama: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "megatron.serving.openai.http_server", raising=False)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert serve.main(["--load", str(served_llama)]) == 2
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(number, handler)
    assert "uvicorn cannot be imported; install them with: pip install fastapi uvicorn" in capsys.readouterr().err
