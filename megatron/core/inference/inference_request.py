"""Generation requests, the progress of their prompts, and their results.

All are plain values that one process can send to others.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from megatron.core.errors import ConfigurationError, InputError, MegatronError
from megatron.core.inference.beam_search import BeamConfig, Hypothesis
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.models.gpt import GPTConfig


class GenerationCancelled(MegatronError):
    """Report a generation that was given up because a process was asked to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPairs:
    """Hold every pair of a token of ``first`` and, right behind it, one of ``second``."""

    first: frozenset[int] = frozenset()
    second: frozenset[int] = frozenset()

    def contain(self, before: int, token: int) -> bool:
        return before in self.first and token in self.second


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRule:
    """Hold which tokens end a text before it has its full length.

    ``end_tokens`` are left out of it, such as the end of a document; ``closing_tokens`` and the second token of
    ``closing_pairs`` are its last.
    """

    end_tokens: frozenset[int] = frozenset()
    closing_tokens: frozenset[int] = frozenset()
    closing_pairs: TokenPairs = TokenPairs()

    def closes(self, before: int, token: int) -> bool:
        return token in self.closing_tokens or self.closing_pairs.contain(before, token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Hold prompts and how each of them is to be continued.

    ``max_new_tokens`` is 0 where only the log-probabilities of the prompts are wanted. ``never`` are pairs of which
    the second token is not chosen behind the first. ``bias`` has (token, addend to its logit) pairs. With ``beams`` the
    likeliest texts are searched for and nothing is drawn: of ``sampling`` only ``no_repeat_ngram_size`` and
    ``repetition_penalty`` count. ``log_probabilities`` are those of the prompt and of what follows;
    ``new_log_probabilities`` ask for the latter alone, and ``num_alternatives`` for the likeliest tokens beside each.
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
    """Hold what follows one prompt.

    Where they were asked for, ``log_probabilities`` are the natural logarithms of what the model, at temperature 1,
    gives to every token of the prompt but the first, then to every token of ``tokens``. Of a beam search ``hypotheses``
    are the finished texts, the best first; ``tokens`` are the best one's.
    """

    tokens: list[int]
    log_probabilities: list[float] | None = None
    hypotheses: tuple[Hypothesis, ...] = ()


def context_length(config: GPTConfig, max_tokens: int) -> int:
    """Return how many tokens a prompt and its continuation may have together: at most the model's positions.

    Positions need not be learned: with rotary ones a longer text is computed, and is far from what the model was
    trained on. A model without a number of positions has no limit but ``max_tokens``.
    """
    return min(max_tokens, config.max_position_embeddings or max_tokens)


def check_request(config: GPTConfig, request: GenerationRequest) -> None:
    """Refuse what the model cannot do.

    Raises:
        ConfigurationError: the sampling or the beams cannot be.
        InputError: a prompt is empty, holds a token outside the vocabulary or leaves too few learned positions; or
            nothing is asked for.
    """
    if problems := [*request.sampling.problems(), *_beam_problems(config, request)]:
        raise ConfigurationError(problems)
    count = request.max_new_tokens
    if count < 0 or (count == 0 and not request.log_probabilities):
        raise InputError(f"{count} tokens to generate is not positive; ask for at least one")
    for token, _ in request.bias:
        if not 0 <= token < config.vocab_size:
            raise InputError(f"there is a bias of token {token}, and the model knows 0..{config.vocab_size - 1}")
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
        problems.append("beams draw nothing: leave out temperature, top_k and top_p, or the beams")
    if request.bias:
        problems.append("beams take no bias of tokens: leave one of them out")
    if request.log_probabilities or request.new_log_probabilities:
        problems.append("beams give scores in place of log-probabilities: ask for one of them")
    if request.stop.closing_tokens or request.stop.closing_pairs != TokenPairs():
        problems.append("beams end at an end token alone: do not stop at the end of a line, or leave the beams out")
    return problems


def _check_prompt(config: GPTConfig, prompt: tuple[int, ...], count: int, place: str) -> None:
    if not prompt:
        raise InputError(f"{place} has no tokens; give it at least one")
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise InputError(
                f"{place} has token {token}, the model knows 0..{config.vocab_size - 1}; "
                "use the tokenizer that the model was trained with"
            )
    length = len(prompt) + count
    if config.position_embedding_type == "learned_absolute" and length > config.max_position_embeddings:
        raise InputError(
            f"{place} has {len(prompt)} tokens: with {count} to generate that is {length}, and the model "
            f"has {config.max_position_embeddings} learned positions; shorten it or generate fewer"
        )


Alternatives = tuple[tuple[int, float], ...]
"""The likeliest tokens of a place with their log-probabilities, the likeliest first."""


@dataclass(frozen=True)
class TokenValue:
    """Hold a token's log-probability, and the likeliest tokens of its place."""

    log_probability: float
    alternatives: Alternatives = ()


@dataclass(frozen=True)
class PromptSeen:
    """Report the values of a prompt's tokens, of all but the first; none where they were not asked for."""

    prompt: int
    values: tuple[TokenValue, ...]


@dataclass(frozen=True)
class NewToken:
    """Report a token that belongs to the text."""

    prompt: int
    token: int
    value: TokenValue | None


@dataclass(frozen=True)
class PromptEnded:
    """Report that nothing more comes, since an end was found or the text has its full length."""

    prompt: int
    reason: Literal["stop", "length"]


@dataclass(frozen=True)
class PromptSearched:
    """Report what a beam search has found."""

    prompt: int
    found: Continuation


@dataclass(frozen=True)
class PromptFailed:
    """Report that a prompt cannot be continued."""

    prompt: int
    error: Exception


Progress = PromptSeen | NewToken | PromptEnded | PromptSearched | PromptFailed


class GatheredAnswer:
    """Gather the continuation of every prompt of a request."""

    def __init__(self, request: GenerationRequest) -> None:
        self._has_values = request.log_probabilities or request.new_log_probabilities
        self._continuations = [Continuation(tokens=[]) for _ in request.prompts]
        self._values: list[list[float]] = [[] for _ in request.prompts]
        self._running = set(range(len(request.prompts)))

    @property
    def is_whole(self) -> bool:
        return not self._running

    def add(self, happened: Progress) -> None:
        """Take what happened to a prompt.

        Raises:
            Exception: the prompt cannot be continued; the error that says why.
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
        """Return what follows each prompt."""
        if not self._has_values:
            return self._continuations
        return [
            dataclasses.replace(continuation, log_probabilities=values)
            for continuation, values in zip(self._continuations, self._values, strict=True)
        ]
