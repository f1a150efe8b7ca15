"""PUT /api over HTTP: one thread a connection, which hands requests to the service and waits for the answer."""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron.serving.generation_api import ApiTranslator
from megatron.serving.job_queue import JobQueue
from megatron.serving.put_api import PutApi

PATH = "/api"
MAX_BODY_BYTES = 16 * 1024 * 1024
_MOST_DIGITS = 20
_IDLE_CONNECTION_S = 60.0


class GenerationServer(ThreadingHTTPServer):
    """Take requests for one model; made before the model is loaded, so that a taken port is known at once.

    Raises:
        OSError: the port cannot be had.
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
        """Return where requests go to."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}{PATH}"

    def server_bind(self) -> None:
        """Take the port; `HTTPServer` would also look up the machine's name, which can take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def start(self, translator: ApiTranslator, seed: int) -> None:
        """Begin to take requests."""
        self.api = PutApi(translator, self.jobs, seed)
        self.server_activate()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Take no more requests, send the waiting ones away, and let those leave that are being answered."""
        self.shutdown()
        self.jobs.close()
        with self._changed:
            self._changed.wait_for(lambda: self._answering == 0, timeout_s)
        self.server_close()

    def begin_answer(self) -> None:
        """Count a request that must leave before the end."""
        with self._changed:
            self._answering += 1

    def end_answer(self) -> None:
        """Count it no more."""
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
        """Answer a request."""
        self.server.begin_answer()
        start = time.monotonic()
        try:
            body = self._read_body()
            if body is None:
                return
            assert self.server.api is not None, "requests are taken once there is a model"
            status, content, line = self.server.api.answer(body)
            self._send(status, content)
            if line:
                print(f"{self.client_address[0]} {status.value} {line}, {time.monotonic() - start:.2f} s", flush=True)
        finally:
            self.server.end_answer()

    def do_GET(self) -> None:
        """Answer with the one method that is offered."""
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, f"PUT a JSON object with prompts to {PATH}")

    do_POST = do_DELETE = do_GET

    def _read_body(self) -> bytes | None:
        """Return the body of the request, or None after it has been refused."""
        lengths = self.headers.get_all("Content-Length", [])
        length = lengths[0].strip() if lengths else ""
        self.close_connection = True
        if self.path.rstrip("/") != PATH:
            self._send(HTTPStatus.NOT_FOUND, f"there is only PUT {PATH}")
        elif "Transfer-Encoding" in self.headers:
            self._send(HTTPStatus.BAD_REQUEST, "Transfer-Encoding is not taken: send the body whole, with its length")
        elif not lengths:
            self._send(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        elif len(lengths) > 1 or not (length.isascii() and length.isdecimal()):
            self._send(HTTPStatus.BAD_REQUEST, f"Content-Length {', '.join(lengths)[:80]} is not a number of bytes")
        elif len(length) > _MOST_DIGITS or int(length) > MAX_BODY_BYTES:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY_BYTES} bytes are taken")
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
        """Print nothing: a request has its own line."""
