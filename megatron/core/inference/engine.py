"""Generate tokens from a GPT model, with a key-value cache, at any tensor- and pipeline-parallel size."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.core.errors import InputError
from megatron.core.inference.inference_request import Continuation, GenerationRequest, StopRule, check_request
from megatron.core.inference.prompt_batch import (
    BeamBatch,
    SampledBatch,
    Score,
    ScoredBatch,
    ScoredRow,
    batches_of_like_length,
    score_request,
)
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.inference.staged_model import StagedModel
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import PipelineLinks
from megatron.core.process_group import Group

TokenCallback = Callable[[int, int], None]
"""Callback that takes (prompt number, token) for each token as soon as it is generated."""

MAX_BATCH_SIZE = 32
"""Default limit on the prompts per batch."""


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig,
    eod_id: int | None,
    state: ParallelState,
    *,
    on_token: TokenCallback | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    links: PipelineLinks | None = None,
) -> list[list[int]]:
    """Generate up to ``max_new_tokens`` tokens for each prompt, up to but not including ``eod_id``.

    A wrapper of `InferenceEngine.generate` for a single call.
    """
    request = GenerationRequest(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=StopRule(end_tokens=frozenset() if eod_id is None else frozenset((eod_id,))),
    )
    engine = InferenceEngine(model, state, links, max_batch_size)
    return [continuation.tokens for continuation in engine.generate(request, on_token=on_token)]


class InferenceEngine:
    """Inference engine for one model, or for this rank's pipeline stage.

    ``links`` from `create_pipeline_links` are required if there is a pipeline. For ``further_chunks`` and ``twins``,
    see `StagedModel`.

    Raises:
        ConfigurationError: the model was built for training over several processes, or the links are missing.
    """

    def __init__(
        self,
        model: GPTModel,
        state: ParallelState,
        links: PipelineLinks | None = None,
        max_batch_size: int = MAX_BATCH_SIZE,
        *,
        further_chunks: Sequence[GPTModel] = (),
        twins: Group | None = None,
    ) -> None:
        self.model = model
        self.state = state
        self.max_batch_size = max_batch_size
        self.staged = StagedModel(model, state, links, further_chunks, twins)

    def generate(
        self,
        request: GenerationRequest,
        *,
        on_token: TokenCallback | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[Continuation]:
        """Generate a continuation of each prompt.

        Prompts of any length share batches of at most ``max_batch_size``, and a continuation does not depend on the
        other prompts. Every rank must pass the same request, returns the same continuations and calls ``on_token``.
        If ``is_cancelled`` is passed (on every rank), all ranks stop at the next token after it returns True on a rank.
        With ``request.beams``, a prompt takes one row per beam, and its tokens are available when its search ends.

        Raises:
            ConfigurationError: the sampling parameters are invalid.
            InputError: a prompt is empty, holds a token outside the vocabulary or leaves too few learned positions;
                or the model's logits are not finite.
            GenerationCancelled: ``is_cancelled`` returned True on a rank.
        """
        check_request(self.model.config, request)
        results = [Continuation(tokens=[]) for _ in request.prompts]
        with self._evaluating():
            run = self._run_sampled if request.beams is None else self._run_beams
            run(request, results, on_token, is_cancelled)
        return results

    def score(
        self,
        rows: Sequence[ScoredRow],
        *,
        max_batch_size: int | None = None,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> list[Score]:
        """Return the log-likelihood of the last tokens of each row, on every rank.

        Every rank must pass the same rows. ``on_batch`` is called with the size of each finished batch.

        Raises:
            InputError: a row cannot be scored, holds a token outside the vocabulary or has more tokens than the learned
                positions plus one; or the model's logits are not finite.
        """
        given = tuple(rows)
        for row in given:
            if row.tokens and not 0 <= row.tokens[-1] < self.model.config.vocab_size:
                raise InputError(
                    f"token {row.tokens[-1]} cannot be scored: the model's vocabulary is "
                    f"0..{self.model.config.vocab_size - 1}"
                )
        request = score_request(given)
        check_request(self.model.config, request)
        scores: dict[int, Score] = {}
        with self._evaluating():
            for numbers in batches_of_like_length(request.prompts, max_batch_size or self.max_batch_size):
                scores.update(zip(numbers, ScoredBatch(self.staged, given, numbers).run(), strict=True))
                on_batch(len(numbers))
        return [scores[number] for number in range(len(given))]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Disable dropout and autograd within the context."""
        trained = [chunk for chunk in self.staged.chunks if chunk.training]
        for chunk in trained:
            chunk.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            for chunk in trained:
                chunk.train()

    def _run_sampled(
        self,
        request: GenerationRequest,
        results: list[Continuation],
        on_token: TokenCallback | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        for numbers in batches_of_like_length(request.prompts, self.max_batch_size):
            batch = SampledBatch(self.staged, request, numbers, is_cancelled)
            for number, token in batch.run():
                results[number].tokens.append(token)
                if on_token is not None:
                    on_token(number, token)
            for number, values in batch.log_probabilities().items():
                results[number] = dataclasses.replace(results[number], log_probabilities=values)

    def _run_beams(
        self,
        request: GenerationRequest,
        results: list[Continuation],
        on_token: TokenCallback | None,
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        assert request.beams is not None
        prompts_at_once = max(1, self.max_batch_size // request.beams.num_beams)
        for numbers in batches_of_like_length(request.prompts, prompts_at_once):
            for number, continuation in BeamBatch(self.staged, request, numbers, is_cancelled).run().items():
                results[number] = continuation
                if on_token is not None:
                    for token in continuation.tokens:
                        on_token(number, token)
