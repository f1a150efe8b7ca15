"""A stand-in for FlashAttention 3 or 4 in torch's registry, written out in torch; tests register it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import library

CALLS: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Shapes: ``query: [b, sq, n, d]``, ``key: [b, sk, g, d]``, ``value: [b, sk, g, v]`` ``-> [b, sq, n, v]``."""
    assert dropout_p == 0.0
    CALLS.append(("forward", tuple(query.shape), tuple(value.shape)))
    group_size = query.shape[2] // key.shape[2]
    keys, values = spread(key, group_size), spread(value, group_size)
    scores = masked_scores(query, keys, window_size_left, 0 if is_causal else window_size_right)
    context = torch.einsum("bnqk,bknd->bqnd", scores.softmax(dim=-1), values).to(query.dtype)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return context, scores.logsumexp(dim=-1), seed, offset, torch.empty(0)


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    CALLS.append(("backward", tuple(query.shape), tuple(value.shape)))
    right = 0 if is_causal else window_size_right
    group_size = query.shape[2] // key.shape[2]
    keys, values = spread(key, group_size), spread(value, group_size)
    weights = (masked_scores(query, keys, window_size_left, right) - logsumexp[..., None]).exp()
    grad_weights = torch.einsum("bqnd,bknd->bnqk", grad.float(), values)
    row_sums = (grad.float() * output.float()).sum(dim=-1).transpose(1, 2)[..., None]
    grad_scores = weights * (grad_weights - row_sums) / math.sqrt(query.shape[3])
    grad_query = torch.einsum("bnqk,bknd->bqnd", grad_scores, keys)
    grad_keys = torch.einsum("bnqk,bqnd->bknd", grad_scores, query.float())
    grad_values = torch.einsum("bnqk,bqnd->bknd", weights, grad.float())
    of_groups = (torch.stack(tensor.split(group_size, dim=2), dim=2).sum(dim=3) for tensor in (grad_keys, grad_values))
    return tuple(tensor.to(query.dtype) for tensor in (grad_query, *of_groups))


def spread(heads: torch.Tensor, group_size: int) -> torch.Tensor:
    return heads.repeat_interleave(group_size, dim=2).float()


def masked_scores(query: torch.Tensor, keys: torch.Tensor, left: int | None, right: int | None) -> torch.Tensor:
    """A bound that is None or negative is none; the last query is at the last key."""
    scores = torch.einsum("bqnd,bknd->bnqk", query.float(), keys) / math.sqrt(query.shape[3])
    behind = torch.arange(query.shape[1], device=query.device)[:, None] + keys.shape[1] - query.shape[1]
    behind = behind - torch.arange(keys.shape[1], device=query.device)
    if left is not None and left >= 0:
        scores = scores.masked_fill(behind > left, -math.inf)
    if right is not None and right >= 0:
        scores = scores.masked_fill(-behind > right, -math.inf)
    return scores


def sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Shapes: ``query: [b, n, sq, d]``, ``key, value: [b, g, sk, d]`` ``-> [b, n, sq, d]``."""
    lengths = query.shape[2], key.shape[2]
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    context, rows, *rest = flash_forward(*heads, None, None, *lengths, dropout_p, is_causal, False)
    return context.transpose(1, 2), rows, None, None, *lengths, *rest


def sdpa_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *seeds: torch.Tensor,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    tensors = (tensor.transpose(1, 2) for tensor in (grad, query, key, value, output))
    grads = flash_backward(*tensors, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, *seeds)
    return tuple(tensor.transpose(1, 2) for tensor in grads)


class Registered:
    """What torch keeps of an active implementation: it ends with this."""

    dispatch_key = "CPU"

    def __init__(self) -> None:
        self.registrations: Any = library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for name, function in (
            ("_flash_attention_forward", flash_forward),
            ("_flash_attention_backward", flash_backward),
            ("_scaled_dot_product_flash_attention", sdpa_forward),
            ("_scaled_dot_product_flash_attention_backward", sdpa_backward),
        ):
            self.registrations.impl(name, function, self.dispatch_key)

    def remove(self) -> None:
        assert self.registrations is not None
        self.registrations._destroy()
        self.registrations = None
