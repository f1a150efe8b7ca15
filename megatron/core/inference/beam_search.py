"""Beam search for one prompt: its configuration, and its bookkeeping of scores without a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MOST_PENALTY = 32
"""Limit for which a length of a billion tokens to this power fits float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamConfig:
    """Parameters of a beam search.

    The score of a text is the sum of its tokens' log-probabilities divided by ``length ** length_penalty``. The length
    is the number of new tokens, including the end token.
    """

    num_beams: int
    """Number of beams, and of returned texts."""
    length_penalty: float = 1.0
    """Positive values favor long texts, negative values short ones."""
    early_stopping: bool | Literal["never"] = False
    """True ends the search as soon as ``num_beams`` texts are finished. False ends it when no running text, scored at
    its current length, beats them. "never" scores it at the length that a positive ``length_penalty`` favors most."""

    def problems(self, vocab_size: int, num_end_tokens: int) -> tuple[str, ...]:
        """List the problems with the values for a vocabulary, one line each."""
        found = []
        most = vocab_size - num_end_tokens
        if not 1 <= self.num_beams <= most:
            found.append(
                f"num_beams {self.num_beams} is too large: only {most} of the model's tokens do not end a sequence; "
                f"use 1..{most}"
            )
        if not math.isfinite(self.length_penalty):
            found.append(f"length_penalty {self.length_penalty:g} is not finite")
        elif abs(self.length_penalty) > _MOST_PENALTY:
            found.append(f"length_penalty {self.length_penalty:g} is not between -{_MOST_PENALTY} and {_MOST_PENALTY}")
        if self.early_stopping not in (True, False, "never"):
            found.append(f"early_stopping {self.early_stopping!r} is not true, false or never")
        return tuple(found)


IMPOSSIBLE = -1e9
"""Score of an unused beam. At the start, all beams hold the same prompt, and only the first is used."""
_LEAST_SCORE = IMPOSSIBLE / 10


@dataclass(frozen=True)
class Hypothesis:
    """Finished continuation and its score.

    ``tokens`` exclude the ``end_token``, which is None if the text reached its maximum length.
    """

    tokens: tuple[int, ...]
    score: float
    end_token: int | None = None


@dataclass(frozen=True)
class Candidate:
    """Extension of a beam by a token, with the resulting sum of log-probabilities."""

    beam: int
    token: int
    log_probability: float


class BeamSearch:
    """Beam search of one prompt, which tracks the running beams and the best finished texts.

    A text ends with one of ``end_tokens``, or at ``max_new_tokens``. The search is a function of the candidates, so
    ranks with the same candidates agree.
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
        """Return the number of candidates that leaves ``num_beams`` running ones even if all possible ones end."""
        return max(2, 1 + len(self.end_tokens)) * self.config.num_beams

    def advance(self, candidates: Sequence[Candidate]) -> list[int]:
        """Advance by one step and return the previous beam that each running beam extends.

        ``candidates`` are in descending order of their log-probabilities.
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
        assert len(going) == self.config.num_beams, "too few candidates are left"
        self.texts = [(*self.texts[candidate.beam], candidate.token) for candidate in going]
        self.scores = [candidate.log_probability for candidate in going]
        self.is_done = self.is_done or self._nothing_better_can_come(length)
        return [candidate.beam for candidate in going]

    def _keep_finished(self, candidates: Sequence[Candidate], ends: Sequence[bool], length: int) -> None:
        """Keep the best finished texts. An ended candidate counts only among the ``num_beams`` most likely."""
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
