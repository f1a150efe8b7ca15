"""Operators of DeepSeek sparse attention (DSA): index scores, the selected keys, and the indexer's loss.

DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556. They work on tensors of queries x keys, head after head, so that no
tensor has heads x queries x keys elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.precision import arithmetic_dtype

_BLOCK_ELEMENTS = 1 << 24
"""Most elements of the scores of several heads that are computed at once."""
_EPSILON = 1e-10
"""Number that Megatron-LM adds to probabilities before it takes their logarithms."""


def _head_blocks(num_heads: int, elements_per_head: int) -> Iterator[slice]:
    """Yield ranges of heads whose scores together have at most `_BLOCK_ELEMENTS` elements, or of one head."""
    step = max(1, _BLOCK_ELEMENTS // max(elements_per_head, 1))
    for start in range(0, num_heads, step):
        yield slice(start, min(start + step, num_heads))


class _IndexScores(torch.autograd.Function):
    """Sum over heads of ``weight * relu(query @ key)``; the backward pass computes the scores of heads again."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key, weights)
        queries, keys, of_heads = _by_sequence(query, key, weights)
        total: torch.Tensor | None = None
        for heads in _head_blocks(queries.shape[1], queries.shape[0] * queries.shape[2] * keys.shape[1]):
            scores = torch.matmul(queries[:, heads], keys.mT.unsqueeze(1)).relu_().mul_(of_heads[:, heads, :, None])
            part = scores.sum(dim=1)
            total = part if total is None else total.add_(part)
        assert total is not None, "an indexer has heads"
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, weights = ctx.saved_tensors
        queries, keys, of_heads = _by_sequence(query, key, weights)
        grad_query, grad_weights = torch.empty_like(queries), torch.empty_like(of_heads)
        grad_key = torch.zeros_like(keys)
        for heads in _head_blocks(queries.shape[1], grad.numel()):
            scores = torch.matmul(queries[:, heads], keys.mT.unsqueeze(1)).relu_()
            grad_weights[:, heads] = (scores * grad.unsqueeze(1)).sum(dim=-1)
            grad_scores = (scores > 0) * grad.unsqueeze(1) * of_heads[:, heads, :, None]
            grad_query[:, heads] = torch.matmul(grad_scores, keys.unsqueeze(1))
            grad_key += torch.matmul(grad_scores.mT, queries[:, heads]).sum(dim=1)
        return (
            grad_query.permute(2, 0, 1, 3).to(query.dtype),
            grad_key.transpose(0, 1).to(key.dtype),
            grad_weights.permute(2, 0, 1).to(weights.dtype),
        )


def _by_sequence(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes: ``[sq, b, n, d], [sk, b, d], [sq, b, n] -> [b, n, sq, d], [b, sk, d], [b, n, sq]``."""
    wide = arithmetic_dtype(query.dtype)
    return query.permute(1, 2, 0, 3).to(wide), key.transpose(0, 1).to(wide), weights.permute(1, 2, 0).to(wide)


def index_scores(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the indexer's score of every key for every query, in at least float32.

    Shapes: ``query: [sq, b, n, d]``, ``key: [sk, b, d]``, ``weights: [sq, b, n] -> [b, sq, sk]``.
    """
    scores: torch.Tensor = _IndexScores.apply(query, key, weights)  # type: ignore[no-untyped-call]
    return scores


@torch.no_grad()
def select_keys(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Return which keys each query attends to: the visible keys with its ``topk`` largest scores.

    All visible keys are selected if there are at most ``topk`` of them.

    Shapes: ``scores: [b, sq, sk]``, ``visible: [b or 1, sq, sk]`` of bool ``-> [b, sq, sk]`` of bool.
    """
    chosen = scores.masked_fill(~visible, -torch.inf).topk(min(topk, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True).logical_and_(visible)


@torch.no_grad()
def attention_of_all_heads(query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the sum over heads of the attention weights, in at least float32.

    Shapes: ``query: [sq, b, n, d]``, ``key: [sk, b, n, d]``, ``visible: [b or 1, sq, sk] -> [b, sq, sk]``.
    """
    wide, scale = arithmetic_dtype(query.dtype), query.shape[-1] ** -0.5
    queries, keys = query.permute(1, 2, 0, 3).to(wide), key.permute(1, 2, 3, 0).to(wide)
    total: torch.Tensor | None = None
    for heads in _head_blocks(queries.shape[1], queries.shape[0] * queries.shape[2] * keys.shape[3]):
        scores = torch.matmul(queries[:, heads], keys[:, heads]).mul_(scale).masked_fill_(~visible[:, None], -torch.inf)
        part = torch.softmax(scores, dim=-1).sum(dim=1)
        total = part if total is None else total.add_(part)
    assert total is not None, "attention has heads"
    return total


def indexer_divergence(scores: torch.Tensor, visible: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Return the sum over queries of the KL divergence from the softmax of the scores to the attention's distribution.

    ``attention`` need not sum to 1.

    Shapes: ``scores: [b, sq, sk]``, ``visible: [b or 1, sq, sk]`` of bool, ``attention: [b, sq, sk] -> []``.
    """
    target = attention / attention.sum(dim=-1, keepdim=True)
    predicted = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return (target * ((target + _EPSILON).log() - (predicted + _EPSILON).log())).sum()
