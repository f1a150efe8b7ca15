"""Chat client for a server with OpenAI's API, with streamed responses."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from megatron.core.errors import InputError

_TIMEOUT_S = 600.0
_LONGEST_LINE = 2**24


class ChatFailed(Exception):
    """The server gave no response or only a part of one; the conversation can continue."""


class ChatClient:
    """Client of one server; ``fields``, such as ``temperature``, are added to every request.

    Raises:
        InputError: the address is invalid.
    """

    def __init__(self, url: str, key: str | None, fields: Mapping[str, Any]) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InputError(f"--url {url} is not a URL: {error}; use for example http://127.0.0.1:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"--url {url} is not a URL; use for example http://127.0.0.1:8000")
        self._url = url
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._fields = dict(fields)
        self.mode = "chat"
        """``completion`` if the server is this project's and its model has no chat template."""

    def model(self) -> str:
        """Return the name of the server's first model, which becomes the default of later requests.

        Raises:
            InputError: there is no server at the address, or it does not serve OpenAI's API.
        """
        try:
            with self._response("GET", "/v1/models", None) as response:
                entries = {str(entry["id"]): entry for entry in json.loads(response.read(_LONGEST_LINE))["data"]}
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"no server responds at {self._url}: {error}; start one with the command serve") from error
        except ChatFailed as error:
            raise InputError(f"the server at {self._url} rejects the request: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"the server at {self._url} does not serve OpenAI's API: {error!r}") from error
        if not entries:
            raise InputError(f"the server at {self._url} has no model")
        name: str = self._fields.setdefault("model", next(iter(entries)))
        self.mode = str(entries.get(name, {}).get("mode", self.mode))
        return name

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Yield the text of the response in pieces; a caller that stops early also cancels the request on the server.

        The result of a beam search is one piece.

        Raises:
            ChatFailed: the server rejects the request, fails or disconnects.
        """
        streams = self._fields.get("num_beams", 1) == 1
        body = json.dumps({**self._fields, "messages": list(messages), "stream": streams})
        try:
            with self._response("POST", "/v1/chat/completions", body) as response:
                if not streams:
                    yield json.loads(response.read(_LONGEST_LINE))["choices"][0]["message"]["content"]
                    return
                while line := response.readline(_LONGEST_LINE):
                    if not line.startswith(b"data: "):
                        continue
                    data = line[len(b"data: ") :].strip()
                    if data == b"[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ChatFailed(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("content") or ""
        except (OSError, http.client.HTTPException) as error:
            raise ChatFailed(f"the server at {self._url} closed the connection: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ChatFailed(f"the server at {self._url} sent a response that cannot be parsed: {error!r}") from error
        raise ChatFailed(f"the server at {self._url} closed the connection before the end of the answer")

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: str | None) -> Iterator[http.client.HTTPResponse]:
        connection = self._kind(self._host, self._port, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ChatFailed(_reason(response))
            yield response


def _reason(response: http.client.HTTPResponse) -> str:
    text = response.read(_LONGEST_LINE).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"status {response.status}: {text[:500]}"
