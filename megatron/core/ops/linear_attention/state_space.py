"""Selective scan of Mamba-2."""

from __future__ import annotations

import torch

from megatron.core.ops.linear_attention.recurrence import recurrent_selective_scan


def selective_scan(
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
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``S_t C_t + D x_t`` of the state ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T``.

    This is the state-space layer of Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060). ``dt`` is positive:
    the caller adds its bias and applies softplus. ``A`` is negative. Consecutive heads share the ``B`` and ``C`` of a
    group. At a position of ``document_starts`` the preceding state is 0. ``chunk_size`` is a power of two.

    Shapes: ``x: [b, s, n, d], dt: [b, s, n], A, D: [n], B, C: [b, s, g, d_state], initial_state: [b, n, d, d_state],
    document_starts: [b, s]`` of bool ``-> [b, s, n, d]`` in the dtype of ``x``, and with ``return_state`` the last
    state ``[b, n, d, d_state]`` in float32 (float64 for float64 input), else None.
    """
    return recurrent_selective_scan(x, dt, A, B, C, D, initial_state, document_starts, return_state=return_state)
