"""What attention sends over the context-parallel ranks, by the way in which it exchanges keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.parallel_config import ParallelSizes

if TYPE_CHECKING:
    from megatron.core.transformer.decoder_config import DecoderConfig

Add = Callable[[str, tuple[str, ...], int, int], None]
"""Add so many communications: operation, axes, bytes, count."""

_CP, _CP_INNER, _CP_OUTER = ("cp",), ("cp_inner",), ("cp_outer",)


@dataclass(frozen=True)
class ExchangeTraffic:
    """Count what the attention of one layer sends.

    ``head_bytes`` are those of one head of a rank's tokens, ``element`` those of a number of it.
    """

    model: DecoderConfig
    sizes: ParallelSizes
    head_bytes: int
    element: int

    def add(self, add: Add, exchange: str, forwards: int, backwards: int) -> None:
        """Add what so many forward and backward passes send; of the former some may be recompute."""
        c, groups = self.sizes.cp, key_value_heads_of_rank(self.model.num_query_groups, self.sizes.tp)
        if exchange == "p2p":
            self._add_ring(add, _CP, c, groups, forwards, backwards)
        elif exchange == "all_gather":
            gathered = 2 * groups * self.head_bytes * c
            add("all_gather", _CP, gathered, forwards)
            add("reduce_scatter", _CP, gathered, backwards)
        elif exchange == "a2a":
            self._add_all_to_alls(add, _CP, c, groups, forwards, backwards)
        else:
            inner = self.model.cp_inner_size or 1
            # A rank of the ring has a share of the heads, and all sharers' tokens: as many bytes as before.
            groups = self._add_all_to_alls(add, _CP_INNER, inner, groups, forwards, backwards)
            self._add_ring(add, _CP_OUTER, c // inner, groups, forwards, backwards)

    def _add_ring(self, add: Add, axes: tuple[str, ...], size: int, groups: int, forwards: int, backwards: int) -> None:
        keys_and_values = 2 * groups * self.head_bytes
        add("send", axes, keys_and_values, (size - 1) * (forwards + backwards))
        add("send", axes, keys_and_values // self.element * max(self.element, 4), size * backwards)

    def _add_all_to_alls(
        self, add: Add, axes: tuple[str, ...], size: int, groups: int, forwards: int, backwards: int
    ) -> int:
        """Add what shares the heads, and return the key-value heads that are shared, repeated ones included."""
        heads = self.model.num_attention_heads // self.sizes.tp
        copies = copies_of_key_value_heads(heads, groups, size)
        assert copies is not None, "a checked configuration shares the heads"
        there = (heads + 2 * copies * groups) * self.head_bytes
        # A recomputed core alone ends before its output goes back: nothing behind it is needed.
        again = forwards - backwards if self.model.recompute_granularity == "full" else 0
        add("all_to_all", axes, there, forwards + backwards)
        add("all_to_all", axes, heads * self.head_bytes, 2 * backwards + again)
        return copies * groups
