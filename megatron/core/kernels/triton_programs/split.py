"""Gradients of queries, keys and values laid into that of their projection, with the sum that is its bias's gradient.

Forward the projection is cut into views. Backward a concatenation is one read and one write, and the sum comes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.main_grad import Receiver, receive_parts

_TILE = 1024
"""Channels that one program moves of a token."""
_MAX_PARTS = 256
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value. Shapes: ``[s, b, heads, d]``, ``[s, b, groups, d]`` twice."""


@triton.jit
def _move_heads(
    source,
    target,
    bias_parts,
    columns,
    inside,
    first_token,
    last_token,
    batch,
    width,
    stride_s,
    stride_b,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Copy some heads of some tokens to their columns of ``target``, and write what they sum to."""
    total = tl.zeros((HEADS, CHANNELS), tl.float32)
    for token in range(first_token, last_token):
        x = tl.load(source + (token // batch) * stride_s + (token % batch) * stride_b, mask=inside, other=0.0)
        tl.store(target + token * width + columns, x, mask=inside)
        total += x.to(tl.float32)
    tl.store(bias_parts + columns, total, mask=inside)


@triton.jit
def join_program(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    mixed: tl.tensor,
    bias_parts: tl.tensor,
    num_tokens: tl.tensor,
    tokens_per_part: tl.tensor,
    batch: tl.tensor,
    num_groups: tl.tensor,
    heads_per_group: tl.tensor,
    query_stride_s: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_s: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_h: tl.tensor,
    value_stride_s: tl.tensor,
    value_stride_b: tl.tensor,
    value_stride_h: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Write some heads of some tokens: programs along axis 1 take the query's heads, the key's, then the value's."""
    part = tl.program_id(0).to(tl.int64)
    first = part * tokens_per_part
    last = tl.minimum(first + tokens_per_part, num_tokens)
    width = num_groups * (heads_per_group + 2) * HEAD_DIM
    bias_parts += part * width
    channel = tl.arange(0, CHANNELS)[None, :]
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(num_groups * heads_per_group, HEADS)
    key_tiles = tl.cdiv(num_groups, HEADS)
    if tile < query_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < num_groups * heads_per_group) & (channel < HEAD_DIM)
        place = head // heads_per_group * (heads_per_group + 2) + head % heads_per_group
        source = query + head * query_stride_h + channel
        columns = place * HEAD_DIM + channel
        _move_heads(
            source, mixed, bias_parts, columns, inside, first, last, batch, width,
            query_stride_s, query_stride_b, HEADS, CHANNELS,
        )  # fmt: skip
    elif tile < query_tiles + key_tiles:
        group = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (group < num_groups) & (channel < HEAD_DIM)
        source = key + group * key_stride_h + channel
        columns = (group * (heads_per_group + 2) + heads_per_group) * HEAD_DIM + channel
        _move_heads(
            source, mixed, bias_parts, columns, inside, first, last, batch, width,
            key_stride_s, key_stride_b, HEADS, CHANNELS,
        )  # fmt: skip
    else:
        group = (tile - query_tiles - key_tiles) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (group < num_groups) & (channel < HEAD_DIM)
        source = value + group * value_stride_h + channel
        columns = (group * (heads_per_group + 2) + heads_per_group + 1) * HEAD_DIM + channel
        _move_heads(
            source, mixed, bias_parts, columns, inside, first, last, batch, width,
            value_stride_s, value_stride_b, HEADS, CHANNELS,
        )  # fmt: skip


class _SplitWithBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, bias: torch.Tensor, split: Callable[[torch.Tensor], Parts]) -> Parts:
        ctx.shape, ctx.receiver = mixed.shape, Receiver.of(bias)
        return split(mixed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        length, batch, groups, stacked, head_dim = ctx.shape
        query, key, value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        mixed = query.new_empty(ctx.shape)
        num_tokens = length * batch
        tokens_per_part = max(1, triton.cdiv(num_tokens, _MAX_PARTS))
        num_parts = triton.cdiv(num_tokens, tokens_per_part)
        parts = mixed.new_empty((1, num_parts, groups * stacked * head_dim), dtype=torch.float32)
        channels = triton.next_power_of_2(head_dim)
        heads = max(1, _TILE // channels)
        tiles = triton.cdiv(groups * (stacked - 2), heads) + 2 * triton.cdiv(groups, heads)
        if num_tokens:
            join_program[(num_parts, tiles)](
                query, key, value, mixed, parts, num_tokens, tokens_per_part, batch, groups, stacked - 2,
                *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
                HEAD_DIM=head_dim, HEADS=heads, CHANNELS=channels,
            )  # fmt: skip
        return mixed, *receive_parts(parts, [ctx.receiver]), None


def split_with_bias(mixed: torch.Tensor, bias: torch.Tensor, split: Callable[[torch.Tensor], Parts]) -> Parts:
    """Return ``split(mixed)``, with a gradient for the ``bias`` that is in the projection already.

    Shapes: ``mixed: [s, b, groups, heads/groups + 2, d]``, ``bias: [groups * (heads/groups + 2) * d]``.
    """
    result: Parts = _SplitWithBias.apply(mixed, bias, split)
    return result
