"""The FastAPI application: its routes, and its streamed requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from importlib import resources
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from megatron.core.errors import InputError
from megatron.core.inference import (
    Hypothesis,
    NewToken,
    Progress,
    PromptEnded,
    PromptFailed,
    PromptSearched,
    PromptSeen,
)
from megatron.core.tokenizers import Tokenizer
from megatron.serving import GenerationFailed, Job, JobQueue, PutApi, QueueFull, ServiceEnding
from megatron.serving.openai.answer_forms import AnswerForms, ChoiceText, usage_of
from megatron.serving.openai.guard import CONTENT_TYPE, Metrics
from megatron.serving.openai.request_fields import ApiError, RequestFields, read_chat, read_completion
from megatron.serving.openai.translator import Translated, Translator
from megatron.training import num_parameters


class ClientLeft(Exception):
    """The client disconnected and no longer waits for the response."""


class StreamedCompletion:
    """Running request, from `start` to `close`, with the texts of its choices.

    If the client disconnects, as reported by ASGI's ``receive``, the request ends at the next token.
    """

    def __init__(self, jobs: JobQueue, asked: Translated, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.choices = asked.choice_texts(tokenizer)
        self.found: dict[int, tuple[Hypothesis, ...]] = {}
        self._tokenizer = tokenizer
        self._jobs = jobs
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Sequence[Progress] | Exception] = asyncio.Queue()
        self._job = Job(asked.request, self._listen)
        self._watcher: asyncio.Task[None] | None = None

    def start(self, receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Queue the request, and watch for a disconnect of the client.

        Raises:
            QueueFull: too many requests wait.
            ServiceEnding: the service ends.
        """
        self._jobs.start(self._job)
        self._watcher = asyncio.create_task(self._watch(receive))

    def close(self) -> None:
        """Cancel the request if it still runs."""
        self._jobs.leave(self._job)
        if self._watcher is not None:
            self._watcher.cancel()

    async def changes(self) -> AsyncIterator[set[int]]:
        """Yield the indices of the choices with new events, until all choices have ended.

        Raises:
            ClientLeft: the client disconnected.
            Exception: the request failed.
        """
        running = set(range(len(self.choices)))
        while running:
            changed: set[int] = set()
            for news in await self._next():
                self._take(news)
                changed.add(news.prompt)
                if self._has_ended(news):
                    running.discard(news.prompt)
            running -= {number for number in changed if self.choices[number].reason is not None}
            yield changed

    async def _next(self) -> list[Progress]:
        """Return all events since the last call; a slow client gets more at once."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        news: list[Progress] = []
        for event in events:
            if isinstance(event, Exception):
                raise event
            news += event
        return news

    def _has_ended(self, news: Progress) -> bool:
        return isinstance(news, (PromptEnded, PromptSearched))

    def _take(self, news: Progress) -> None:
        choice = self.choices[news.prompt]
        match news:
            case PromptFailed(_, error):
                raise error
            case PromptSeen(prompt, values):
                if self.asked.fields.echo:
                    choice.begin_with(self._tokenizer, self.asked.request.prompts[prompt], values)
            case NewToken(_, token, value):
                choice.add(token, value)
            case PromptSearched(prompt, found):
                self.found[prompt] = found.hypotheses
            case PromptEnded(_, reason):
                choice.end(reason)

    def _listen(self, news: Sequence[Progress] | Exception) -> None:
        """Pass events to the server's event loop, which may already be closed during shutdown."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, news)

    async def _watch(self, receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._jobs.leave(self._job)
        self._events.put_nowait(ClientLeft())


_CLIENT_LEFT = 499
_SHORT_BODY = 20_000
_OF_STREAMS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Json = dict[str, Any]


class Application:
    """OpenAI-compatible API for one model, with Megatron's PUT /api; ``log`` gets one line per request.

    ``defaults`` are values of request fields that replace OpenAI's defaults.
    """

    def __init__(
        self,
        translator: Translator,
        jobs: JobQueue,
        put_api: PutApi,
        model: str,
        metrics: Metrics,
        log: Callable[[str], None],
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._translator = translator
        self._defaults = defaults
        self._jobs = jobs
        self._put_api = put_api
        self._model = model
        self._metrics = metrics
        self._log = log
        self._created = int(time.time())
        self._num_parameters = num_parameters(translator.config)
        self._page = resources.files("megatron.serving.openai").joinpath("page.html").read_text(encoding="utf-8")
        self._policy = _content_policy(self._page)

    def asgi(self) -> FastAPI:
        """Create the ASGI application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        routes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("POST", "/v1/completions", self.complete),
            ("POST", "/v1/chat/completions", self.chat),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/", self.page),
            ("PUT", "/api", self.put),
        )
        for method, path, endpoint in routes:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        app.add_exception_handler(ApiError, _answer_error)
        app.add_exception_handler(HTTPStatus.NOT_FOUND, _answer_unknown)
        app.add_exception_handler(HTTPStatus.METHOD_NOT_ALLOWED, _answer_unknown)
        app.add_exception_handler(Exception, _answer_failure)
        return app

    async def complete(self, request: Request) -> Response:
        """Handle /v1/completions."""
        return await self._answer(request, read_completion(await request.body(), self._defaults))

    async def chat(self, request: Request) -> Response:
        """Handle /v1/chat/completions."""
        return await self._answer(request, read_chat(await request.body(), self._defaults))

    async def models(self) -> Json:
        """List the one model."""
        return {"object": "list", "data": [self._description()]}

    async def model(self, name: str) -> Json:
        """Describe the one model."""
        self._check_model(name)
        return self._description()

    async def health(self) -> Json:
        """Report that the server accepts requests."""
        return {"status": "ok"}

    async def metrics(self) -> Response:
        """Return the metrics in Prometheus format."""
        return Response(self._metrics.text(*self._jobs.counts()), media_type=CONTENT_TYPE)

    async def page(self) -> Response:
        """Return the web page."""
        headers = {"Content-Security-Policy": self._policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(self._page, headers=headers)

    async def put(self, request: Request) -> Response:
        """Handle Megatron's own PUT /api."""
        status, content, line = await asyncio.to_thread(self._put_api.answer, await request.body())
        if line:
            self._log(f"{_client(request)} {status.value} {line}")
        return JSONResponse(content, status.value)

    def _description(self) -> Json:
        template = self._translator.template
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "megatron",
            "max_model_len": self._translator.max_model_len,
            "num_parameters": self._num_parameters,
            "chat_template": None if template is None else template.label,
            "mode": "completion" if template is None else "chat",
            "defaults": dict(self._defaults),
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model):
            raise ApiError(
                404, f"the model {name[:200]!r} does not exist here; use {self._model!r}", code="model_not_found"
            )

    async def _answer(self, request: Request, fields: RequestFields) -> Response:
        self._check_model(fields.model)
        begin = time.monotonic()
        asked = await self._translated(request, fields)
        answer = StreamedCompletion(self._jobs, asked, self._translator.tokenizer)
        forms = AnswerForms(
            self._translator.tokenizer,
            self._model,
            is_chat=fields.is_chat,
            num_alternatives=fields.num_alternatives,
        )
        is_handed_over = False
        try:
            with _as_api_errors():
                answer.start(request.receive)
                changes = answer.changes()
                # Wait for the first event, so that an early failure gets its own HTTP status even for a stream.
                first = await anext(changes)
                self._metrics.first_tokens += 1
                self._metrics.first_token_seconds += time.monotonic() - begin
                if fields.stream:
                    is_handed_over = True
                    parts = self._stream(request, answer, forms, first, changes, begin)
                    return StreamingResponse(parts, media_type="text/event-stream", headers=_OF_STREAMS)
                async for _ in changes:
                    pass
            return JSONResponse(self._whole(answer, forms))
        except ClientLeft:
            self._metrics.clients_left += 1
            return Response(status_code=_CLIENT_LEFT)
        finally:
            if not is_handed_over:
                self._close(request, answer, begin)

    async def _translated(self, request: Request, fields: RequestFields) -> Translated:
        """Translate a request for the engine; a long text is tokenized in a thread, so that other requests proceed."""
        seed = self._put_api.next_seed()
        if len(await request.body()) <= _SHORT_BODY and not self._translator.is_busy:
            return self._translator.translate(fields, seed)
        return await asyncio.to_thread(self._translator.translate, fields, seed)

    def _whole(self, answer: StreamedCompletion, forms: AnswerForms) -> Json:
        """Build a complete response after all choices have ended."""
        if answer.found:
            self._write_beams(answer)
        choices = []
        for index, choice in enumerate(answer.choices):
            text, tokens = choice.take()
            choices.append(forms.choice(index, text, tokens, choice.reason))
        return forms.whole(choices, _usage(answer))

    def _write_beams(self, answer: StreamedCompletion) -> None:
        """Replace the choice of each prompt with its best beams."""
        choices = []
        for prompt, found in sorted(answer.found.items()):
            for text in found[: answer.asked.fields.n]:
                choice = ChoiceText(self._translator.tokenizer, answer.asked.prompts[prompt], ())
                for token in text.tokens:
                    choice.add(token, None)
                choice.end("length" if text.end_token is None else "stop")
                choices.append(choice)
        answer.choices = choices

    async def _stream(
        self,
        request: Request,
        answer: StreamedCompletion,
        forms: AnswerForms,
        first: set[int],
        changes: AsyncIterator[set[int]],
        begin: float,
    ) -> AsyncIterator[bytes]:
        """Yield the chunks of a stream as server-sent events."""
        silent = set(range(len(answer.choices)))
        open_choices = set(silent)
        has_values = answer.asked.fields.num_alternatives is not None
        try:
            try:
                with _as_api_errors():
                    changed: set[int] | None = first
                    while changed is not None:
                        events = []
                        for index in sorted(changed & open_choices):
                            choice = answer.choices[index]
                            text, tokens = choice.take()
                            if text or (tokens and has_values) or choice.reason is not None:
                                is_first = index in silent
                                silent.discard(index)
                                events.append(forms.chunk(index, text, tokens, choice.reason, is_first=is_first))
                            if choice.reason is not None:
                                open_choices.discard(index)
                        if events:
                            yield b"".join(map(_event, events))
                        changed = await anext(changes, None)
            except ApiError as error:
                yield _event(error.content())
            else:
                if answer.asked.fields.include_usage:
                    yield _event(forms.usage_chunk(_usage(answer)))
            yield b"data: [DONE]\n\n"
        except ClientLeft:
            self._metrics.clients_left += 1
        finally:
            self._close(request, answer, begin)

    def _close(self, request: Request, answer: StreamedCompletion, begin: float) -> None:
        answer.close()
        seconds = time.monotonic() - begin
        usage = _usage(answer)
        self._metrics.prompt_tokens += usage["prompt_tokens"]
        self._metrics.generated_tokens += usage["completion_tokens"]
        self._metrics.request_seconds += seconds
        self._log(
            f"{_client(request)} {request.url.path} {usage['prompt_tokens']} tokens of prompts, "
            f"{usage['completion_tokens']} new tokens, {seconds:.2f} s"
        )


def _usage(answer: StreamedCompletion) -> Json:
    return usage_of(sum(map(len, answer.asked.prompts)), sum(choice.num_tokens for choice in answer.choices))


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _client(request: Request) -> str:
    return "?" if request.client is None else str(request.client.host)


@contextlib.contextmanager
def _as_api_errors() -> Iterator[None]:
    """Convert errors of the engine and the queue to API errors with an HTTP status."""
    try:
        yield
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full") from error
    except ServiceEnding as error:
        raise ApiError(503, str(error)) from error
    except (InputError, GenerationFailed) as error:
        raise ApiError(500, str(error)) from error


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.content(), error.status, headers)


async def _answer_unknown(request: Request, error: Exception) -> Response:
    status = HTTPStatus(getattr(error, "status_code", HTTPStatus.NOT_FOUND))
    said = f"{request.method} {request.url.path[:200]}: {status.phrase}; docs/serving.md lists the supported endpoints"
    return JSONResponse(ApiError(status, said).content(), status)


async def _answer_failure(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return JSONResponse(ApiError(500, f"the server failed on this request: {type(error).__name__}").content(), 500)


def _content_policy(page: str) -> str:
    """Build the page's content security policy: run its own script, and connect to this server."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
