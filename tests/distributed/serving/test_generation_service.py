"""A request at which all ranks fail is answered with that; where ranks part, all of them end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.core.errors import TrainingError
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.inference_request import GenerationRequest, NewToken, Progress, PromptEnded
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.serving.generation_service import run_service
from megatron.serving.job_queue import GenerationFailed, JobQueue
from tests.harness.distributed import run_distributed

GOOD, BAD, ONE_RANK_IS_BAD = 1, 2, 3


class Engine:
    """Stand in for a model that continues a prompt with itself, and fails at some."""

    has_room = True
    room = 1

    def __init__(self, tp: int) -> None:
        self.state = create_parallel_state(ParallelSizes(tp=tp))
        self.model = torch.nn.Linear(1, 1)
        self.requests: dict[int, GenerationRequest] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self.requests)

    def add(self, job: int, request: GenerationRequest) -> None:
        self.requests[job] = request

    def drop(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            self.requests.pop(job, None)

    def reset(self) -> None:
        self.requests.clear()

    def step(self) -> list[tuple[int, Progress]]:
        """Answer or fail."""
        ((job, request),) = self.requests.items()
        kind = request.prompts[0][0]
        if kind == BAD or (kind == ONE_RANK_IS_BAD and dist.get_rank() == 1):
            raise RuntimeError("probability tensor contains either inf, nan or element < 0")
        self.requests.clear()
        return [(job, NewToken(0, kind, None)), (job, PromptEnded(0, "length"))]


def serve(tp: int, kinds: Sequence[int]) -> list[str]:
    """Run a service that is asked for each kind of prompt in turn; return what was answered, and how it ended."""
    jobs = JobQueue() if dist.get_rank() == 0 else None
    answers: list[str] = []
    is_asked_to_end = threading.Event()

    def ask() -> None:
        assert jobs is not None
        for kind in kinds:
            try:
                answers.append(
                    f"tokens {jobs.submit(GenerationRequest(prompts=((kind,),), max_new_tokens=1))[0].tokens}"
                )
            except GenerationFailed as error:
                answers.append(f"failed: {error}")
        is_asked_to_end.set()

    if jobs is not None:
        threading.Thread(target=ask, daemon=True).start()
    try:
        run_service(cast(ContinuousEngine, cast(Any, Engine(tp))), jobs, is_asked_to_end.is_set, FlightRecorder())
        answers.append("ended")
    except TrainingError as error:
        answers.append(str(error))
    return answers


@pytest.mark.parametrize("tp", [1, 2])
def test_a_failure_of_all_ranks_is_an_answer_and_not_the_end(tp: int) -> None:
    first, *others = run_distributed(tp, serve, tp, [GOOD, BAD, BAD, GOOD])
    failed = (
        "failed: the server failed on this request: RuntimeError: probability tensor contains either inf, nan or "
        "element < 0"
    )
    assert first == ["tokens [1]", failed, failed, "tokens [1]", "ended"]
    assert others == [["ended"]] * (tp - 1)


def test_a_failure_of_one_rank_ends_all() -> None:
    first, other = run_distributed(2, serve, 2, [GOOD, ONE_RANK_IS_BAD])
    assert first == ["tokens [1]", "ranks disagree about a request: it succeeded on this rank; the server stops"]
    assert "ranks disagree about a request: RuntimeError: probability tensor" in other[0]
