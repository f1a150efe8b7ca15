"""One prompt on its way through a running batch."""

from __future__ import annotations

import torch

from megatron.core.inference.continuous.progress import TokenValue
from megatron.core.inference.request import GenerationRequest
from megatron.core.tensor_parallel.random import stream_seed


class Row:
    """Hold a prompt of a request, its text so far, and how many positions of it the model has seen.

    The row draws from a stream of its own, which follows from the request's seed and the prompt's place in it.
    """

    def __init__(self, job: int, request: GenerationRequest, prompt: int, device: torch.device) -> None:
        self.job = job
        self.request = request
        self.prompt = prompt
        self.text = list(request.prompts[prompt])
        self.prompt_length = len(self.text)
        self.num_seen = 0
        self.has_failed = False
        self.values: list[TokenValue] = []
        self.generator = torch.Generator(device)
        self.generator.manual_seed(stream_seed(request.sampling.seed, "sampling", (prompt,)))

    @property
    def full_length(self) -> int:
        """Return how many positions the row can come to need in the cache."""
        return self.prompt_length + max(self.request.max_new_tokens - 1, 0)

    @property
    def num_new(self) -> int:
        """Return how many tokens have been chosen."""
        return len(self.text) - self.prompt_length

    @property
    def num_unseen(self) -> int:
        """Return how many tokens of the text the model has not been shown."""
        return len(self.text) - self.num_seen

    @property
    def wants_new_values(self) -> bool:
        """Tell whether the log-probabilities of new tokens are asked for."""
        return self.request.log_probabilities or self.request.new_log_probabilities

    @property
    def wants_prompt_values(self) -> bool:
        """Tell whether the log-probabilities of the prompt's own tokens are asked for."""
        return self.request.log_probabilities
