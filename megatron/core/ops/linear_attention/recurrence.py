"""Recurrent forms of the operators: loops over positions, which define them and which generation uses.

They compute in float32, or in float64 for float64 input, and return outputs in the dtype of the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.precision import arithmetic_dtype


def document_starts_of(document_ids: torch.Tensor) -> torch.Tensor:
    """Return at which positions a document starts, given the number of each position's document.

    The first position counts as no start, so that it continues the initial state.

    Shapes: ``[b, s] -> [b, s]`` of bool.
    """
    starts = torch.zeros_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    *,
    return_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule position by position; see `gated_delta_rule`, whose arguments it takes."""
    wide = arithmetic_dtype(q.dtype)
    batch, _, heads, key_dim = q.shape
    state = (
        q.new_zeros(batch, heads, key_dim, v.shape[-1], dtype=wide) if initial_state is None else initial_state.to(wide)
    )
    decay = log_decay.to(wide).exp()
    decay = decay[..., None] if decay.dim() == 3 else decay
    outputs = []
    for position in range(q.shape[1]):
        query, key, value = (x[:, position].to(wide)[..., None, :] for x in (q, k, v))
        state = _continue(state, document_starts, position) * decay[:, position, ..., None]
        correction = beta[:, position, :, None, None].to(wide) * (value - key @ state)
        state = state + key.transpose(-1, -2) * correction
        outputs.append((query @ state).squeeze(-2))
    return torch.stack(outputs, dim=1).to(v.dtype), state if return_state else None


def recurrent_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    *,
    return_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the selective scan position by position; see `selective_scan`, whose arguments it takes."""
    wide = arithmetic_dtype(x.dtype)
    batch, _, heads, head_dim = x.shape
    heads_per_group = heads // B.shape[2]
    state = (
        x.new_zeros(batch, heads, head_dim, B.shape[-1], dtype=wide)
        if initial_state is None
        else initial_state.to(wide)
    )
    outputs = []
    for position in range(x.shape[1]):
        step, inputs = dt[:, position].to(wide), x[:, position].to(wide)
        to_state, from_state = (
            each[:, position].to(wide).repeat_interleave(heads_per_group, dim=1)[..., None, :] for each in (B, C)
        )
        decay = (step * A.to(wide)).exp()[..., None, None]
        added = (step[..., None] * inputs)[..., None] * to_state
        state = _continue(state, document_starts, position) * decay + added
        output = (state * from_state).sum(dim=-1)
        outputs.append(output if D is None else output + D.to(wide)[:, None] * inputs)
    return torch.stack(outputs, dim=1).to(x.dtype), state if return_state else None


def recurrent_causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    *,
    silu: bool = False,
    return_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the causal convolution position by position; see `causal_convolution`, whose arguments it takes."""
    wide = arithmetic_dtype(x.dtype)
    batch, _, channels = x.shape
    width = weight.shape[-1]
    state = x.new_zeros(batch, width - 1, channels, dtype=wide) if initial_state is None else initial_state.to(wide)
    outputs = []
    for position in range(x.shape[1]):
        window = torch.cat((_continue(state, document_starts, position), x[:, position, None].to(wide)), dim=1)
        output = (window * weight.to(wide).t()).sum(dim=1)
        output = output if bias is None else output + bias.to(wide)
        outputs.append(F.silu(output) if silu else output)
        state = window[:, 1:]
    return torch.stack(outputs, dim=1).to(x.dtype), state if return_state else None


def _continue(state: torch.Tensor, document_starts: torch.Tensor | None, position: int) -> torch.Tensor:
    """Return the state that passes into a position: zero in sequences whose document starts there."""
    if document_starts is None:
        return state
    starts = document_starts[:, position].view(-1, *(1,) * (state.dim() - 1))
    return state.masked_fill(starts, 0.0)
