"""One engine over several processes that answers requests one after the other until it is asked to end.

The first rank has a queue of jobs; every rank takes part in every round, the idle ones included, so that no collective
waits for long and a signal to any process ends all of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from megatron.core.collectives import all_reduce, broadcast_object
from megatron.core.errors import InputError
from megatron.core.flight.recorder import FlightRecorder
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.request import Continuation, GenerationCancelled, GenerationRequest

MAX_WAITING = 256
"""How many requests may wait for their turn."""
_ROUND_S = 0.25


class ServiceEnding(Exception):
    """Report a request that is not answered because the service ends, or has too many before it."""


class Job:
    """Hold one request and, once ``done`` is set, its result."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.done = threading.Event()
        self._result: Sequence[Continuation] | Exception = ServiceEnding("the server is ending; send the request again")

    def finish(self, result: Sequence[Continuation] | Exception) -> None:
        """Set the result, or the error in its place."""
        self._result = result
        self.done.set()

    def wait(self) -> Sequence[Continuation]:
        """Wait for the result.

        Raises:
            InputError: the model cannot answer.
            ServiceEnding: the service ends first.
        """
        self.done.wait()
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class JobQueue:
    """Pass jobs from the threads that take requests to the loop that runs them, in order."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Job] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, request: GenerationRequest) -> Sequence[Continuation]:
        """Wait for a request's turn and return its result.

        Raises:
            InputError: the model cannot answer.
            ServiceEnding: the service ends first, or too many requests wait.
        """
        job = Job(request)
        with self._lock:
            if self._is_closed:
                raise ServiceEnding("the server is ending")
            try:
                self._waiting.put_nowait(job)
            except queue.Full:
                raise ServiceEnding(f"{MAX_WAITING} requests wait already; send this one later") from None
        return job.wait()

    def next(self, timeout_s: float) -> Job | None:
        """Return the oldest job, or None where none comes in time."""
        try:
            return self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Take no more jobs and send those away that wait."""
        with self._lock:
            self._is_closed = True
        while (job := self.next(0.0)) is not None:
            job.finish(ServiceEnding("the server is ending"))


def run_service(
    engine: InferenceEngine, jobs: JobQueue | None, is_ending: Callable[[], bool], flight: FlightRecorder
) -> None:
    """Answer jobs until a rank is asked to end; every rank calls, the first one with its queue.

    ``flight`` is told of every round and every token, the idle rounds included.
    """

    def is_cancelled() -> bool:
        flight.tick()
        return is_ending()

    flight.enter("serve")
    state = engine.state
    device = next(engine.model.parameters()).device
    while True:
        flight.tick()
        job = None if jobs is None else jobs.next(_ROUND_S)
        round_ = torch.tensor([int(is_ending()), int(job is not None)], device=device)
        all_reduce(round_, state.world, op="max")
        must_end, has_job = round_.tolist()
        if must_end:
            if job is not None:
                job.finish(ServiceEnding("the server is ending"))
            return
        if not has_job:
            continue
        request: GenerationRequest = broadcast_object(None if job is None else job.request, state.world)
        result = _answer(engine, request, is_cancelled)
        if job is not None:
            job.finish(result)
        if isinstance(result, ServiceEnding):
            return


def _answer(
    engine: InferenceEngine, request: GenerationRequest, is_ending: Callable[[], bool]
) -> Sequence[Continuation] | InputError | ServiceEnding:
    """Return the result of a request, of the same kind on every rank."""
    try:
        return engine.generate(request, is_cancelled=is_ending)
    except GenerationCancelled:
        return ServiceEnding("the server is ending")
    except InputError as error:
        return error
