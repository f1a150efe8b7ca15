"""Prompts whose likeliest continuations are searched for, each prompt as several rows of the model's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.core.errors import InputError
from megatron.core.inference.beam_search import BeamSearch, Candidate
from megatron.core.inference.prompt_batch import PromptBatch
from megatron.core.inference.request import Continuation, GenerationRequest
from megatron.core.inference.sampling import forbid_pairs, forbid_repeats, penalize
from megatron.core.inference.staged_model import StagedModel
from megatron.core.precision import arithmetic_dtype

# The token of a candidate where a row's logits are not finite: all ranks must learn it.
_NOT_FINITE = -1


class BeamBatch(PromptBatch):
    """Search for the likeliest continuations of each prompt of a batch.

    The last stage scores, and every rank is given the same candidates and keeps the same books. The prompts are shown
    to the model once; then the rows of the cache follow the texts that go on.
    """

    def __init__(
        self,
        staged: StagedModel,
        request: GenerationRequest,
        numbers: Sequence[int],
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        super().__init__(staged, request, numbers, is_cancelled)
        assert request.beams is not None
        self.num_beams = request.beams.num_beams
        end_tokens = request.stop.end_tokens
        self.searches = [BeamSearch(request.beams, request.max_new_tokens, end_tokens) for _ in numbers]

    def run(self) -> dict[int, Continuation]:
        """Return the continuation of each prompt by its number, when all searches have ended.

        Raises:
            InputError: the logits are not finite, or no text is left.
        """
        for _ in self.steps():
            pass
        return self.results()

    def steps(self) -> Iterator[None]:
        """Search one token further at each step, until all searches have ended.

        Raises:
            InputError: the logits are not finite.
        """
        logits = self.see_prompts()
        rows = [prompt for prompt in range(len(self.numbers)) for _ in range(self.num_beams)]
        if logits is not None:
            logits = logits[:, rows]
        self.prompts = self.prompts.select_rows(torch.tensor(rows, device=self.staged.device))
        self._follow(rows)
        for step in range(self.request.max_new_tokens):
            if step > 0:
                last = [text[-1] for search in self.searches for text in search.texts]
                logits = self.see_tokens(last, step)
            rows = self._advance(self._candidates(logits, step))
            if all(search.is_done for search in self.searches):
                break
            self._follow(rows)
            yield
        self.staged.finish()

    def results(self) -> dict[int, Continuation]:
        """Return the continuation of each prompt by its number, once all searches have ended.

        Raises:
            InputError: no text is left.
        """
        return {number: self._continuation(search) for number, search in zip(self.numbers, self.searches, strict=True)}

    def _continuation(self, search: BeamSearch) -> Continuation:
        if not search.finished:
            size = self.request.sampling.no_repeat_ngram_size
            raise InputError(f"no_repeat_ngram_size {size} leaves no text to choose; raise it or ask for fewer tokens")
        return Continuation(tokens=list(search.finished[0].tokens), hypotheses=tuple(search.finished))

    def _follow(self, rows: Sequence[int]) -> None:
        self.cache.select_rows(torch.tensor(rows, device=self.staged.device))

    def _advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[int]:
        """Take a step of every search and return from which row of the batch each row goes on."""
        rows = []
        for prompt, (search, own) in enumerate(zip(self.searches, candidates, strict=True)):
            rows += [prompt * self.num_beams + beam for beam in search.advance(own)]
        return rows

    def _candidates(self, logits: torch.Tensor | None, step: int) -> list[list[Candidate]]:
        """Return the likeliest ways to go on of every prompt, on every rank."""
        vocab_size = self.staged.model.config.vocab_size
        count = min(self.searches[0].num_candidates(), self.num_beams * vocab_size)
        best = torch.zeros(2, len(self.numbers), count, dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            self._score(self.whole_logits(logits), count, best)
        self.share(best, logits)
        places, values = best.tolist()
        for prompt, own in enumerate(places):
            if own[0] == _NOT_FINITE:
                raise self.not_finite(prompt * self.num_beams, step)
        return [
            [
                Candidate(int(place) // vocab_size, int(place) % vocab_size, value)
                for place, value in zip(own_places, own_values, strict=True)
            ]
            for own_places, own_values in zip(places, values, strict=True)
        ]

    def _score(self, logits: torch.Tensor, count: int, best: torch.Tensor) -> None:
        """Fill the two rows of ``best``: places among a prompt's beams x vocabulary, sums of log-probabilities.

        Shapes: ``logits: [prompts * num_beams, v]``, ``best: [2, prompts, count]``.
        """
        finite = logits.isfinite().all(dim=-1).view(len(self.numbers), self.num_beams).all(dim=-1)
        if not bool(finite.all()):
            best[0] = torch.where(finite, 0, _NOT_FINITE)[:, None]
            return
        log_probabilities = logits.to(arithmetic_dtype(logits.dtype)).log_softmax(dim=-1)
        texts = [
            [*self.request.prompts[number], *text]
            for number, search in zip(self.numbers, self.searches, strict=True)
            for text in search.texts
        ]
        sampling, num_new = self.request.sampling, len(self.searches[0].texts[0])
        allowed = penalize(log_probabilities, texts, num_new, sampling)
        allowed = forbid_pairs(allowed, [text[-1] for text in texts], self.request.never)
        allowed = forbid_repeats(allowed, texts, sampling.no_repeat_ngram_size)
        before = [score for search in self.searches for score in search.scores]
        sums = allowed + torch.tensor(before, dtype=allowed.dtype, device=allowed.device)[:, None]
        found = sums.view(len(self.numbers), -1).topk(count, dim=-1)
        best[0], best[1] = found.indices, found.values
