"""The whole answer to a request, gathered from what happens to its prompts."""

from __future__ import annotations

import dataclasses

from megatron.core.inference.continuous.progress import (
    NewToken,
    Progress,
    PromptEnded,
    PromptFailed,
    PromptSearched,
    PromptSeen,
)
from megatron.core.inference.request import Continuation, GenerationRequest


class GatheredAnswer:
    """Gather the continuation of every prompt of a request."""

    def __init__(self, request: GenerationRequest) -> None:
        self._has_values = request.log_probabilities or request.new_log_probabilities
        self._continuations = [Continuation(tokens=[]) for _ in request.prompts]
        self._values: list[list[float]] = [[] for _ in request.prompts]
        self._running = set(range(len(request.prompts)))

    @property
    def is_whole(self) -> bool:
        """Tell whether all prompts have ended."""
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
