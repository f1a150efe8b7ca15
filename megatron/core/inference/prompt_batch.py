"""Static batches of prompts: sampling, scoring and beam search.

Prompts of unequal length are padded on the left, and the padding is masked. All rows end in the same column, so that
all rows of a step have the same cache position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_last_dim, all_reduce, broadcast
from megatron.core.errors import InputError
from megatron.core.inference.beam_search import BeamSearch, Candidate
from megatron.core.inference.inference_request import Continuation, GenerationCancelled, GenerationRequest
from megatron.core.inference.sampling import add_bias, choose_tokens, forbid_pairs, forbid_repeats, penalize
from megatron.core.inference.staged_model import StagedModel
from megatron.core.ops import CAUSAL, AttentionPattern
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import stream_seed, vocab_sharded_cross_entropy
from megatron.core.transformer import KeyValueCache

_PADDING = 0


@dataclass(frozen=True, eq=False)
class PaddedPrompts:
    """Left-padded tokens of a batch, the start column of each row, and whether there is padding.

    Shapes: ``tokens: [b, longest prompt]``; ``starts: [b]``.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    has_padding: bool

    @property
    def lengths(self) -> torch.Tensor:
        """Return the number of tokens of each prompt. Shapes: ``-> [b]``."""
        return self.tokens.shape[1] - self.starts

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Return each row's position ids in the columns ``[start, end)``; 0 for padding.

        Shapes: ``-> [b, end - start]``.
        """
        columns = torch.arange(start, end, device=self.starts.device)
        return (columns[None, :] - self.starts[:, None]).clamp(min=0)

    def select_rows(self, rows: torch.Tensor) -> PaddedPrompts:
        """Return the rows with these indices, which may repeat."""
        return PaddedPrompts(self.tokens[rows], self.starts[rows], self.has_padding)

    def pattern(self, start: int, end: int) -> AttentionPattern:
        """Return the attention pattern of the query columns ``[start, end)`` over the key columns below ``end``.

        A padding column attends only to itself, because a fully masked row would give NaN.
        """
        if not self.has_padding:
            return CAUSAL
        queries = torch.arange(start, end, device=self.starts.device)[:, None]
        keys = torch.arange(end, device=self.starts.device)[None, :]
        real = keys[None] >= self.starts[:, None, None]
        return AttentionPattern(mask=((keys <= queries) & real | (keys == queries)).unsqueeze(1))


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> PaddedPrompts:
    """Pad the prompts on the left to one batch."""
    longest = max(map(len, prompts))
    rows = [[_PADDING] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    starts = [longest - len(prompt) for prompt in prompts]
    return PaddedPrompts(torch.tensor(rows, device=device), torch.tensor(starts, device=device), any(starts))


def batches_of_like_length(prompts: Sequence[Sequence[int]], max_batch_size: int) -> Iterator[list[int]]:
    """Yield batches of prompt numbers with similar lengths, to minimize padding."""
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(prompts), max_batch_size):
        yield sorted(by_length[start : start + max_batch_size])


_PROMPT_TOKENS_AT_ONCE = 1024


class PromptBatch:
    """Batch of some prompts of a request, with their KV cache.

    ``is_cancelled`` is called before every pass, on every rank.
    """

    def __init__(
        self,
        staged: StagedModel,
        request: GenerationRequest,
        numbers: Sequence[int],
        is_cancelled: Callable[[], bool] | None,
    ) -> None:
        self.staged = staged
        self.state = staged.state
        self.request = request
        self.numbers = numbers
        self.is_cancelled = is_cancelled
        self.prompts = pad_left([request.prompts[number] for number in numbers], staged.device)
        self.length = self.prompts.tokens.shape[1]
        # The last generated token is never an input.
        self.cache = KeyValueCache(self.length + max(request.max_new_tokens - 1, 0))
        self.prompt_values: list[torch.Tensor] = []

    def see_prompts(self) -> torch.Tensor | None:
        """Prefill the prompts, a chunk of positions at a time, and return the logits of the last position."""
        logits = None
        for start, end in self.stretches():
            tokens = self.prompts.tokens[:, start:end]
            logits = self._forward(tokens, start, all_positions=self.request.log_probabilities)
            if self.request.log_probabilities:
                self.prompt_values.append(self._values_of_prompts(logits, start, end))
        return None if logits is None else logits[-1:]

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end columns of each prefill chunk."""
        stretch = max(1, _PROMPT_TOKENS_AT_ONCE // len(self.numbers))
        for start in range(0, self.length, stretch):
            yield start, min(start + stretch, self.length)

    def see_tokens(self, tokens: Sequence[int], step: int) -> torch.Tensor | None:
        """Run the model on every row's token of the previous step, and return the logits.

        Shapes: ``-> [1, b, v/tp]``.
        """
        return self._forward(torch.tensor(tokens, device=self.staged.device)[:, None], self.length + step - 1)

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the logits of every row over the whole vocabulary.

        Shapes: ``[s, b, v/tp] -> [b, v]``.
        """
        return gather_logits(logits[-1], self.staged.model.config.vocab_size, self.state.tp)

    def share(self, values: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Broadcast ``values`` from the first rank of the last stage, whose ``logits`` are not None, to every rank."""
        self.staged.share(values, logits)

    def not_finite(self, row: int, step: int) -> InputError:
        """Return the error for a row whose logits are not finite at a step."""
        position = self.length + step - 1 - int(self.prompts.starts[row])
        return InputError(
            f"the model's logits are not finite at position {position}: its weights contain NaN, or its activations "
            f"overflow {self.staged.model.config.params_dtype}; use a different checkpoint"
        )

    def _forward(self, tokens: torch.Tensor, start: int, all_positions: bool = False) -> torch.Tensor | None:
        """Run the model on tokens of the columns from ``start``; return the logits on the last stage.

        Shapes: ``[b, s] -> [s or 1, b, v/tp]``.
        """
        self._stop_if_cancelled()
        end = start + tokens.shape[1]
        positions, pattern = self.prompts.positions(start, end), self.prompts.pattern(start, end)
        has_two_ropes = self.staged.model.config.longrope_length is not None
        return self.staged.forward(
            *(tokens, positions, pattern, self.cache),
            last_position_only=not all_positions,
            sequence_lengths=self.prompts.lengths if has_two_ropes else None,
        )

    def _stop_if_cancelled(self) -> None:
        if self.is_cancelled is None:
            return
        asked = torch.tensor(int(self.is_cancelled()), device=self.staged.device)
        all_reduce(asked, self.state.model_parallel, op="max")
        if asked.item():
            self.staged.finish()
            raise GenerationCancelled("generation was canceled because the program is stopping")

    def _values_of_prompts(self, logits: torch.Tensor | None, start: int, end: int) -> torch.Tensor:
        """Return the log-probability of the token after each of the columns ``[start, end)``, on every rank.

        Shapes: ``[s, b, v/tp] -> [b, s]``. The value of the prompt's last column is 0, because its next token is not
        known yet.
        """
        values = torch.zeros(len(self.numbers), end - start, dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            model = self.staged.model
            behind = self.prompts.tokens[:, start + 1 : end + 1].t()
            known = logits[: behind.shape[0]]
            losses = vocab_sharded_cross_entropy(known, behind.contiguous(), model.config.vocab_size, self.state.tp)
            values[:, : behind.shape[0]] = -losses.t()
        broadcast(values, self.state.pp, source=self.state.pp.size - 1)
        return values.cpu()


def gather_logits(logits: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
    """Gather the logits of the whole vocabulary, without its padding, on every rank.

    Shapes: ``[b, v/tp] -> [b, vocab_size]``.
    """
    return all_gather_last_dim(logits, tp)[:, :vocab_size]


# Error codes that replace a token if a row has no valid choice, so that all ranks learn of the failure.
_NOT_FINITE = -1
_NOTHING_LEFT = -2
_FAILED = -3


class SampledBatch(PromptBatch):
    """Batch that samples a continuation of each prompt, with one random stream per prompt."""

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
        """Yield (prompt number, token) pairs until every prompt has ended."""
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
        """Return the log-probabilities by prompt number; empty if they were not requested."""
        if not self.request.log_probabilities:
            return {}
        of_prompts = torch.cat(self.prompt_values, dim=1)
        return {
            number: of_prompts[row, start : self.length - 1].tolist() + self.new_values[row]
            for row, (number, start) in enumerate(zip(self.numbers, self.prompts.starts.tolist(), strict=True))
        }

    def _choose(self, logits: torch.Tensor | None, last: Sequence[int], step: int) -> tuple[list[int], list[float]]:
        """Choose the next token of every row on the last stage; return tokens and log-probabilities on every rank."""
        failure: RuntimeError | None = None
        chosen = torch.zeros(2, len(self.numbers), dtype=torch.float64, device=self.staged.device)
        if logits is not None:
            whole = self.whole_logits(logits)
            try:
                self._choose_from(whole, last, step, chosen)
            except RuntimeError as error:  # the other stages wait for the tokens
                chosen[0] = _FAILED
                failure = error
        self.share(chosen, logits)
        tokens = [int(token) for token in chosen[0].tolist()]
        if _NOT_FINITE in tokens:
            raise self.not_finite(tokens.index(_NOT_FINITE), step)
        if _NOTHING_LEFT in tokens:
            size = self.request.sampling.no_repeat_ngram_size
            raise InputError(f"no_repeat_ngram_size {size} excludes every token at position {step + 1}; raise it")
        if _FAILED in tokens:
            raise RuntimeError(f"no token can be selected at position {step + 1}") from failure
        return tokens, chosen[1].tolist()

    def _choose_from(self, logits: torch.Tensor, last: Sequence[int], step: int, chosen: torch.Tensor) -> None:
        """Fill the two rows of ``chosen`` with tokens and log-probabilities.

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


@dataclasses.dataclass(frozen=True)
class ScoredRow:
    """Tokens of a text, of which the last ``num_scored`` are to be scored."""

    tokens: tuple[int, ...]
    num_scored: int


@dataclasses.dataclass(frozen=True)
class Score:
    """Total log-probability of a row's scored tokens, and whether each of them was the most likely."""

    log_probability: float
    is_greedy: bool


def score_request(rows: tuple[ScoredRow, ...]) -> GenerationRequest:
    """Return the request that scores the rows: each row without its last token, which is only a target.

    Raises:
        InputError: a row has fewer than two tokens, or all or none of its tokens are to be scored.
    """
    for row in rows:
        if not 0 < row.num_scored < len(row.tokens):
            raise InputError(
                f"cannot score {row.num_scored} of {len(row.tokens)} tokens; score at least one token, after at least "
                "one other token"
            )
    return GenerationRequest(prompts=tuple(row.tokens[:-1] for row in rows), max_new_tokens=0, log_probabilities=True)


class ScoredBatch(PromptBatch):
    """Batch that scores rows."""

    def __init__(self, staged: StagedModel, rows: tuple[ScoredRow, ...], numbers: list[int]) -> None:
        super().__init__(staged, score_request(rows), numbers, None)
        self._rows = [rows[number] for number in numbers]
        last = torch.tensor([[row.tokens[-1]] for row in self._rows], device=staged.device)
        self._targets = torch.cat([self.prompts.tokens[:, 1:], last], dim=1)
        columns = torch.arange(self.length, device=staged.device)
        counts = torch.tensor([row.num_scored for row in self._rows], device=staged.device)
        self._is_scored = columns[None, :] >= self.length - counts[:, None]

    def run(self) -> list[Score]:
        """Return the scores of the rows, on every rank.

        Raises:
            InputError: the model's logits are not finite.
        """
        values = [torch.zeros(2, len(self._rows), 0, dtype=torch.float64, device=self.staged.device)]
        for start, end in self.stretches():
            logits = self._forward(self.prompts.tokens[:, start:end], start, all_positions=True)
            found = torch.zeros(2, len(self._rows), end - start, dtype=torch.float64, device=self.staged.device)
            if logits is not None:
                self._look_up(logits, start, end, found)
            self.share(found, logits)
            values.append(found)
        self.staged.finish()
        log_probabilities, misses = torch.cat(values, dim=2).sum(dim=2).tolist()
        for row, value in enumerate(log_probabilities):
            if value != value:
                raise self.not_finite(row, 0)
        return [Score(value, missed == 0) for value, missed in zip(log_probabilities, misses, strict=True)]

    def _look_up(self, logits: torch.Tensor, start: int, end: int, found: torch.Tensor) -> None:
        """Fill ``found`` for the columns ``[start, end)``: log-probabilities, and 1 if another token is more likely.

        Shapes: ``logits: [s, b, v/tp]``, ``found: [2, b, s]``.
        """
        chosen = self._is_scored[:, start:end]
        targets = self._targets[:, start:end][chosen]
        whole = gather_logits(logits.transpose(0, 1)[chosen], self.staged.model.config.vocab_size, self.state.tp)
        wide = whole.to(arithmetic_dtype(whole.dtype)).log_softmax(dim=-1)
        found[0][chosen] = wide.gather(1, targets[:, None]).squeeze(1).to(found.dtype)
        found[1][chosen] = (whole.argmax(dim=-1) != targets).to(found.dtype)


class BeamBatch(PromptBatch):
    """Batch that runs beam search for each prompt.

    The last stage computes the scores. Every rank receives the same candidates and tracks the same beams. The prompts
    are prefilled once. Then the rows of the KV cache are reordered to follow the surviving beams.
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
        """Run all searches and return the continuation of each prompt by its number.

        Raises:
            InputError: the logits are not finite, or no candidate text is left.
        """
        for _ in self.steps():
            pass
        return self.results()

    def steps(self) -> Iterator[None]:
        """Advance all searches by one token per step, until all have ended.

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
        """Return the continuation of each prompt by its number. All searches must have ended.

        Raises:
            InputError: no candidate text is left.
        """
        return {number: self._continuation(search) for number, search in zip(self.numbers, self.searches, strict=True)}

    def _continuation(self, search: BeamSearch) -> Continuation:
        if not search.finished:
            size = self.request.sampling.no_repeat_ngram_size
            raise InputError(
                f"no_repeat_ngram_size {size} excludes every continuation; raise it or request fewer tokens"
            )
        return Continuation(tokens=list(search.finished[0].tokens), hypotheses=tuple(search.finished))

    def _follow(self, rows: Sequence[int]) -> None:
        self.cache.select_rows(torch.tensor(rows, device=self.staged.device))

    def _advance(self, candidates: Sequence[Sequence[Candidate]]) -> list[int]:
        """Advance every search by one step and return the source row in the batch of each new row."""
        rows = []
        for prompt, (search, own) in enumerate(zip(self.searches, candidates, strict=True)):
            rows += [prompt * self.num_beams + beam for beam in search.advance(own)]
        return rows

    def _candidates(self, logits: torch.Tensor | None, step: int) -> list[list[Candidate]]:
        """Return the most likely candidates of every prompt, on every rank."""
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
        """Fill the two rows of ``best``: indices into a prompt's beams x vocabulary, and sums of log-probabilities.

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
