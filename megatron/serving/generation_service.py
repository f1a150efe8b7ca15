"""Serving loop: one engine over several processes that batches and answers requests until a stop request.

The first rank has a queue of jobs. Every rank takes part in every round, even without work, so that no collective waits
for long and a signal to any process ends all of them. A round generates one token for each running sequence.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from megatron.core.collectives import all_gather_objects, all_reduce, broadcast_object
from megatron.core.errors import TrainingError
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.inference import (
    ContinuousEngine,
    GenerationRequest,
    News,
    Progress,
    PromptEnded,
    PromptFailed,
    PromptSearched,
)
from megatron.core.parallel_state import twin_group
from megatron.core.process_group import Group
from megatron.serving.job_queue import GenerationFailed, Job, JobQueue, ServiceEnding

_ROUND_S = 0.25
_MOST_SHOWN = 300

Changes = tuple[list[tuple[int, GenerationRequest]], list[int]]
"""Requests to start with their numbers, and the numbers of the canceled requests."""


def run_service(
    engine: ContinuousEngine, jobs: JobQueue | None, is_ending: Callable[[], bool], flight: FlightRecorder
) -> None:
    """Answer jobs until a rank is asked to end; every rank calls this, and the first rank passes its queue.

    If every rank fails in the same way, all running requests get the error and the loop continues with the next ones.
    ``flight`` records every round, including those without work.

    Raises:
        TrainingError: ranks fail in different ways, or only some of them fail, and so are no longer in sync.
    """
    flight.enter("serve")
    state = engine.state
    agreement = twin_group(state.world)
    device = next(engine.model.parameters()).device
    running: dict[int, int] = {}
    while True:
        flight.tick()
        is_busy = engine.is_busy
        changes: Changes = ([], [])
        if jobs is not None:
            changes = _take(engine, jobs, 0.0 if is_busy else _ROUND_S)
        round_ = torch.tensor([int(is_ending()), int(any(changes))], device=device)
        all_reduce(round_, state.world, op="max")
        must_end, has_changes = round_.tolist()
        if must_end:
            if jobs is not None:
                jobs.finish(error=ServiceEnding("the server is shutting down"))
            return
        if has_changes:
            changes = broadcast_object(changes, state.world)
        elif not is_busy:
            continue
        news, failure = _step(engine, changes, running, agreement)
        _agree(failure, state.world, agreement, device)
        if failure:
            engine.reset()
            running.clear()
            if jobs is not None:
                jobs.finish(error=GenerationFailed(f"the server failed on this request: {failure}"))
        else:
            over = _end(engine, news, running)
            if jobs is not None:
                _tell(jobs, news, over)


def _take(engine: ContinuousEngine, jobs: JobQueue, timeout_s: float) -> Changes:
    """Take new requests from the queue, as many as the engine has room for, and the canceled ones."""
    begun: list[tuple[int, GenerationRequest]] = []
    room = engine.room

    def add(job: Job) -> None:
        begun.append((job.number, job.request))

    def has_room() -> bool:
        return engine.has_room and sum(len(request.prompts) for _, request in begun) < room

    left = jobs.take(has_room, add, timeout_s)
    return begun, left


def _step(
    engine: ContinuousEngine, changes: Changes, running: dict[int, int], agreement: Group
) -> tuple[list[News], str]:
    """Add and drop requests, generate one token for each sequence, and return the events or the failure.

    ``running`` counts the unfinished prompts of each request.
    """
    begun, left = changes
    try:
        for number in left:
            running.pop(number, None)
        engine.drop(left)
        for number, request in begun:
            running[number] = len(request.prompts)
            engine.add(number, request)
        return engine.step() if engine.is_busy else [], ""
    except Exception as error:  # noqa: BLE001 - whatever a request brings about must not end all the others
        if agreement.is_first:
            traceback.print_exc()
        return [], f"{type(error).__name__}: {str(error)[:_MOST_SHOWN]}"


def _agree(failure: str, world: Group, agreement: Group, device: torch.device) -> None:
    """Check that all ranks failed in the same way, before any client gets a result.

    Raises:
        TrainingError: they did not.
    """
    has_failed = torch.tensor(int(bool(failure)), device=device)
    all_reduce(has_failed, world, op="max")
    if not has_failed.item():
        return
    kinds = set(all_gather_objects(failure.partition(":")[0], agreement))
    if len(kinds) > 1:
        raise TrainingError(
            f"ranks disagree about a request: {failure or 'it succeeded on this rank'}; the server stops"
        )


def _end(engine: ContinuousEngine, news: Sequence[News], running: dict[int, int]) -> list[int]:
    """Update ``running`` for the prompts that ended, and return the finished requests."""
    over: list[int] = []
    for number, happened in news:
        if isinstance(happened, PromptFailed) and number in running:
            del running[number]
            engine.drop([number])
            over.append(number)
        elif isinstance(happened, (PromptEnded, PromptSearched)) and number in running:
            running[number] -= 1
            if not running[number]:
                del running[number]
                over.append(number)
    return over


def _tell(jobs: JobQueue, news: Sequence[News], over: Sequence[int]) -> None:
    told: dict[int, list[Progress]] = defaultdict(list)
    for number, happened in news:
        told[number].append(happened)
    for number, own in told.items():
        jobs.tell(number, own)
    jobs.finish(over)
