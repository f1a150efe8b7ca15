"""Thread-safe queue between the threads that receive requests and the loop that runs them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from megatron.core.errors import MegatronError
from megatron.core.inference import Continuation, GatheredAnswer, GenerationRequest, Progress

MAX_WAITING = 256
"""Maximum number of waiting requests."""

Listener = Callable[[Sequence[Progress] | Exception], None]
"""Called on the loop's thread with the events of a step, or with the error that ends the request."""


class ServiceEnding(Exception):
    """The service ends before it answered a request."""


class QueueFull(ServiceEnding):
    """Too many requests are waiting to accept another one."""


class GenerationFailed(MegatronError):
    """A request made the program fail in the same way on all ranks; the next request can be answered."""


class Job:
    """One request with the listener for its progress."""

    def __init__(self, request: GenerationRequest, listener: Listener) -> None:
        self.request = request
        self.listener = listener
        self.number = -1


class JobQueue:
    """Queue of jobs from the threads that receive requests to the loop that runs them, in order; thread-safe."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._left: list[int] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._is_closed = False

    def submit(self, request: GenerationRequest) -> Sequence[Continuation]:
        """Queue a request, wait until it is finished, and return its result.

        Raises:
            InputError: the model cannot answer.
            GenerationFailed: the program failed while it ran this request.
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
        """Queue a job.

        Raises:
            QueueFull: too many requests wait.
            ServiceEnding: the service ends.
        """
        with self._changed:
            if self._is_closed:
                raise ServiceEnding("the server is shutting down")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests are already waiting; try again later")
            self._waiting.append(job)
            self._changed.notify()

    def leave(self, job: Job) -> None:
        """Cancel a waiting or running job; its listener gets no further events."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            elif job.number in self._running:
                del self._running[job.number]
                self._left.append(job.number)
                self._changed.notify()

    def take(self, has_room: Callable[[], bool], add: Callable[[Job], None], timeout_s: float) -> list[int]:
        """Pass waiting jobs to ``add`` while there is room, and return the numbers of the canceled ones.

        Wait up to ``timeout_s`` until there is something to do.
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
        """Pass events to the listener of a running job; a canceled job gets none."""
        with self._changed:
            job = self._running.get(number)
        if job is not None:
            job.listener(news)

    def finish(self, numbers: Sequence[int] | None = None, error: Exception | None = None) -> None:
        """Remove jobs (by default all) from the running ones, and report the error to them if there is one."""
        with self._changed:
            chosen = list(self._running) if numbers is None else numbers
            jobs = [job for number in chosen if (job := self._running.pop(number, None)) is not None]
        for job in jobs:
            if error is not None:
                job.listener(error)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of waiting and of running jobs."""
        with self._changed:
            return len(self._waiting), len(self._running)

    def close(self) -> None:
        """Reject new jobs, and cancel those that wait or run."""
        with self._changed:
            self._is_closed = True
            jobs = [*self._waiting, *self._running.values()]
            self._waiting.clear()
            self._running.clear()
        for job in jobs:
            job.listener(ServiceEnding("the server is shutting down"))
