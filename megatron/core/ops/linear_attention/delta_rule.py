"""Gated delta rule of gated delta-net and of Kimi Delta Attention (KDA)."""

from __future__ import annotations

import torch

from megatron.core.ops.linear_attention.recurrence import recurrent_gated_delta_rule


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    document_starts: torch.Tensor | None = None,
    *,
    return_state: bool = False,
    chunk_size: int = 64,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return ``q_t S_t`` of the state ``S_t = (I - beta_t k_t k_t^T) exp(log_decay_t) S_{t-1} + beta_t k_t v_t^T``.

    This is the gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), or KDA's if every channel of the
    keys has its own decay (Kimi Team 2025, https://arxiv.org/abs/2510.26692). The caller scales ``q`` and normalizes
    ``q`` and ``k``. At a position of ``document_starts`` the preceding state is 0. ``chunk_size`` is a power of two.

    Shapes: ``q, k: [b, s, n, dk], v: [b, s, n, dv], log_decay: [b, s, n] or [b, s, n, dk], beta: [b, s, n],
    initial_state: [b, n, dk, dv], document_starts: [b, s]`` of bool ``-> [b, s, n, dv]`` in the dtype of ``v``, and
    with ``return_state`` the last state ``[b, n, dk, dv]`` in float32 (float64 for float64 input), else None.
    """
    return recurrent_gated_delta_rule(
        q, k, v, log_decay, beta, initial_state, document_starts, return_state=return_state
    )
