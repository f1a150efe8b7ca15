"""A server of OpenAI's API in this process: a tiny model, the loop of tokens in a thread, HTTP in another."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.chat_template import choose_template
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.engine import InferenceEngine
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.serving.generation_service import run_service
from megatron.serving.job_queue import JobQueue
from megatron.serving.openai.application import Application
from megatron.serving.openai.guard import Guard, Limits, Metrics
from megatron.serving.openai.http_server import HttpServer
from megatron.serving.openai.translator import Translator
from megatron.serving.text_generation_server import ApiTranslator, PutApi
from tests.unit.core.datasets.small_chat import TEMPLATE, write_chat_folder
from tests.unit.core.inference.small_models import build, odd_config

NAME = "tiny"


@dataclass(frozen=True)
class Served:
    """Hold a server's address and what stands behind it."""

    url: str
    engine: InferenceEngine
    tokenizer: Tokenizer
    jobs: JobQueue
    continuous: ContinuousEngine

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request and return status and content."""
        connection = http.client.HTTPConnection(*self.address, timeout=60.0)
        with contextlib.closing(connection):
            content = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"} | headers)
            response = connection.getresponse()
            text = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(text) if is_json else text.decode()


@contextlib.contextmanager
def served(
    folder: Path,
    *,
    max_rows: int = 8,
    max_waiting: int = 256,
    limits: Limits | None = None,
    key: str | None = None,
    template: str | None = TEMPLATE,
    default_new_tokens: int | None = None,
    defaults: Mapping[str, Any] | None = None,
    **model: Any,
) -> Iterator[Served]:
    """Serve a model of characters in float64, whose template ends each answer; ``model`` overrides its fields.

    ``default_new_tokens`` and ``defaults`` are what the flags of the command set.
    """
    tokenizer = write_chat_folder(folder, template)
    config = odd_config(**({"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 600} | model))
    state = describe_parallel_state(0, 1)
    engine = InferenceEngine(build(config, state.tp), state)
    continuous = ContinuousEngine(engine, max_rows, 10_000)
    jobs, metrics = JobQueue(max_waiting), Metrics()
    translator = Translator(tokenizer, config, 500, choose_template(tokenizer, None), default_new_tokens)
    put_api = PutApi(ApiTranslator(tokenizer, config, 500, max_rows), jobs, 1)
    application = Application(translator, jobs, put_api, NAME, metrics, lambda line: None, defaults or {})
    server = HttpServer("127.0.0.1", 0)
    server.start(Guard(application.asgi(), limits or Limits(), key, metrics))
    is_over = threading.Event()
    loop = threading.Thread(target=run_service, args=(continuous, jobs, is_over.is_set, FlightRecorder()))
    loop.start()
    try:
        yield Served(server.url, engine, tokenizer, jobs, continuous)
    finally:
        is_over.set()
        loop.join()
        jobs.close()
        server.stop()
