"""QK-clip (MuonClip): bound attention logits by scaling the query and key weights of heads after an update.

Kimi Team 2025, https://arxiv.org/abs/2507.20534.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megatron.core.collectives import all_gather_first_dim, all_reduce
from megatron.core.context_parallel import positions_of, to_sequence_order
from megatron.core.ops import AttentionPattern
from megatron.core.precision import arithmetic_dtype, dtype_from_name
from megatron.core.process_group import Group
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.decoder_config import DecoderConfig

_BLOCK_ELEMENTS = 1 << 24


@torch.no_grad()
def largest_logits(query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern, cp: Group) -> torch.Tensor:
    """Return the largest attention logit of each head of this rank, for the queries of this rank.

    Attention kernels do not return it, so the matmuls of queries and keys are computed a second time, in blocks of
    queries that are not stored. A softcap is not applied, and linear biases (ALiBi), which are never positive, are not
    added. With context parallelism the keys are gathered.

    Shapes: ``query: [s/cp, b, n, d]``, ``key: [s/cp, b, g, d]`` ``-> [n]`` in at least float32.
    """
    length, batch, num_heads, width = query.shape
    if cp.size > 1:
        key = to_sequence_order(all_gather_first_dim(key, cp), cp.size, dim=0)
        positions = positions_of(cp.rank, cp.size, len(key), query.device)
    else:
        positions = torch.arange(length, device=query.device)
    every, num_groups, matrix = torch.arange(len(key), device=query.device), key.shape[2], pattern.mask
    keys = key.permute(1, 2, 3, 0)
    rows = max(1, _BLOCK_ELEMENTS // (batch * num_heads * len(key)))
    wide = arithmetic_dtype(query.dtype)
    largest = torch.full((num_heads,), -torch.inf, dtype=wide, device=query.device)
    for start in range(0, length, rows):
        block = query[start : start + rows].permute(1, 2, 0, 3)
        block = block.reshape(batch, num_groups, -1, width)
        logits = torch.matmul(block, keys).to(wide) / width**0.5
        logits = logits.view(batch, num_heads, -1, len(key))
        if matrix is None:
            visible = pattern.visible(positions[start : start + rows], every)
        else:
            visible = matrix[..., start : start + rows, :]
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        largest = torch.maximum(largest, logits.amax(dim=(0, 2, 3)))
    return largest


class QueryKeyClip:
    """Factors of query and key weights for the heads whose largest logit of a step is above a threshold.

    The logits of all micro-batches of a step count. As in Megatron-LM the heads of a query group are scaled together,
    by their largest logit: queries by ``eta ** alpha`` and keys by ``eta ** (1 - alpha)``, where ``eta`` is threshold /
    logit.
    """

    def __init__(
        self, models: Iterable[nn.Module], config: DecoderConfig, world: Group, device: torch.device | str
    ) -> None:
        self._threshold, self._alpha, self._world = config.qk_clip_threshold, config.qk_clip_alpha, world
        self._layers = [each for model in models for each in model.modules() if isinstance(each, SelfAttention)]
        for layer in self._layers:
            layer.logit_observers.append(self.observe)
        self._largest = torch.full(
            (config.num_layers + config.mtp.mtp_depth, config.num_query_groups),
            -torch.inf,
            dtype=arithmetic_dtype(dtype_from_name(config.params_dtype)),
            device=device,
        )

    def begin_step(self) -> None:
        """Forget the logits of earlier steps."""
        self._largest.fill_(-torch.inf)

    @torch.no_grad()
    def observe(self, layer: SelfAttention, query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern) -> None:
        """Include the logits of a layer. Shapes: ``query: [s, b, n, d]``, ``key: [s, b, g, d]``."""
        of_groups = largest_logits(query, key, pattern, layer.cp).view(layer.num_groups, -1).amax(dim=1)
        known = self._of_layer(self._largest, layer)
        torch.maximum(known, of_groups, out=known)

    @torch.no_grad()
    def row_factors(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the query and key weights of this rank, with a factor for each of their rows; collective.

        Shapes: ``weight: [rows, …]``, ``factors: [rows]``.
        """
        all_reduce(self._largest, self._world, op="max")
        eta = torch.where(self._largest > self._threshold, self._threshold / self._largest, 1.0)
        for layer in self._layers:
            yield from layer.rows_to_clip(self._of_layer(eta, layer), self._alpha)

    @torch.no_grad()
    def largest(self) -> float | None:
        """Return the largest logit of the step over all layers and ranks, or None without one.

        Collective; waits for the device.
        """
        all_reduce(self._largest, self._world, op="max")
        largest = self._largest.max().item()
        return None if largest == -torch.inf else largest

    def _of_layer(self, table: torch.Tensor, layer: SelfAttention) -> torch.Tensor:
        """Return the entries of the query groups that a rank's heads belong to."""
        first = layer.heads.start * table.shape[1] // (layer.num_heads * layer.tp_size)
        return table[layer.layer_number, first : first + layer.num_groups]
