"""A stand-in for flash-attn 2 with its signature, written out in torch; installed under that name by tests."""

from __future__ import annotations

import math

import torch

calls: list[dict[str, object]] = []


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """``q: [b, sq, n, d]``, ``k, v: [b, sk, g, d]``; the last query stands at the last key."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert not (softcap and dropout_p), "flash-attn has no dropout of capped scores"
    calls.append({"q": tuple(q.shape), "k": tuple(k.shape), "dropout_p": dropout_p, "causal": causal})
    if deterministic:
        calls[-1]["deterministic"] = True
    left, right = window_size
    if causal:
        right = 0
    num_queries, num_keys = q.shape[1], k.shape[1]
    groups = k.shape[2]
    grouped = q.float().unflatten(2, (groups, -1))
    scores = torch.einsum("bqghd,bkgd->bghqk", grouped, k.float()) / math.sqrt(q.shape[3])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries
    behind = behind - torch.arange(num_keys, device=q.device)
    if left >= 0:
        scores = scores.masked_fill(behind > left, -math.inf)
    if right >= 0:
        scores = scores.masked_fill(-behind > right, -math.inf)
    weights = torch.dropout(scores.softmax(dim=-1), dropout_p, True)
    return torch.einsum("bghqk,bkgd->bqghd", weights, v.float()).flatten(2, 3).to(q.dtype)
