"""Recurrences of several segments of a sequence at once, for which another function combines the states.

A state after a segment is linear in the state before it: a transition of the segment times that state, plus the state
that the segment reaches from zero. Each segment is therefore computed from a zero state. When the transitions and
states of all earlier segments are combined, what the state before the segment contributes is added to the output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.ops.linear_attention.chunks import MIN_LOG_DECAY
from megatron.core.ops.linear_attention.delta_rule import gated_delta_rule
from megatron.core.ops.linear_attention.state_space import selective_scan
from megatron.core.precision import arithmetic_dtype

StatesBefore = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the states before the segments, given their states after a start from zero, and their transitions.

Shapes: ``states: [b, n, rows, columns]``, ``transitions: [b, n, rows, rows]``, or ``[b, n, 1, 1]`` for a decay
``-> [b, n, rows, columns]``, where ``b`` counts segments.
"""


def gated_delta_rule_of_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    document_starts: torch.Tensor | None,
    states_before: StatesBefore,
) -> torch.Tensor:
    """Compute `gated_delta_rule` of segments. Its arguments have the segments as their batch.

    The transition is the state that the rule makes of the identity without values. It is computed as ``dk`` further
    channels of the values, whose outputs are the factors of the state before the segment.

    Shapes: ``-> [b, s, n, dv]``.
    """
    batch, _, heads, dim = k.shape
    width, wide = v.shape[-1], arithmetic_dtype(q.dtype)
    identity = torch.eye(dim, dtype=wide, device=k.device).expand(batch, heads, dim, dim)
    start = torch.cat((identity.new_zeros(batch, heads, dim, width), identity), dim=-1)
    values = torch.cat((v, v.new_zeros(*v.shape[:-1], dim)), dim=-1)
    output, after = gated_delta_rule(q, k, values, log_decay, beta, start, document_starts, return_state=True)
    assert after is not None
    before = states_before(*after.split_with_sizes((width, dim), dim=-1))
    from_zero, factors = output.split_with_sizes((width, dim), dim=-1)
    added = factors.transpose(1, 2).to(wide) @ before
    return (from_zero + added.transpose(1, 2)).to(v.dtype)


def selective_scan_of_segments(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    states_before: StatesBefore,
) -> torch.Tensor:
    """Compute `selective_scan` of segments. Its arguments have the segments as their batch.

    Shapes: ``-> [b, s, n, d]``.
    """
    wide, groups = arithmetic_dtype(x.dtype), B.shape[2]
    output, after = selective_scan(x, dt, A, B, C, D, None, document_starts, return_state=True)
    assert after is not None
    decays = (dt.to(wide) * A.to(wide)).clamp(min=MIN_LOG_DECAY).cumsum(dim=1).exp()
    if document_starts is not None:
        decays = decays * (document_starts.cumsum(dim=1) == 0)[..., None]
    before = states_before(after, decays[:, -1, :, None, None])
    # [b, g, s, d_state] times [b, g, d_state, heads of the group * d].
    of_groups = torch.unflatten(before, 1, (groups, -1)).flatten(2, 3).transpose(-1, -2)
    added = (C.transpose(1, 2).to(wide) @ of_groups).transpose(1, 2)
    return (output + added.reshape(x.shape) * decays[..., None]).to(x.dtype)
