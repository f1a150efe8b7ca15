"""Which columns the rows of a pass look at, where each row has a length of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.core.ops.attention_pattern import AttentionPattern


@dataclass(frozen=True, eq=False)
class RowPattern(AttentionPattern):
    """Say which columns each query looks at by its row's own positions, which the mask has been made of.

    Shapes: ``positions: [b, s]``.
    """

    positions: torch.Tensor | None = None

    def within(self, window: int) -> AttentionPattern:
        """Return this pattern narrowed to a window behind each query's own position; layers share it."""
        if window not in self._narrowed:
            assert self.positions is not None
            assert self.mask is not None
            columns = torch.arange(self.mask.shape[-1], device=self.mask.device)
            near = columns[None, None] > self.positions[:, :, None] - window
            self._narrowed[window] = AttentionPattern(mask=self.mask & near[:, None])
        return self._narrowed[window]

    @cached_property
    def _narrowed(self) -> dict[int, AttentionPattern]:
        return {}


def pattern_of_rows(positions: torch.Tensor, end: int) -> RowPattern:
    """Return the pattern of queries that look at the columns up to their own positions, of those below ``end``.

    Shapes: ``positions: [b, s]``.
    """
    columns = torch.arange(end, device=positions.device)
    return RowPattern(mask=(columns[None, None] <= positions[:, :, None])[:, None], positions=positions)
