"""Serve some requests on several ranks, one of which is given up, and write the answers to a metrics file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.flight_recorder import FlightRecorder
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.inference_request import GatheredAnswer, GenerationRequest, Progress
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.serving.generation_service import run_service
from megatron.serving.job_queue import Job, JobQueue
from tests.emulated_cuda.scenarios.programs.inference import GREEDY, PROMPTS, build_engine

REQUESTS = (
    GenerationRequest(prompts=PROMPTS, max_new_tokens=4, sampling=GREEDY, log_probabilities=True),
    GenerationRequest(
        prompts=PROMPTS[:2],
        max_new_tokens=3,
        sampling=SamplingConfig(top_k=9, seed=3, frequency_penalty=0.5),
        new_log_probabilities=True,
        num_alternatives=2,
    ),
    GenerationRequest(prompts=PROMPTS[1:], max_new_tokens=7, sampling=GREEDY),
    GenerationRequest(prompts=PROMPTS[1:], max_new_tokens=2, sampling=GREEDY),
)
FAILS_AT = 7
"""The number of tokens of a request at which every rank fails."""


class FailingEngine(ContinuousEngine):
    """Fail on all ranks alike at one request, after it has begun."""

    def add(self, job: int, request: GenerationRequest) -> None:
        """Begin with a request."""
        super().add(job, request)
        if request.max_new_tokens == FAILS_AT:
            raise RuntimeError("this request fails")


class Caller:
    """Ask for one answer after the other, on the thread of the service: so it is the same at each run."""

    def __init__(self, jobs: JobQueue) -> None:
        self.answers: list[object] = []
        self.is_done = False
        self._jobs = jobs
        self._requests = iter(REQUESTS)
        self._ask()

    def _ask(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.is_done = True
            return
        answer = GatheredAnswer(request)

        def listen(news: Sequence[Progress] | Exception) -> None:
            if isinstance(news, Exception):
                self.answers.append(str(news))
                self._ask()
                return
            for happened in news:
                answer.add(happened)
            if answer.is_whole:
                texts = answer.continuations()
                self.answers.append([[list(text.tokens), text.log_probabilities] for text in texts])
                self._give_one_up()
                self._ask()

        self._jobs.start(Job(request, listen))

    def _give_one_up(self) -> None:
        """Start a request, and leave it at its first token."""

        def leave(news: Sequence[Progress] | Exception) -> None:
            self._jobs.leave(job)

        job = Job(GenerationRequest(prompts=PROMPTS[:1], max_new_tokens=20, sampling=GREEDY), leave)
        self._jobs.start(job)


def main(path: str, pp: str, tp: str) -> None:
    """Serve on all ranks until the first one has the answers, and write them."""
    torch.manual_seed(1)
    engine = build_engine(ParallelSizes(pp=int(pp), tp=int(tp)))
    jobs = JobQueue() if dist.get_rank() == 0 else None
    caller = None if jobs is None else Caller(jobs)
    with torch.no_grad():
        run_service(
            FailingEngine(engine, 12, 400), jobs, lambda: caller is not None and caller.is_done, FlightRecorder()
        )
    if caller is not None:
        with open(path, "w") as file:
            for answer in caller.answers:
                file.write(json.dumps({"answer": answer}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
