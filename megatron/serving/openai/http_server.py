"""HTTP server of the application: a thread with its own event loop, separate from the generation loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.serving.openai.guard import AsgiApplication

_KEEP_ALIVE_S = 60
_FIRST_REQUEST_S = 30.0
_LAST_ANSWERS_S = 2
_BACKLOG = 512
_ROUND_S = 0.01


class _Connection(H11Protocol):
    """Connection that is closed if no request arrives in time, because it would occupy a slot for nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self.loop.call_later(_FIRST_REQUEST_S, self._close_silent)

    def _close_silent(self) -> None:
        is_silent = self.cycle is None  # uvicorn's annotation says that it is never None
        if is_silent:
            self.transport.close()


class HttpServer:
    """HTTP server; it is created before the model is loaded, so that a port in use is reported immediately.

    Raises:
        OSError: the port cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self, application: AsgiApplication) -> None:
        """Start the server, and return when it accepts requests."""
        config = uvicorn.Config(
            application,
            http=_Connection,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(_ROUND_S)

    def stop(self) -> None:
        """Stop accepting requests, and wait briefly for the running ones."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_LAST_ANSWERS_S + 1)
        self._socket.close()
