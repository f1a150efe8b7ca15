"""Prompts whose tokens are chosen one after the other, each row by itself: drawn, or the likeliest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.core.errors import InputError
from megatron.core.inference.prompt_batch import PromptBatch
from megatron.core.inference.request import GenerationRequest
from megatron.core.inference.sampling import add_bias, choose_tokens, forbid_pairs, forbid_repeats, penalize
from megatron.core.inference.staged_model import StagedModel
from megatron.core.precision import arithmetic_dtype
from megatron.core.tensor_parallel.random import stream_seed

# What is chosen where a row's logits are not finite, or every token is forbidden: all ranks must learn it.
_NOT_FINITE = -1
_NOTHING_LEFT = -2
_FAILED = -3


class SampledBatch(PromptBatch):
    """Continue each prompt of a batch from a random stream of its own."""

    def __init__(
        self,
        staged: StagedModel,
        request: GenerationRequest,
        numbers: Sequence[int],
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        super().__init__(staged, request, numbers, is_cancelled)
        self.generators = [
            torch.Generator(staged.device).manual_seed(stream_seed(request.sampling.seed, "sampling", (number,)))
            for number in numbers
        ]
        self.texts = [list(request.prompts[number]) for number in numbers]
        self.new_values: list[list[float]] = [[] for _ in numbers]

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield (prompt number, token) step by step until every prompt has ended."""
        logits = self.see_prompts()
        running = [True] * len(self.numbers)
        stop = self.request.stop
        for step in range(self.request.max_new_tokens):
            last = [text[-1] for text in self.texts]
            if step > 0:
                logits = self.see_tokens(last, step)
            tokens, values = self._choose(logits, last, step)
            for row, token in enumerate(tokens):
                self.texts[row].append(token)
                running[row] = running[row] and token not in stop.end_tokens
                if running[row]:
                    self.new_values[row].append(values[row])
                    running[row] = not stop.closes(last[row], token)
                    yield self.numbers[row], token
            if not any(running):
                break
        self.staged.finish()

    def log_probabilities(self) -> dict[int, list[float]]:
        """Return each prompt's, by its number; none where they were not asked for."""
        if not self.request.log_probabilities:
            return {}
        of_prompts = torch.cat(self.prompt_values, dim=1)
        return {
            number: of_prompts[row, start : self.length - 1].tolist() + self.new_values[row]
            for row, (number, start) in enumerate(zip(self.numbers, self.prompts.starts.tolist(), strict=True))
        }

    def _choose(self, logits: torch.Tensor | None, last: Sequence[int], step: int) -> tuple[list[int], list[float]]:
        """Return the next token of every row and its log-probability, chosen on the last stage, on every rank."""
        failure: RuntimeError | None = None
        chosen = torch.zeros(2, len(self.numbers), dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            whole = self.whole_logits(logits)
            try:
                self._choose_from(whole, last, step, chosen)
            except RuntimeError as error:  # the other stages wait for what is chosen
                chosen[0] = _FAILED
                failure = error
        self.share(chosen, logits)
        tokens = [int(token) for token in chosen[0].tolist()]
        if _NOT_FINITE in tokens:
            raise self.not_finite(tokens.index(_NOT_FINITE), step)
        if _NOTHING_LEFT in tokens:
            size = self.request.sampling.no_repeat_ngram_size
            raise InputError(f"no_repeat_ngram_size {size} leaves no token to choose at token {step + 1}; raise it")
        if _FAILED in tokens:
            raise RuntimeError(f"no token can be chosen at token {step + 1}") from failure
        return tokens, chosen[1].tolist()

    def _choose_from(self, logits: torch.Tensor, last: Sequence[int], step: int, chosen: torch.Tensor) -> None:
        """Fill the two rows of ``chosen``: tokens, log-probabilities.

        Shapes: ``logits: [b, v]``, ``chosen: [2, b]``.
        """
        finite = logits.isfinite().all(dim=-1)
        if not bool(finite.all()):
            chosen[0] = torch.where(finite, 0, _NOT_FINITE)
            return
        sampling = self.request.sampling
        allowed = add_bias(logits, [self.request.bias] * len(last))
        num_new = [len(text) - len(self.request.prompts[n]) for n, text in zip(self.numbers, self.texts, strict=True)]
        allowed = penalize(allowed, self.texts, num_new, sampling)
        allowed = forbid_pairs(allowed, last, self.request.never)
        allowed = forbid_repeats(allowed, self.texts, sampling.no_repeat_ngram_size)
        left = allowed.isfinite().any(dim=-1)
        if not bool(left.all()):
            chosen[0] = torch.where(left, 0, _NOTHING_LEFT)
            return
        tokens = choose_tokens(allowed, sampling.at_step(step), self.generators)
        chosen[0] = tokens
        if self.request.log_probabilities:
            wide = logits.to(arithmetic_dtype(logits.dtype))
            chosen[1] = wide.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
