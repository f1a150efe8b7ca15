"""Client of Megatron-LM's text generation server (PUT /api)."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from typing import Any

from megatron.core.errors import InputError

_ADDRESS = re.compile(r"(?:http://)?([A-Za-z0-9.-]+):(\d{1,5})(?:/api)?/?")
_TIMEOUT_S = 600.0
_LARGEST_ANSWER = 2**24


class PutClient:
    """Client of the server at an address such as ``localhost:5000``; ``fields`` are added to every request."""

    def __init__(self, host: str, port: int, fields: Mapping[str, Any]) -> None:
        self._host, self._port = host, port
        self._fields = dict(fields)

    def text(self, prompt: str) -> str:
        """Return the prompt with its continuation.

        Raises:
            InputError: no server responds, or it rejects the request.
        """
        place = f"{self._host}:{self._port}"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            body = json.dumps({"prompts": [prompt], **self._fields})
            connection.request("PUT", "/api", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read(_LARGEST_ANSWER).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise InputError(f"no server responds at {place}: {error}; start one with the command serve") from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise InputError(f"the server at {place} reports status {response.status}: {answer[:500].strip()}")
        try:
            return str(json.loads(answer)["text"][0])
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"the server at {place} does not serve Megatron-LM's PUT /api: {error!r}") from error


def server_address(text: str) -> tuple[str, int] | None:
    """Return host and port of an address such as ``localhost:5000``; None for any other text."""
    match = _ADDRESS.fullmatch(text)
    return None if match is None else (match[1], int(match[2]))
