"""How wide a beam search is, and when it ends."""

from __future__ import annotations

import dataclasses
import math
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
    """Above 0 favours long texts, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """True ends the search with ``num_beams`` finished texts. False ends it where no running text, scored at its
    present length, beats them. "never" scores it at the length that a positive ``length_penalty`` favours most."""

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
