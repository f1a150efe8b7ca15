"""Operators of linear attention and state-space layers: gated delta rule, selective scan, causal convolution.

Each operator has a recurrent form, a loop over positions that defines it and that generation uses, and a form in chunks
of positions, whose work is GEMMs. Every form takes a state and returns one, so that a sequence may be computed in
parts. ``document_starts`` marks the positions at which a packed document starts: no state passes into them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.ops.linear_attention.chunks import MAX_HEAD_DIM, MIN_LOG_DECAY
    from megatron.core.ops.linear_attention.convolution import causal_convolution
    from megatron.core.ops.linear_attention.delta_rule import gated_delta_rule
    from megatron.core.ops.linear_attention.recurrence import (
        document_starts_of,
        recurrent_causal_convolution,
        recurrent_gated_delta_rule,
        recurrent_selective_scan,
    )
    from megatron.core.ops.linear_attention.segments import gated_delta_rule_of_segments, selective_scan_of_segments
    from megatron.core.ops.linear_attention.state_space import selective_scan

__getattr__ = lazy_exports(
    __name__,
    {
        "chunks": "MAX_HEAD_DIM MIN_LOG_DECAY",
        "convolution": "causal_convolution",
        "delta_rule": "gated_delta_rule",
        "recurrence": (
            "document_starts_of recurrent_causal_convolution recurrent_gated_delta_rule recurrent_selective_scan"
        ),
        "segments": "gated_delta_rule_of_segments selective_scan_of_segments",
        "state_space": "selective_scan",
    },
)
