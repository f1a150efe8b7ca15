"""The wish of whoever started a server that it end."""

from __future__ import annotations

import signal
from types import FrameType


class EndRequest:
    """Note SIGTERM and SIGINT. Before ``serving`` is set they end the program at once, with status 0."""

    def __init__(self) -> None:
        self.asked = False
        self.serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.serving:
            raise SystemExit(0)
