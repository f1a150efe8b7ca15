"""Context parallelism: the split of a sequence over ranks, and attention and recurrences over the whole sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.context_parallel.attention import with_context_parallel
    from megatron.core.context_parallel.head_exchange import (
        StackedHeads,
        heads_to_sequence,
        rows_of_heads,
        sequence_to_heads,
    )
    from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads, key_value_heads_of_rank
    from megatron.core.context_parallel.partition import (
        chunk_length,
        chunks_of,
        cut_sequence,
        positions_of,
        to_sequence_order,
    )
    from megatron.core.context_parallel.state_exchange import (
        from_segments,
        inputs_before_segments,
        segments_of_whole,
        states_before_segments,
        to_segments,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "attention": "with_context_parallel",
        "head_exchange": "StackedHeads heads_to_sequence rows_of_heads sequence_to_heads",
        "key_value_heads": "copies_of_key_value_heads key_value_heads_of_rank",
        "partition": "chunk_length chunks_of cut_sequence positions_of to_sequence_order",
        "state_exchange": ("from_segments inputs_before_segments segments_of_whole states_before_segments to_segments"),
    },
)
