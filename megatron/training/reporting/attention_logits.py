"""The largest attention logit of a step: what a query and a key that it may look at give before the softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.collectives import all_reduce
from megatron.core.models.model import Model
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.process_group import Group
from megatron.core.transformer.attention import SelfAttention

_BLOCK_ELEMENTS = 1 << 24


class AttentionLogits:
    """Keep the largest logit of the forward passes while it ``is_on``.

    No attention kernel tells it, so the products of queries and keys are computed a second time, a block of queries
    after the other; nothing is kept of them. A softcap is not applied.
    """

    def __init__(self, chunks: Sequence[Model], device: torch.device) -> None:
        self.is_on = False
        self._largest = torch.full((), -torch.inf, device=device)
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, SelfAttention):
                    module.observe_logits = self.observe

    @torch.no_grad()
    def observe(self, query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern) -> None:
        """Take in the logits of a layer, where this is on.

        Shapes: ``query: [s, b, n, d]``, ``key: [s, b, g, d]``.
        """
        if not self.is_on:
            return
        length, batch, num_heads, width = query.shape
        num_groups = key.shape[2]
        matrix = pattern.mask
        keys = key.permute(1, 2, 3, 0)
        rows = max(1, _BLOCK_ELEMENTS // (batch * num_heads * key.shape[0]))
        positions = torch.arange(length, device=query.device)
        for start in range(0, length, rows):
            block = query[start : start + rows].permute(1, 2, 0, 3)
            block = block.reshape(batch, num_groups, -1, width)
            logits = torch.matmul(block, keys).float() / width**0.5
            logits = logits.view(batch, num_heads, -1, key.shape[0])
            if matrix is None:
                visible = pattern.visible(positions[start : start + rows], positions)
            else:
                visible = matrix[..., start : start + rows, :]
            if visible is not None:
                logits = logits.masked_fill(~visible, -torch.inf)
            self._largest = torch.maximum(self._largest, logits.max())

    def take(self, world: Group) -> float | None:
        """Return the largest logit over all ranks, and forget it; None where no layer has told one.

        Collective; waits for the device.
        """
        all_reduce(self._largest, world, op="max")
        largest = self._largest.item()
        self._largest = torch.full_like(self._largest, -torch.inf)
        return None if largest == -torch.inf else largest
