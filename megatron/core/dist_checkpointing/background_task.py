"""Work that goes on in a thread of its own while its owner does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """Run ``work`` in a thread from now on; its result, or its error, waits for whoever asks.

    The thread never keeps a process alive: a process that ends before the work does leaves it half done.
    """

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._results: list[Result] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Return whether `result` would return, or raise, at once."""
        return not self._thread.is_alive()

    def result(self) -> Result:
        """Wait for the work and return what it returned.

        Raises:
            Exception: what the work raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:  # noqa: BLE001 raised by `result`, in the thread that asks for it
            self._error = error
