"""How the next token is chosen."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Hold how one token is drawn from the model's distribution.

    The temperature is applied first, then ``top_k``, then ``top_p`` on what is left. Every prompt draws from a stream
    of its own, which follows from ``seed`` and the prompt's place in the list.
    """

    greedy: bool = False
    """Take the most probable token; nothing is drawn."""
    temperature: float = 1.0
    """Divides the logits: below 1 sharpens the distribution, above 1 flattens it."""
    top_k: int = 0
    """Draw from this many most probable tokens; 0 draws from all."""
    top_p: float = 0.0
    """Draw from the fewest most probable tokens whose probabilities sum to this; 0 draws from all."""
    seed: int = 1234
    """Seed of the draws."""

    def problems(self) -> tuple[str, ...]:
        """Return what is wrong with the values, one line each."""
        found = []
        if not (self.temperature > 0.0 and math.isfinite(self.temperature)):
            found.append(
                f"--temperature {self.temperature:g} is not positive and finite; --greedy takes the likeliest token"
            )
        if self.top_k < 0:
            found.append(f"--top-k {self.top_k} is negative; 0 draws from all tokens")
        if not 0.0 <= self.top_p <= 1.0:
            found.append(f"--top-p {self.top_p:g} is not between 0 and 1")
        if self.seed < 0:
            found.append(f"--seed {self.seed} is negative")
        if self.greedy and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 0.0):
            found.append("--greedy draws nothing; drop it, or --temperature, --top-k and --top-p")
        return tuple(found)
