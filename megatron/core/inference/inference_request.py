"""Generation requests, the progress of their prompts, and their results.

All classes can be pickled and sent to other processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from megatron.core.errors import ConfigurationError, InputError, MegatronError
from megatron.core.inference.beam_search import BeamConfig, Hypothesis
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.models.gpt import GPTConfig


class GenerationCancelled(MegatronError):
    """A generation was cancelled on request of a process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPairs:
    """All pairs of a token in ``first`` that is directly followed by a token in ``second``."""

    first: frozenset[int] = frozenset()
    second: frozenset[int] = frozenset()

    def contain(self, before: int, token: int) -> bool:
        return before in self.first and token in self.second


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRule:
    """Tokens that end a text before its maximum length.

    ``end_tokens``, such as the end-of-document token, are excluded from the text. ``closing_tokens`` and the second
    token of ``closing_pairs`` are included as its last token.
    """

    end_tokens: frozenset[int] = frozenset()
    closing_tokens: frozenset[int] = frozenset()
    closing_pairs: TokenPairs = TokenPairs()

    def closes(self, before: int, token: int) -> bool:
        return token in self.closing_tokens or self.closing_pairs.contain(before, token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Prompts and the parameters of their continuations.

    ``max_new_tokens`` is 0 to request only the log-probabilities of the prompts. ``never`` are pairs whose second token
    must not follow the first. ``bias`` has (token, bias of its logit) pairs. With ``beams``, beam search replaces
    sampling, and only ``no_repeat_ngram_size`` and ``repetition_penalty`` of ``sampling`` apply. ``log_probabilities``
    requests the log-probabilities of prompt and new tokens, ``new_log_probabilities`` of new tokens only, and
    ``num_alternatives`` the number of most likely tokens at each position.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    stop: StopRule = StopRule()
    never: TokenPairs = TokenPairs()
    bias: tuple[tuple[int, float], ...] = ()
    log_probabilities: bool = False
    new_log_probabilities: bool = False
    num_alternatives: int = 0
    beams: BeamConfig | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation:
    """Generated continuation of one prompt.

    If requested, ``log_probabilities`` are the natural log-probabilities at temperature 1 of every prompt token except
    the first, followed by every token of ``tokens``. After a beam search, ``hypotheses`` are the finished texts, best
    first, and ``tokens`` belong to the best one.
    """

    tokens: list[int]
    log_probabilities: list[float] | None = None
    hypotheses: tuple[Hypothesis, ...] = ()


def context_length(config: GPTConfig, max_tokens: int) -> int:
    """Return the maximum number of tokens of a prompt plus its continuation: at most the model's positions.

    The limit also applies to rotary positions, which could exceed it but only beyond the training distribution. A
    model without a number of positions is limited by ``max_tokens`` only.
    """
    return min(max_tokens, config.max_position_embeddings or max_tokens)


def new_tokens_that_fit(config: GPTConfig, lengths: Collection[int], wanted: int) -> int:
    """Return how many of ``wanted`` new tokens, but at least 1, fit the context of prompts of these lengths.

    With LongRoPE, short texts remain short.
    """
    longest = max(lengths)
    room = context_length(config, longest + wanted) - longest
    limit = config.longrope_length
    short = [] if limit is None else [length for length in lengths if length <= limit]
    if limit is not None and short:
        room = min(room, limit + 1 - max(short))
    return max(room, 1)


def check_request(config: GPTConfig, request: GenerationRequest) -> None:
    """Validate a request for the model.

    Raises:
        ConfigurationError: the sampling or beam search parameters are invalid.
        InputError: a prompt is empty, holds a token outside the vocabulary, leaves too few learned positions or crosses
            LongRoPE's original length; or the request asks for no output.
    """
    if problems := [*request.sampling.problems(), *_beam_problems(config, request)]:
        raise ConfigurationError(problems)
    count = request.max_new_tokens
    if count < 0 or (count == 0 and not request.log_probabilities):
        raise InputError(f"{count} tokens to generate is not positive; request at least one")
    for token, _ in request.bias:
        if not 0 <= token < config.vocab_size:
            raise InputError(
                f"the logit bias contains token {token}, which is outside the model's vocabulary "
                f"0..{config.vocab_size - 1}"
            )
    for number, prompt in enumerate(request.prompts, start=1):
        _check_prompt(config, prompt, count, f"prompt {number} of {len(request.prompts)}")


def _beam_problems(config: GPTConfig, request: GenerationRequest) -> list[str]:
    if request.beams is None:
        return []
    problems = list(request.beams.problems(config.vocab_size, len(request.stop.end_tokens)))
    drawn = dataclasses.replace(
        request.sampling, no_repeat_ngram_size=0, repetition_penalty=1.0, seed=SamplingConfig.seed, greedy=False
    )
    if drawn != SamplingConfig():
        problems.append("beam search does not sample: omit temperature, top_k and top_p, or beam search")
    if request.bias:
        problems.append("beam search does not support a logit bias: omit one of them")
    if request.log_probabilities or request.new_log_probabilities:
        problems.append("beam search returns scores instead of log-probabilities: request one of them")
    if request.stop.closing_tokens or request.stop.closing_pairs != TokenPairs():
        problems.append("beam search ends only at an end token: do not stop at the end of a line, or omit beam search")
    return problems


def _check_prompt(config: GPTConfig, prompt: tuple[int, ...], count: int, place: str) -> None:
    if not prompt:
        raise InputError(f"{place} has no tokens; at least one is required")
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise InputError(
                f"{place} contains token {token}, which is outside the model's vocabulary 0..{config.vocab_size - 1}; "
                "use the tokenizer that the model was trained with"
            )
    length = len(prompt) + count
    if config.position_embedding_type == "learned_absolute" and length > config.max_position_embeddings:
        raise InputError(
            f"{place} has {len(prompt)} tokens; with {count} tokens to generate the length is {length}, but the model "
            f"has {config.max_position_embeddings} learned positions; shorten it or generate fewer"
        )
    limit = config.longrope_length
    if limit is not None and len(prompt) <= limit < length - 1:
        raise InputError(
            f"{place} has {len(prompt)} tokens; with {count} tokens to generate the length is {length}, but LongRoPE "
            f"rotates all positions differently in texts of more than {limit} tokens; generate at most "
            f"{limit + 1 - len(prompt)}, or use a prompt of more than {limit} tokens"
        )


Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens at a position with their log-probabilities, in descending order."""


@dataclass(frozen=True)
class TokenValue:
    """Log-probability of a token, and the most likely tokens at its position."""

    log_probability: float
    alternatives: Alternatives = ()


@dataclass(frozen=True)
class PromptSeen:
    """Prefill of a prompt is done, with the values of all prompt tokens except the first if requested."""

    prompt: int
    values: tuple[TokenValue, ...]


@dataclass(frozen=True)
class NewToken:
    """New token of a text."""

    prompt: int
    token: int
    value: TokenValue | None


@dataclass(frozen=True)
class PromptEnded:
    """End of a continuation, by its stop rule or its maximum length."""

    prompt: int
    reason: Literal["stop", "length"]


@dataclass(frozen=True)
class PromptSearched:
    """Result of a beam search."""

    prompt: int
    found: Continuation


@dataclass(frozen=True)
class PromptFailed:
    """Error that ends a prompt."""

    prompt: int
    error: Exception


Progress = PromptSeen | NewToken | PromptEnded | PromptSearched | PromptFailed


class GatheredAnswer:
    """Collector of the continuations of a request's prompts."""

    def __init__(self, request: GenerationRequest) -> None:
        self._has_values = request.log_probabilities or request.new_log_probabilities
        self._continuations = [Continuation(tokens=[]) for _ in request.prompts]
        self._values: list[list[float]] = [[] for _ in request.prompts]
        self._running = set(range(len(request.prompts)))

    @property
    def is_whole(self) -> bool:
        return not self._running

    def add(self, happened: Progress) -> None:
        """Add the progress of a prompt.

        Raises:
            Exception: the error of a prompt that failed.
        """
        match happened:
            case PromptFailed(_, error):
                raise error
            case PromptSeen(prompt, values):
                self._values[prompt] += [value.log_probability for value in values]
            case NewToken(prompt, token, value):
                self._continuations[prompt].tokens.append(token)
                if value is not None:
                    self._values[prompt].append(value.log_probability)
            case PromptSearched(prompt, found):
                self._continuations[prompt] = found
                self._running.discard(prompt)
            case PromptEnded(prompt):
                self._running.discard(prompt)

    def continuations(self) -> list[Continuation]:
        """Return the continuation of each prompt."""
        if not self._has_values:
            return self._continuations
        return [
            dataclasses.replace(continuation, log_probabilities=values)
            for continuation, values in zip(self._continuations, self._values, strict=True)
        ]
