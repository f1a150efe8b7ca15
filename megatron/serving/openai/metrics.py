"""What the server has done, as the text that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Count requests, tokens and seconds; all of it on the thread of the HTTP server."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.clients_left = 0
        self.first_tokens = 0
        self.first_token_seconds = 0.0
        self.request_seconds = 0.0

    def text(self, waiting: int, running: int) -> str:
        """Return all metrics; ``waiting`` and ``running`` are the numbers of such requests."""
        return "".join(self._lines(waiting, running))

    def _lines(self, waiting: int, running: int) -> Iterator[str]:
        yield "# HELP megatron_requests_total Requests that were answered, by HTTP status.\n"
        yield "# TYPE megatron_requests_total counter\n"
        for status, number in sorted(self.requests.items()):
            yield f'megatron_requests_total{{status="{status}"}} {number}\n'
        for name, kind, help_text, value in (
            ("requests_running", "gauge", "Requests whose tokens are being generated.", running),
            ("requests_waiting", "gauge", "Requests that wait for their turn.", waiting),
            ("clients_left_total", "counter", "Requests whose client left before the end.", self.clients_left),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "counter", "Tokens that were generated.", self.generated_tokens),
            ("first_token_seconds_count", "counter", "Requests that got a first token.", self.first_tokens),
            ("first_token_seconds_sum", "counter", "Seconds until the first token.", self.first_token_seconds),
            ("request_seconds_sum", "counter", "Seconds that requests took.", self.request_seconds),
        ):
            yield f"# HELP megatron_{name} {help_text}\n# TYPE megatron_{name} {kind}\nmegatron_{name} {value:g}\n"
