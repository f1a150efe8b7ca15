"""Sampling parameters for the next token."""

from __future__ import annotations

import dataclasses
import math
import sys

MIN_TEMPERATURE = 2.0**-126
"""The smallest normal float32. A kernel may flush smaller numbers to 0."""
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
"""The largest value that OpenAI's API accepts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Parameters for sampling a token from the model's distribution.

    The temperature is applied first, then ``top_k``, then ``top_p`` to the remaining tokens. Every prompt has its own
    random stream, which is a function of ``seed`` and the prompt's index in the list.
    """

    greedy: bool = False
    """Take the most probable token instead of sampling."""
    temperature: float = 1.0
    """Divides the logits: below 1 sharpens the distribution, above 1 flattens it."""
    top_k: int = 0
    """Sample from this number of most probable tokens; 0 samples from all."""
    top_p: float = 0.0
    """Sample from the smallest set of most probable tokens whose probabilities sum to this; 0 samples from all."""
    top_p_decay: float = 0.0
    """Factor that multiplies ``top_p`` after each token; 0 disables the decay."""
    top_p_bound: float = 0.0
    """Lower bound of the decayed ``top_p``."""
    seed: int = 1234
    """Seed of the random streams."""
    no_repeat_ngram_size: int = 0
    """Length of n-grams that must not repeat in a text, including its prompt; 0 allows all repetitions."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the text, including its prompt, and multiplies the negative ones; 1
    disables the penalty."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that have been generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence among the generated tokens."""

    def at_step(self, step: int) -> SamplingConfig:
        """Return the parameters for the generated token with this index, which starts at 0."""
        if self.top_p_decay == 0.0 or self.top_p == 0.0:
            return self
        # Never 0, which would sample from all tokens.
        lowest = max(self.top_p_bound, sys.float_info.min)
        return dataclasses.replace(self, top_p=max(self.top_p * self.top_p_decay**step, lowest))

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def problems(self) -> tuple[str, ...]:
        """List the problems with the values, one line each."""
        found = []
        if not (self.temperature > 0.0 and math.isfinite(self.temperature)):
            found.append(
                f"--temperature {self.temperature:g} is not positive and finite; use --greedy to select the most "
                "likely token"
            )
        elif self.temperature < MIN_TEMPERATURE:
            found.append(
                f"--temperature {self.temperature:g} is below {MIN_TEMPERATURE:g}, the smallest value that float32 can "
                "divide by; use --greedy to select the most likely token"
            )
        if self.top_k < 0:
            found.append(f"--top-k {self.top_k} is negative; use 0 to sample from all tokens")
        if not 0.0 <= self.top_p <= 1.0:
            found.append(f"--top-p {self.top_p:g} is not between 0 and 1")
        if not 0.0 <= self.top_p_decay <= 1.0:
            found.append(f"--top-p-decay {self.top_p_decay:g} is not between 0 and 1")
        if self.top_p_bound and not 0.0 < self.top_p_bound <= self.top_p:
            found.append(f"--top-p-bound {self.top_p_bound:g} is not between 0 and --top-p {self.top_p:g}")
        if self.top_p_decay and not self.top_p:
            found.append(f"--top-p-decay {self.top_p_decay:g} needs --top-p")
        if self.no_repeat_ngram_size < 0:
            found.append(f"--no-repeat-ngram-size {self.no_repeat_ngram_size} is negative; use 0 to allow repetition")
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            found.append(
                f"--repetition-penalty {self.repetition_penalty:g} is not above 0 and at most "
                f"{MAX_REPETITION_PENALTY:g}; use 1 for no penalty"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                found.append(f"{name} {getattr(self, name):g} is not between -{MAX_PENALTY:g} and {MAX_PENALTY:g}")
        if self.seed < 0:
            found.append(f"--seed {self.seed} is negative")
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 0.0):
            found.append(
                "--greedy or --temperature 0 does not sample; omit it, or omit --top-k, --top-p and other temperatures"
            )
        return tuple(found)
