"""Megatron's PUT /api: its JSON format, its responses, and an HTTP server with one thread per connection."""

from __future__ import annotations

import dataclasses
import difflib
import json
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from megatron.core.errors import InputError
from megatron.core.inference import (
    MIN_TEMPERATURE,
    BeamConfig,
    Continuation,
    GenerationRequest,
    SamplingConfig,
    StopRule,
    TokenPairs,
    check_request,
    context_length,
    new_tokens_that_fit,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.tensor_parallel import stream_seed
from megatron.core.tokenizers import Tokenizer
from megatron.serving.job_queue import GenerationFailed, JobQueue, ServiceEnding

MAX_PROMPTS = 128
_DEFAULT_LENGTH = 64
MAX_TEMPERATURE = 100.0
_LARGEST = 2**63 - 1
_MOST_SHOWN = 80


class BadRequest(Exception):
    """The request cannot be answered; the text of the error goes to the client."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """Fields of a request's body, with the names used there.

    Without ``tokens_to_generate`` it is 64, or the rest of the context after the longest prompt.
    """

    prompts: tuple[str, ...]
    tokens_to_generate: int | None = None
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: int = -1
    no_log: bool = False
    stop_token: int | None = None
    no_repeat_ngram_size: int = 0
    beam_width: int | None = None
    length_penalty: float = 1.0


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: type(value) is int and abs(value) <= _LARGEST, "a whole number"),
    "int | None": (lambda value: type(value) is int and abs(value) <= _LARGEST, "a whole number"),
    "float": (lambda value: type(value) is float or (type(value) is int and abs(value) <= _LARGEST), "a number"),
}
_NOT_SUPPORTED = {
    "max_len": "max_len has been renamed to tokens_to_generate",
    "sentences": "sentences has been renamed to prompts",
}


def read_body(body: bytes) -> ApiRequest:
    """Parse a request's body.

    Raises:
        BadRequest: the body is not JSON, a field is unknown, or a value is invalid.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadRequest("the body is not a JSON object")
    _check_names(values)
    fields = {field.name: field for field in dataclasses.fields(ApiRequest)}
    given: dict[str, Any] = {"prompts": _prompts(values)}
    for name, value in values.items():
        if name == "prompts":
            continue
        is_kind, description = _KINDS[str(fields[name].type)]
        if not is_kind(value):
            raise BadRequest(f"{name} must be {description}")
        given[name] = value
    request = ApiRequest(**given)
    _check_values(request, values)
    return request


def _check_names(values: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(ApiRequest)]
    for name in values:
        if name in _NOT_SUPPORTED:
            raise BadRequest(_NOT_SUPPORTED[name])
        if name not in known:
            # Truncate the name: the comparison of a very long one would take minutes.
            nearest = difflib.get_close_matches(name[:_MOST_SHOWN], known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known fields are {', '.join(known)}"
            raise BadRequest(f"{name[:_MOST_SHOWN]} is not a known field; {hint}")


def _prompts(values: Mapping[str, Any]) -> tuple[str, ...]:
    if "prompts" not in values:
        raise BadRequest(f"prompts is missing; pass a list of 1 to {MAX_PROMPTS} strings")
    prompts = values["prompts"]
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("prompts must be a list of strings")
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise BadRequest(f"prompts has {len(prompts)} strings; 1 to {MAX_PROMPTS} are accepted")
    for number, prompt in enumerate(prompts, start=1):
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise BadRequest(f"prompt {number} contains half of a surrogate pair, which is not a character")
    return tuple(prompts)


def _check_values(request: ApiRequest, given: Mapping[str, Any]) -> None:
    problems = {
        "tokens_to_generate must be 0 or more": (request.tokens_to_generate or 0) < 0,
        "tokens_to_generate 0 requires logprobs: true": (request.tokens_to_generate == 0 and not request.logprobs),
        f"temperature must be above 0 and at most {MAX_TEMPERATURE:g}": (
            not 0.0 < request.temperature <= MAX_TEMPERATURE
        ),
        f"temperature must be at least {MIN_TEMPERATURE:g}, the smallest value that float32 can divide by": (
            0.0 < request.temperature < MIN_TEMPERATURE
        ),
        "top_k must be 0 or more": request.top_k < 0,
        "top_p must be between 0 and 1": not 0.0 <= request.top_p <= 1.0,
        "top_p_decay must be between 0 and 1": not 0.0 <= request.top_p_decay <= 1.0,
        "top_p_decay needs top_p": request.top_p_decay != 0.0 and request.top_p == 0.0,
        "top_p_bound must be between 0 and top_p": not 0.0 <= request.top_p_bound <= request.top_p,
        "no_repeat_ngram_size must be 0 or more": request.no_repeat_ngram_size < 0,
        "beam_width must be 1 or more": request.beam_width is not None and request.beam_width < 1,
        "length_penalty needs beam_width": "length_penalty" in given and request.beam_width is None,
        "beam_width needs tokens_to_generate": request.beam_width is not None and request.tokens_to_generate == 0,
        "random_seed must be 0 or more": "random_seed" in given and not -1 <= request.random_seed < 2**63,
        "empty prompts require add_BOS: true": not request.add_BOS and not all(request.prompts),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise BadRequest(problem)


class ApiTranslator:
    """Translator of requests to token ids for one model, and of tokens to responses; thread-safe.

    ``max_tokens`` limits prompts x (longest prompt + tokens to generate) of one batch.
    """

    def __init__(self, tokenizer: Tokenizer, config: GPTConfig, max_tokens: int, max_batch_size: int) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.max_tokens = max_tokens
        self.max_batch_size = max_batch_size
        self._lock = threading.Lock()
        self._line_tokens: _LineTokens | None = None

    def generation_request(self, request: ApiRequest, default_seed: int) -> GenerationRequest:
        """Translate a request for the engine.

        Raises:
            BadRequest: the model or the tokenizer cannot serve it.
        """
        with self._lock:
            try:
                prompts = tuple(self._tokenize(prompt, request.add_BOS) for prompt in request.prompts)
                prompt, count = max(map(len, prompts)), request.tokens_to_generate
                if count is None:
                    count = new_tokens_that_fit(self.config, [*map(len, prompts)], _DEFAULT_LENGTH)
                result = self._assemble(request, prompts, count, default_seed)
                check_request(self.config, result)
            except InputError as error:
                raise BadRequest("; ".join(str(error).splitlines())) from error
        longest = prompt + count
        limit = context_length(self.config, longest)
        if longest > limit:
            raise BadRequest(
                f"a prompt of {prompt} tokens and {count} to generate are {longest} tokens, but the maximum context "
                f"length is {limit}; shorten the prompt or lower tokens_to_generate"
            )
        width = request.beam_width or 1
        prompts_at_once = min(len(prompts), max(1, self.max_batch_size // width))
        together = prompts_at_once * width * longest
        if together > self.max_tokens:
            beams = "" if request.beam_width is None else f" x {width} beams"
            raise BadRequest(
                f"{prompts_at_once} prompts{beams} x {longest} tokens = {together} tokens at once, but at most "
                f"{self.max_tokens} are accepted; send fewer or shorter prompts, or lower "
                f"tokens_to_generate{' or beam_width' if beams else ''}"
            )
        return result

    def answer(self, asked: GenerationRequest, api: ApiRequest, given: Sequence[Continuation]) -> dict[str, Any]:
        """Build the body of the response: the texts, the text of each token, and the log-probabilities.

        A text leaves out the token of add_BOS, with which its ``segments`` start. ``logprobs`` has one number for every
        segment after the first, or is null if it was not requested. With beam search, the response has all texts of a
        prompt, the best first, and ``scores`` with one number per text instead of ``logprobs``.
        """
        ids = [
            [*prompt, *tokens]
            for prompt, continuation in zip(asked.prompts, given, strict=True)
            for tokens in ([found.tokens for found in continuation.hypotheses] or [tuple(continuation.tokens)])
        ]
        scores = [found.score for continuation in given for found in continuation.hypotheses]
        numbers = {"logprobs": [continuation.log_probabilities for continuation in given] if api.logprobs else None}
        with self._lock:
            return {
                "text": [self.tokenizer.detokenize(row[int(api.add_BOS) :]) for row in ids],
                "segments": [[self.tokenizer.detokenize([token]) for token in row] for row in ids],
                **(numbers if api.beam_width is None else {"scores": scores}),
            }

    def _tokenize(self, prompt: str, add_bos: bool) -> tuple[int, ...]:
        ids = self.tokenizer.tokenize(prompt) if prompt else []
        if not add_bos:
            return tuple(ids)
        if self.tokenizer.eod_id is None:
            raise BadRequest(
                f"add_BOS: {self.tokenizer.name} has no end-of-document token, which add_BOS prepends; omit add_BOS"
            )
        return (self.tokenizer.eod_id, *ids)

    def _assemble(
        self, request: ApiRequest, prompts: tuple[tuple[int, ...], ...], max_new_tokens: int, default_seed: int
    ) -> GenerationRequest:
        lines = _NO_LINES
        if request.stop_on_eol or request.stop_on_double_eol or request.prevent_newline_after_colon:
            lines = self._lines()
        closing = lines.newline if request.stop_on_eol else lines.blank_line if request.stop_on_double_eol else ()
        pairs = TokenPairs(first=lines.ends_line, second=lines.begins_line) if request.stop_on_double_eol else None
        never = TokenPairs(first=lines.colon, second=lines.newline) if request.prevent_newline_after_colon else None
        width = request.beam_width
        beams = None if width is None else BeamConfig(num_beams=width, length_penalty=float(request.length_penalty))
        end = self.tokenizer.eod_id if request.stop_token is None else request.stop_token
        return GenerationRequest(
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            sampling=SamplingConfig(
                temperature=float(request.temperature),
                top_k=request.top_k,
                top_p=float(request.top_p),
                top_p_decay=float(request.top_p_decay),
                top_p_bound=float(request.top_p_bound),
                seed=default_seed if request.random_seed < 0 else request.random_seed,
                no_repeat_ngram_size=request.no_repeat_ngram_size,
            ),
            stop=StopRule(
                end_tokens=frozenset() if end is None else frozenset((end,)),
                closing_tokens=frozenset(closing),
                closing_pairs=pairs or TokenPairs(),
            ),
            never=never or TokenPairs(),
            log_probabilities=request.logprobs,
            beams=beams,
        )

    def _lines(self) -> _LineTokens:
        if self._line_tokens is None:
            self._line_tokens = _find_line_tokens(self.tokenizer)
        return self._line_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LineTokens:
    """Token ids that contain, start or end a line, independent of the tokenizer."""

    newline: frozenset[int] = frozenset()
    blank_line: frozenset[int] = frozenset()
    ends_line: frozenset[int] = frozenset()
    begins_line: frozenset[int] = frozenset()
    colon: frozenset[int] = frozenset()


_NO_LINES = _LineTokens()


def _find_line_tokens(tokenizer: Tokenizer) -> _LineTokens:
    texts = {token: tokenizer.detokenize([token]) for token in range(tokenizer.vocab_size)}
    return _LineTokens(
        newline=frozenset(token for token, text in texts.items() if "\n" in text),
        blank_line=frozenset(token for token, text in texts.items() if "\n\n" in text),
        ends_line=frozenset(token for token, text in texts.items() if text.endswith("\n")),
        begins_line=frozenset(token for token, text in texts.items() if text.startswith("\n")),
        colon=frozenset(token for token, text in texts.items() if text.endswith(":")),
    )


class PutApi:
    """Handler of PUT /api that answers requests from several threads.

    Requests without ``random_seed`` get a seed derived from ``seed`` and their number.
    """

    def __init__(self, translator: ApiTranslator, jobs: JobQueue, seed: int) -> None:
        self._translator = translator
        self._jobs = jobs
        self._seed = seed
        self._numbers = count()

    def next_seed(self) -> int:
        return stream_seed(self._seed, "request", (next(self._numbers),))

    def answer(self, body: bytes) -> tuple[HTTPStatus, Any, str]:
        """Return the HTTP status, the content and a line for the log."""
        try:
            api = read_body(body)
            asked = self._translator.generation_request(api, self.next_seed())
            given = self._jobs.submit(asked)
            answer = self._translator.answer(asked, api, given)
        except BadRequest as error:
            return HTTPStatus.BAD_REQUEST, str(error), f"rejected: {error}"
        except ServiceEnding as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, str(error), str(error)
        except (InputError, GenerationFailed) as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, str(error), str(error)
        except Exception as error:  # noqa: BLE001 - the client is told, and the next request is another
            traceback.print_exc()
            line = f"the server failed on this request: {type(error).__name__}"
            return HTTPStatus.INTERNAL_SERVER_ERROR, line, line
        num_new = sum(len(continuation.tokens) for continuation in given)
        return HTTPStatus.OK, answer, "" if api.no_log else f"{len(api.prompts)} prompts, {num_new} new tokens"


PATH = "/api"
MAX_BODY_BYTES = 16 * 1024 * 1024
_MOST_DIGITS = 20
_IDLE_CONNECTION_S = 60.0


class GenerationServer(ThreadingHTTPServer):
    """HTTP server for one model, created before the model is loaded, so that a port in use is reported immediately.

    Raises:
        OSError: the port cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.server_bind()
        self.api: PutApi | None = None
        self.jobs = JobQueue()
        self._answering = 0
        self._changed = threading.Condition()

    @property
    def url(self) -> str:
        """Return the address for requests."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}{PATH}"

    def server_bind(self) -> None:
        """Bind the port without the lookup of the host name in `HTTPServer`, which can be slow."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def start(self, translator: ApiTranslator, seed: int) -> None:
        """Start accepting requests."""
        self.api = PutApi(translator, self.jobs, seed)
        self.server_activate()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Stop accepting requests, cancel the waiting ones, and wait for the running ones."""
        self.shutdown()
        self.jobs.close()
        with self._changed:
            self._changed.wait_for(lambda: self._answering == 0, timeout_s)
        self.server_close()

    def begin_answer(self) -> None:
        """Count a request that `stop` must wait for."""
        with self._changed:
            self._answering += 1

    def end_answer(self) -> None:
        with self._changed:
            self._answering -= 1
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a broken connection in one line, and any other error in full."""
        error = sys.exception() if sys.version_info >= (3, 11) else sys.exc_info()[1]
        if isinstance(error, OSError):
            print(f"{client_address[0]} left: {error}", file=sys.stderr, flush=True)
        else:
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: GenerationServer
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_CONNECTION_S

    def do_PUT(self) -> None:
        self.server.begin_answer()
        start = time.monotonic()
        try:
            body = self._read_body()
            if body is None:
                return
            assert self.server.api is not None, "requests are accepted once the model is loaded"
            status, content, line = self.server.api.answer(body)
            self._send(status, content)
            if line:
                print(f"{self.client_address[0]} {status.value} {line}, {time.monotonic() - start:.2f} s", flush=True)
        finally:
            self.server.end_answer()

    def do_GET(self) -> None:
        """Reply that only PUT is supported."""
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, f"PUT a JSON object with prompts to {PATH}")

    do_POST = do_DELETE = do_GET

    def _read_body(self) -> bytes | None:
        """Read the body of the request, or send an error and return None."""
        lengths = self.headers.get_all("Content-Length", [])
        length = lengths[0].strip() if lengths else ""
        self.close_connection = True
        if self.path.rstrip("/") != PATH:
            self._send(HTTPStatus.NOT_FOUND, f"only PUT {PATH} is supported")
        elif "Transfer-Encoding" in self.headers:
            self._send(
                HTTPStatus.BAD_REQUEST, ("Transfer-Encoding is not supported: send the whole body with Content-Length")
            )
        elif not lengths:
            self._send(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        elif len(lengths) > 1 or not (length.isascii() and length.isdecimal()):
            self._send(HTTPStatus.BAD_REQUEST, f"Content-Length {', '.join(lengths)[:80]} is not a number of bytes")
        elif len(length) > _MOST_DIGITS or int(length) > MAX_BODY_BYTES:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY_BYTES} bytes are accepted")
        else:
            self.close_connection = False
            return self.rfile.read(int(length))
        return None

    def _send(self, status: HTTPStatus, content: Any) -> None:
        body = json.dumps(content).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Disable the log line per request, because each request logs its own."""
