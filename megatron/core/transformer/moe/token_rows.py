"""The rows of tokens that a rank routes: each token of a micro-batch is on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.context_parallel.partition import positions_of
from megatron.core.process_group import Group


@dataclass(frozen=True)
class TokenRows:
    """Say which tokens this rank's rows are, of a micro-batch whose tensor-parallel ranks have ``num_rows`` each.

    Tokens are in the order of ``[s, b]``, sequences side by side. ``num_tokens`` are those of all these ranks, and
    ``first`` is the number of this rank's first; rows behind the last token are empty. ``padding_mask`` is True where
    a position of the whole sequences is padding, and None where there is none.

    Shapes: ``padding_mask: [b, s]``.
    """

    num_rows: int
    num_tokens: int
    batch_size: int
    first: int
    padding_mask: torch.Tensor | None = None

    @property
    def num_real(self) -> int:
        """Return how many of the rows are tokens."""
        return max(min(self.num_rows, self.num_tokens - self.first), 0)

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of the tokens. Shapes: ``-> [num_real]`` int64."""
        return torch.arange(self.first, self.first + self.num_real, device=device)

    def sequences(self, device: torch.device) -> torch.Tensor:
        """Return the sequence of each token. Shapes: ``-> [num_real]`` int64."""
        return self.numbers(device) % self.batch_size

    def positions(self, cp: Group, device: torch.device) -> torch.Tensor:
        """Return each token's number in the whole micro-batch, over all context-parallel ranks.

        Shapes: ``-> [num_real]`` int64.
        """
        numbers = self.numbers(device)
        if cp.size == 1:
            return numbers
        places = numbers.div(self.batch_size, rounding_mode="floor")
        length = self.num_tokens // self.batch_size * cp.size
        return positions_of(cp.rank, cp.size, length, device)[places] * self.batch_size + numbers % self.batch_size

    def local_padding_mask(self, cp: Group, device: torch.device) -> torch.Tensor | None:
        """Return the padding mask of this rank's tokens, or None. Shapes: ``-> [num_real]`` bool."""
        if self.padding_mask is None:
            return None
        return self.padding_mask.t().reshape(-1)[self.positions(cp, device)]
