"""One engine over several processes that answers requests one after the other until it is asked to end.

The first rank has a queue of jobs; every rank takes part in every round, the idle ones included, so that no collective
waits for long and a signal to any process ends all of them.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence

import torch

from megatron.core.collectives import all_gather_objects, all_reduce, broadcast_object
from megatron.core.errors import InputError, MegatronError, TrainingError
from megatron.core.flight.recorder import FlightRecorder
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.request import Continuation, GenerationCancelled, GenerationRequest
from megatron.core.parallel_state import twin_group
from megatron.core.process_group import Group

MAX_WAITING = 256
"""How many requests may wait for their turn."""
_ROUND_S = 0.25
_MOST_SHOWN = 300
_NOTHING: Sequence[Continuation] | Exception = ()


class ServiceEnding(Exception):
    """Report a request that is not answered because the service ends, or has too many before it."""


class GenerationFailed(MegatronError):
    """Report a request that made the program fail, on all ranks alike; the next one can be answered."""


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
            GenerationFailed: the program fails at it.
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
            GenerationFailed: the program fails at it.
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

    A request at which every rank fails in the same way is answered with that, and the next one follows. ``flight`` is
    told of every round and every token, the idle rounds included.

    Raises:
        TrainingError: a request made ranks fail in different ways, or some of them only: they are apart from then on.
    """

    def is_cancelled() -> bool:
        flight.tick()
        return is_ending()

    flight.enter("serve")
    state = engine.state
    agreement = twin_group(state.world)
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
        result = _answer(engine, request, is_cancelled, agreement)
        if job is not None:
            job.finish(result)
        if isinstance(result, ServiceEnding):
            return


def _answer(
    engine: InferenceEngine, request: GenerationRequest, is_ending: Callable[[], bool], agreement: Group
) -> Sequence[Continuation] | Exception:
    """Return the result of a request, of the same kind on every rank."""
    failure, result = "", _NOTHING
    try:
        result = engine.generate(request, is_cancelled=is_ending)
    except GenerationCancelled:
        result = ServiceEnding("the server is ending")
    except InputError as error:
        result = error
    except Exception as error:  # noqa: BLE001 - whatever a request brings about must not end all the others
        failure = f"{type(error).__name__}: {str(error)[:_MOST_SHOWN]}"
        if agreement.is_first:
            traceback.print_exc()
    kinds = set(all_gather_objects(failure.partition(":")[0], agreement))
    if len(kinds) > 1:
        raise TrainingError(f"ranks do not agree about a request: {failure or 'it was answered here'}; the server ends")
    return GenerationFailed(f"the server failed at this request: {failure}") if failure else result
