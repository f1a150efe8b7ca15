"""What a request learns while it runs: one small record for each thing that happens to one of its prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.inference.request import Continuation

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
