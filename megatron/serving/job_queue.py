"""Requests on their way from whoever takes them to the loop that runs them, and what they learn on the way back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from megatron.core.errors import MegatronError
from megatron.core.inference import Continuation, GatheredAnswer, GenerationRequest, Progress

MAX_WAITING = 256
"""How many requests may wait for their turn."""

Listener = Callable[[Sequence[Progress] | Exception], None]
"""Called on the loop's thread with what happened at a step, or with the error that ends the request."""


class ServiceEnding(Exception):
    """Report a request that is not answered because the service ends."""


class QueueFull(ServiceEnding):
    """Report a request that is not answered because too many wait before it."""


class GenerationFailed(MegatronError):
    """Report a request that made the program fail, on all ranks alike; the next one can be answered."""


class Job:
    """Hold one request and whom to tell of its progress."""

    def __init__(self, request: GenerationRequest, listener: Listener) -> None:
        self.request = request
        self.listener = listener
        self.number = -1


class JobQueue:
    """Pass jobs from the threads that take requests to the loop that runs them, in order; safe in several threads."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._left: list[int] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._is_closed = False

    def submit(self, request: GenerationRequest) -> Sequence[Continuation]:
        """Wait for a request's turn and return its result.

        Raises:
            InputError: the model cannot answer.
            GenerationFailed: the program fails at it.
            ServiceEnding: the service ends first, or too many requests wait.
        """
        answer = GatheredAnswer(request)
        done = threading.Event()
        failures: list[Exception] = []

        def listen(news: Sequence[Progress] | Exception) -> None:
            try:
                if isinstance(news, Exception):
                    raise news
                for happened in news:
                    answer.add(happened)
            except Exception as error:  # noqa: BLE001 - handed to the thread that waits
                failures.append(error)
            if failures or answer.is_whole:
                done.set()

        self.start(Job(request, listen))
        done.wait()
        if failures:
            raise failures[0]
        return answer.continuations()

    def start(self, job: Job) -> None:
        """Let a job wait for its turn.

        Raises:
            QueueFull: too many requests wait.
            ServiceEnding: the service ends.
        """
        with self._changed:
            if self._is_closed:
                raise ServiceEnding("the server is ending")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests wait already; send this one later")
            self._waiting.append(job)
            self._changed.notify()

    def leave(self, job: Job) -> None:
        """Give a job up, wherever it is; its listener is told nothing more."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            elif job.number in self._running:
                del self._running[job.number]
                self._left.append(job.number)
                self._changed.notify()

    def take(self, has_room: Callable[[], bool], add: Callable[[Job], None], timeout_s: float) -> list[int]:
        """Hand waiting jobs over while there is room, and return the numbers of those that have left.

        Waits until there is something to do, at most so long.
        """
        with self._changed:
            if timeout_s > 0.0:
                self._changed.wait_for(lambda: self._waiting or self._left, timeout_s)
            while self._waiting and has_room():
                job = self._waiting.popleft()
                job.number = next(self._numbers)
                self._running[job.number] = job
                add(job)
            left, self._left = self._left, []
            return left

    def tell(self, number: int, news: Sequence[Progress]) -> None:
        """Tell a running job what happened; one that has left hears nothing."""
        with self._changed:
            job = self._running.get(number)
        if job is not None:
            job.listener(news)

    def finish(self, numbers: Sequence[int] | None = None, error: Exception | None = None) -> None:
        """Take jobs off the running ones, by default all, and tell them the error if there is one."""
        with self._changed:
            chosen = list(self._running) if numbers is None else numbers
            jobs = [job for number in chosen if (job := self._running.pop(number, None)) is not None]
        for job in jobs:
            if error is not None:
                job.listener(error)

    def counts(self) -> tuple[int, int]:
        """Return how many jobs wait and how many run."""
        with self._changed:
            return len(self._waiting), len(self._running)

    def close(self) -> None:
        """Take no more jobs and send those away that wait or run."""
        with self._changed:
            self._is_closed = True
            jobs = [*self._waiting, *self._running.values()]
            self._waiting.clear()
            self._running.clear()
        for job in jobs:
            job.listener(ServiceEnding("the server is ending"))
