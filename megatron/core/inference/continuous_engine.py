"""Continuous-batching engine: many concurrent requests on one model, each started as soon as it fits."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

import torch

from megatron.core.errors import InputError
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest, PromptFailed, PromptSearched
from megatron.core.inference.prompt_batch import BeamBatch, batches_of_like_length
from megatron.core.inference.running_batch import News, Row, RunningBatch
from megatron.core.inference.staged_model import StagedModel

_MOST_SEARCHES = 4


class ContinuousEngine:
    """Engine that runs the prompts of many requests in one batch, interleaved with steps of beam searches.

    At most ``max_rows`` prompts run at once. The number of rows times the full length of the longest row is at most
    ``max_tokens``, except for a single row. Other prompts wait in FIFO order. Every rank must make the same calls.
    """

    def __init__(self, engine: InferenceEngine, max_rows: int, max_tokens: int) -> None:
        self.model = engine.model
        self.state = engine.state
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self._staged = engine.staged
        self._batch = RunningBatch(self._staged)
        self._waiting: deque[Row] = deque()
        self._searches: dict[int, Iterator[list[News]]] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._batch.rows or self._waiting or self._searches)

    @property
    def has_room(self) -> bool:
        """Whether another request may be added, because no earlier request is waiting."""
        return not self._waiting and self.room > 0 and len(self._searches) < _MOST_SEARCHES

    @property
    def room(self) -> int:
        return self.max_rows - len(self._batch.rows)

    @property
    def num_rows(self) -> int:
        return len(self._batch.rows)

    def add(self, job: int, request: GenerationRequest) -> None:
        """Add the request number ``job``, which must have passed `check_request`."""
        if request.beams is not None:
            self._searches[job] = _search(self._staged, job, request, self.max_rows)
        else:
            device = self._staged.device
            self._waiting.extend(Row(job, request, prompt, device) for prompt in range(len(request.prompts)))

    def drop(self, jobs: Collection[int]) -> None:
        """Abort requests."""
        with torch.inference_mode():
            self._batch.drop(jobs)
        self._waiting = deque(row for row in self._waiting if row.job not in jobs)
        for job in jobs:
            self._searches.pop(job, None)

    def reset(self) -> None:
        """Abort all requests and clear the KV cache."""
        self._batch = RunningBatch(self._staged)
        self._waiting.clear()
        self._searches.clear()

    def step(self) -> list[News]:
        """Advance everything that runs by one token, and return the progress with job numbers."""
        news: list[News] = []
        self.model.eval()
        with torch.inference_mode():
            while self._waiting and self._fits(self._waiting[0]):
                self._batch.add(self._waiting.popleft())
            if self._batch.rows:
                news += self._batch.step()
            for job, search in list(self._searches.items()):
                found = next(search, None)
                if found is None:
                    del self._searches[job]
                else:
                    news += found
        return news

    def _fits(self, row: Row) -> bool:
        rows = [*self._batch.rows, row]
        if len(rows) == 1:
            return True
        return len(rows) <= self.max_rows and len(rows) * max(row.full_length for row in rows) <= self.max_tokens


def _search(staged: StagedModel, job: int, request: GenerationRequest, max_rows: int) -> Iterator[list[News]]:
    """Run the beam search of each prompt, one token per step."""
    assert request.beams is not None
    for numbers in batches_of_like_length(request.prompts, max(1, max_rows // request.beams.num_beams)):
        batch = BeamBatch(staged, request, numbers, is_cancelled=None)
        try:
            for _ in batch.steps():
                yield []
            found = batch.results()
        except InputError as error:
            yield [(job, PromptFailed(number, error)) for number in numbers]
        else:
            yield [(job, PromptSearched(number, continuation)) for number, continuation in found.items()]
