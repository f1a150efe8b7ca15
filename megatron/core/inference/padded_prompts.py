"""Prompts of unequal length as one batch: padding on the left, which no real position looks at.

All rows end in the same column, so that one cache position serves every row of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern

_PADDING = 0


@dataclass(frozen=True, eq=False)
class PaddedPrompts:
    """Hold the tokens of a batch, the column in which each row begins, and whether these differ.

    Shapes: ``tokens: [b, longest prompt]``; ``starts: [b]``.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    has_padding: bool

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Return each row's own positions of the columns ``[start, end)``; 0 where it has not begun.

        Shapes: ``-> [b, end - start]``.
        """
        columns = torch.arange(start, end, device=self.starts.device)
        return (columns[None, :] - self.starts[:, None]).clamp(min=0)

    def select_rows(self, rows: torch.Tensor) -> PaddedPrompts:
        """Return the rows with these numbers, of which some may come several times."""
        return PaddedPrompts(self.tokens[rows], self.starts[rows], self.has_padding)

    def pattern(self, start: int, end: int) -> AttentionPattern:
        """Return which columns below ``end`` those from ``start`` on look at.

        A padding column looks at itself alone: a row without anything to look at would give NaN.
        """
        if not self.has_padding:
            return CAUSAL
        queries = torch.arange(start, end, device=self.starts.device)[:, None]
        keys = torch.arange(end, device=self.starts.device)[None, :]
        real = keys[None] >= self.starts[:, None, None]
        return AttentionPattern(mask=((keys <= queries) & real | (keys == queries)).unsqueeze(1))


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> PaddedPrompts:
    """Return the prompts as one batch."""
    longest = max(map(len, prompts))
    rows = [[_PADDING] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    starts = [longest - len(prompt) for prompt in prompts]
    return PaddedPrompts(torch.tensor(rows, device=device), torch.tensor(starts, device=device), any(starts))


def batches_of_like_length(prompts: Sequence[Sequence[int]], max_batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of prompts that run together, those of like length, so that little is padded."""
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    for start in range(0, len(prompts), max_batch_size):
        yield sorted(by_length[start : start + max_batch_size])
