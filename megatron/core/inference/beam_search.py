"""Beam search over the continuations of one prompt: its settings, and its bookkeeping of scores without a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MOST_PENALTY = 32
"""A text of a billion tokens to this power is within float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamConfig:
    """Hold how the likeliest texts of a prompt are searched for.

    The score of a text is the sum of the logarithms of its tokens' probabilities over ``length ** length_penalty``,
    where the length counts the new tokens, with the one that ends the text.
    """

    num_beams: int
    """Texts that are followed at once, and that are given back."""
    length_penalty: float = 1.0
    """Above 0 favors long texts, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """True ends the search with ``num_beams`` finished texts. False ends it where no running text, scored at its
    present length, beats them. "never" scores it at the length that a positive ``length_penalty`` favors most."""

    def problems(self, vocab_size: int, num_end_tokens: int) -> tuple[str, ...]:
        """Return what is wrong with the values for a vocabulary, one line each."""
        found = []
        most = vocab_size - num_end_tokens
        if not 1 <= self.num_beams <= most:
            found.append(
                f"num_beams {self.num_beams} cannot be: {most} of the model's tokens do not end a text; use 1..{most}"
            )
        if not math.isfinite(self.length_penalty):
            found.append(f"length_penalty {self.length_penalty:g} is not finite")
        elif abs(self.length_penalty) > _MOST_PENALTY:
            found.append(f"length_penalty {self.length_penalty:g} is not between -{_MOST_PENALTY} and {_MOST_PENALTY}")
        if self.early_stopping not in (True, False, "never"):
            found.append(f"early_stopping {self.early_stopping!r} is not true, false or never")
        return tuple(found)


IMPOSSIBLE = -1e9
"""The score of a row that no text has yet: at the start all rows hold the same prompt, and one of them counts."""
_LEAST_SCORE = IMPOSSIBLE / 10


@dataclass(frozen=True)
class Hypothesis:
    """Hold one finished continuation and its score.

    ``tokens`` are without the ``end_token``, which is None where the text ended at its full length.
    """

    tokens: tuple[int, ...]
    score: float
    end_token: int | None = None


@dataclass(frozen=True)
class Candidate:
    """Hold one way to go on: which of the running texts, with which token, and the sum of log-probabilities then."""

    beam: int
    token: int
    log_probability: float


class BeamSearch:
    """Follow the likeliest texts of a prompt and keep the best that end.

    A text ends with one of ``end_tokens``, or when it has ``max_new_tokens``. Everything is a function of the
    candidates: ranks that are given the same ones agree.
    """

    def __init__(self, config: BeamConfig, max_new_tokens: int, end_tokens: frozenset[int]) -> None:
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.end_tokens = end_tokens
        self.texts: list[tuple[int, ...]] = [()] * config.num_beams
        self.scores = [0.0] + [IMPOSSIBLE] * (config.num_beams - 1)
        self.finished: list[Hypothesis] = []
        self.is_done = False

    def num_candidates(self) -> int:
        """Return how many candidates a step needs, so that ``num_beams`` are left when as many as can be have ended."""
        return max(2, 1 + len(self.end_tokens)) * self.config.num_beams

    def advance(self, candidates: Sequence[Candidate]) -> list[int]:
        """Take a step and return which of the texts before it each running text goes on from.

        ``candidates`` come in the order of their log-probabilities, the largest first.
        """
        length = len(self.texts[0]) + 1
        ends = [candidate.token in self.end_tokens for candidate in candidates]
        if not self.is_done:
            self._keep_finished(candidates, ends, length)
        if length == self.max_new_tokens:
            self.is_done = True
            return list(range(self.config.num_beams))
        going = [candidate for candidate, has_ended in zip(candidates, ends, strict=True) if not has_ended]
        going = going[: self.config.num_beams]
        assert len(going) == self.config.num_beams, "too few candidates go on"
        self.texts = [(*self.texts[candidate.beam], candidate.token) for candidate in going]
        self.scores = [candidate.log_probability for candidate in going]
        self.is_done = self.is_done or self._nothing_better_can_come(length)
        return [candidate.beam for candidate in going]

    def _keep_finished(self, candidates: Sequence[Candidate], ends: Sequence[bool], length: int) -> None:
        """Keep the best finished texts; one that ends counts only where it is among the ``num_beams`` likeliest."""
        for candidate, has_ended in list(zip(candidates, ends, strict=True))[: self.config.num_beams]:
            if candidate.log_probability > _LEAST_SCORE and (has_ended or length == self.max_new_tokens):
                tokens = self.texts[candidate.beam] + (() if has_ended else (candidate.token,))
                score = candidate.log_probability / length**self.config.length_penalty
                self.finished.append(Hypothesis(tokens, score, candidate.token if has_ended else None))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.config.num_beams :]

    def _nothing_better_can_come(self, length: int) -> bool:
        if len(self.finished) < self.config.num_beams:
            return False
        if self.config.early_stopping is True:
            return True
        penalty = self.config.length_penalty
        if self.config.early_stopping == "never" and penalty > 0.0:
            length = self.max_new_tokens
        return bool(self.scores[0] / length**penalty <= self.finished[-1].score)
