"""ASGI middleware in front of the application: API key, limits on requests, and Prometheus metrics."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from megatron.serving.openai.request_fields import ApiError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of requests, tokens and seconds, used only on the HTTP server's thread."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.clients_left = 0
        self.first_tokens = 0
        self.first_token_seconds = 0.0
        self.request_seconds = 0.0

    def text(self, waiting: int, running: int) -> str:
        """Format all metrics; ``waiting`` and ``running`` are the current numbers of requests."""
        return "".join(self._lines(waiting, running))

    def _lines(self, waiting: int, running: int) -> Iterator[str]:
        yield "# HELP megatron_requests_total Requests that were answered, by HTTP status.\n"
        yield "# TYPE megatron_requests_total counter\n"
        for status, number in sorted(self.requests.items()):
            yield f'megatron_requests_total{{status="{status}"}} {number}\n'
        for name, kind, help_text, value in (
            ("requests_running", "gauge", "Requests whose tokens are being generated.", running),
            ("requests_waiting", "gauge", "Requests that wait in the queue.", waiting),
            ("clients_left_total", "counter", "Requests whose client disconnected before the end.", self.clients_left),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens that were generated.", self.generated_tokens),
            ("first_token_seconds_count", "counter", "Requests that got a first token.", self.first_tokens),
            ("first_token_seconds_sum", "counter", "Seconds until the first token.", self.first_token_seconds),
            ("request_seconds_sum", "counter", "Seconds that requests took.", self.request_seconds),
        ):
            yield f"# HELP megatron_{name} {help_text}\n# TYPE megatron_{name} {kind}\nmegatron_{name} {value:g}\n"


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApplication = Callable[[Scope, Receive, Send], Awaitable[None]]

_READ_ANYWAY = 8
"""A body that is too long is still read up to this multiple of the limit."""
OPEN_PATHS = ("/", "/health")
"""Paths that need no API key."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    body_bytes: int = 16 * 1024 * 1024
    body_seconds: float = 30.0
    requests: int = 512


class Guard:
    """Middleware that rejects requests without the key, too many at once, and bodies that are too long or too slow.

    The application gets the whole body in one message.
    """

    def __init__(self, application: AsgiApplication, limits: Limits, api_key: str | None, metrics: Metrics) -> None:
        self._application = application
        self._limits = limits
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._num_requests = 0
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._application(scope, receive, send)
            return
        send = self._counting(send)
        if self._num_requests >= self._limits.requests:
            await _refuse(send, ApiError(503, f"{self._limits.requests} requests are already open; try again later"))
            return
        self._num_requests += 1
        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await _refuse(send, error)
        else:
            if body is not None:
                await self._application(scope, _replay(body, receive), send)
        finally:
            self._num_requests -= 1

    def _counting(self, send: Send) -> Send:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests[message["status"]] += 1
            await send(message)

        return count

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._key):
            raise ApiError(
                401,
                ("the API key is missing or wrong; send the header Authorization: Bearer KEY"),
                code="invalid_api_key",
            )

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; return None if the client disconnects before its end."""
        most = self._limits.body_bytes
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and (len(lengths[0]) > 20 or int(lengths[0]) > _READ_ANYWAY * most):
            raise ApiError(413, f"the body has {lengths[0][:20].decode()} bytes; at most {most} are accepted")
        try:
            return await asyncio.wait_for(_read(receive, most), self._limits.body_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body was not received within {self._limits.body_seconds:g} s") from None


async def _read(receive: Receive, most: int) -> bytes | None:
    body = bytearray()
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size <= most:
            body += part
        is_over = not message.get("more_body", False)
        # Read and discard the excess: many clients read no response before they have sent the whole body.
        if size > most and (is_over or size > _READ_ANYWAY * most):
            raise ApiError(413, f"the body has more than {most} bytes, which is the maximum")
        if is_over:
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that yields the body once, and then the later messages."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.content()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # The unread rest of a body must not be parsed as the next request.
        (b"connection", b"close"),
    ]
    if error.status in (429, 503):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
