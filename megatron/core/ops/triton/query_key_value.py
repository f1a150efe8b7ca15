"""Triton kernels that split a fused QKV projection, with or without rotary embeddings: one read, one write.

Heads are grouped: per key-value head a projection has its query heads, its key and its value. Without rotation the
forward pass only creates views. The backward pass writes the gradients of queries, keys and values into the gradient of
the projection, and sums the gradient of its bias in the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.main_grad import Receiver, receive_parts

_TILE = 1024
"""Channels of a token that one program processes."""
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
    """Copy some heads of some tokens to their columns of ``target``, and store their sums over tokens."""
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
    """Write some heads of some tokens; programs along axis 1 process first query, then key, then value heads."""
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
    """Return ``split(mixed)``, with a gradient for ``bias``, which ``mixed`` already includes.

    Shapes: ``mixed: [s, b, groups, heads/groups + 2, d]``, ``bias: [groups * (heads/groups + 2) * d]``.
    """
    result: Parts = _SplitWithBias.apply(mixed, bias, split)
    return result


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Query, key and value. Shapes: ``[s, b, groups, heads of a group, d]``, ``[s, b, groups, d]`` twice."""


@triton.jit
def _rotate_tile(
    source,
    target,
    has_head,
    cos,
    sin,
    IS_INTERLEAVED: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rotate ``HEADS`` heads of one token; ``PAIRS`` is their number of channel pairs, rounded up to a power of two."""
    if IS_INTERLEAVED:
        channel = tl.arange(0, 2 * PAIRS)
        inside = has_head & (channel < ROTARY_DIM)[None, :]
        x = tl.load(source + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
        # Both channels of a pair have the same angle.
        c, _ = tl.split(tl.reshape(tl.load(cos + channel, mask=channel < ROTARY_DIM, other=0.0), (PAIRS, 2)))
        s, _ = tl.split(tl.reshape(tl.load(sin + channel, mask=channel < ROTARY_DIM, other=0.0), (PAIRS, 2)))
    else:
        channel = tl.arange(0, PAIRS)
        inside = has_head & (channel < ROTARY_DIM // 2)[None, :]
        a = tl.load(source + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + ROTARY_DIM // 2 + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + channel, mask=channel < ROTARY_DIM // 2, other=0.0)
        s = tl.load(sin + channel, mask=channel < ROTARY_DIM // 2, other=0.0)
    if IS_INVERSE:
        s = -s
    first = (a * c[None, :] - b * s[None, :]).to(target.dtype.element_ty)
    second = (b * c[None, :] + a * s[None, :]).to(target.dtype.element_ty)
    if IS_INTERLEAVED:
        tl.store(target + channel[None, :], tl.reshape(tl.join(first, second), (HEADS, 2 * PAIRS)), mask=inside)
    else:
        tl.store(target + channel[None, :], first, mask=inside)
        tl.store(target + ROTARY_DIM // 2 + channel[None, :], second, mask=inside)


@triton.jit
def _copy_tile(source, target, has_head, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Copy the channels of some heads from ``FIRST`` on; ``CHANNELS`` is their number or a larger power of two."""
    channel = FIRST + tl.arange(0, CHANNELS)[None, :]
    inside = has_head & (channel < HEAD_DIM)
    tl.store(target + channel, tl.load(source + channel, mask=inside), mask=inside)


@triton.jit
def rotate_program(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    query_out: tl.tensor,
    key_out: tl.tensor,
    value_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    batch: tl.tensor,
    num_groups: tl.tensor,
    heads_per_group: tl.tensor,
    query_stride_s: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_g: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_s: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_g: tl.tensor,
    value_stride_s: tl.tensor,
    value_stride_b: tl.tensor,
    value_stride_g: tl.tensor,
    query_out_stride_t: tl.tensor,
    query_out_stride_g: tl.tensor,
    query_out_stride_h: tl.tensor,
    key_out_stride_t: tl.tensor,
    key_out_stride_g: tl.tensor,
    angle_stride_s: tl.tensor,
    angle_stride_b: tl.tensor,
    IS_INTERLEAVED: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSED: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Rotate some heads of one token; programs along axis 1 process query and key heads, then copy value heads.

    Each output has one stride between tokens, and the value output has the strides of the key output. ``PASSED`` and
    ``CHANNELS`` are powers of two not below the number of unrotated channels and of all channels of a head. Without a
    value nothing is copied.
    """
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    sample = token % batch
    cos += position * angle_stride_s + sample * angle_stride_b
    sin += position * angle_stride_s + sample * angle_stride_b
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(num_groups * heads_per_group, HEADS)
    key_tiles = tl.cdiv(num_groups, HEADS)
    if tile < query_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)[:, None]
        has_head = head < num_groups * heads_per_group
        group = head // heads_per_group
        member = head % heads_per_group
        query += position * query_stride_s + sample * query_stride_b
        source = query + group * query_stride_g + member * query_stride_h
        target = query_out + token * query_out_stride_t + group * query_out_stride_g + member * query_out_stride_h
        _rotate_tile(source, target, has_head, cos, sin, IS_INTERLEAVED, IS_INVERSE, ROTARY_DIM, HEADS, PAIRS)
        if HEAD_DIM > ROTARY_DIM:
            _copy_tile(source, target, has_head, ROTARY_DIM, HEAD_DIM, PASSED)
    elif tile < query_tiles + key_tiles:
        group = (tile - query_tiles) * HEADS + tl.arange(0, HEADS)[:, None]
        has_head = group < num_groups
        source = key + position * key_stride_s + sample * key_stride_b + group * key_stride_g
        target = key_out + token * key_out_stride_t + group * key_out_stride_g
        _rotate_tile(source, target, has_head, cos, sin, IS_INTERLEAVED, IS_INVERSE, ROTARY_DIM, HEADS, PAIRS)
        if HEAD_DIM > ROTARY_DIM:
            _copy_tile(source, target, has_head, ROTARY_DIM, HEAD_DIM, PASSED)
    elif value is not None:
        group = (tile - query_tiles - key_tiles) * HEADS + tl.arange(0, HEADS)[:, None]
        has_head = group < num_groups
        source = value + position * value_stride_s + sample * value_stride_b + group * value_stride_g
        target = value_out + token * key_out_stride_t + group * key_out_stride_g
        _copy_tile(source, target, has_head, 0, HEAD_DIM, CHANNELS)


def block_sizes(rotary_dim: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time sizes of a kernel for heads of this width."""
    pairs = triton.next_power_of_2(rotary_dim // 2)
    return {
        "ROTARY_DIM": rotary_dim,
        "HEAD_DIM": head_dim,
        "HEADS": max(1, _TILE // pairs),
        "PAIRS": pairs,
        "PASSED": triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0,
        "CHANNELS": triton.next_power_of_2(head_dim),
    }


def _launch(
    sources: Heads, targets: Heads, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool, is_inverse: bool
) -> None:
    """Rotate the query and key of ``sources`` into ``targets``, whose tokens have one stride, and copy the value."""
    query, key, value = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in sources)
    query_out, key_out, value_out = targets
    assert query is not None
    assert key is not None
    length, batch, num_groups, heads_per_group, head_dim = query.shape
    if query.numel() == 0:
        return
    sizes = block_sizes(cos.shape[-1], head_dim)
    group_tiles = triton.cdiv(num_groups, sizes["HEADS"])
    tiles = triton.cdiv(num_groups * heads_per_group, sizes["HEADS"]) + group_tiles * (1 if value is None else 2)
    rotate_program[(length * batch, tiles)](
        query, key, value, query_out, key_out, value_out, cos, sin, batch, num_groups, heads_per_group,
        *query.stride()[:4], *key.stride()[:3], *(key if value is None else value).stride()[:3],
        *query_out.stride()[1:4], *key_out.stride()[1:3],
        cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0,
        IS_INTERLEAVED=is_interleaved, IS_INVERSE=is_inverse, **sizes,
    )  # fmt: skip


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return _rotated(query, key, cos, sin, is_interleaved, is_inverse=False)

    @staticmethod
    def backward(
        ctx: Any, query_grad: torch.Tensor, key_grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grads = _rotated(query_grad, key_grad, cos, sin, ctx.is_interleaved, is_inverse=True)
        return *grads, None, None, None


def _rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_interleaved: bool,
    is_inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    groups = key.shape[2]
    sources, targets = ((q.unflatten(2, (groups, -1)), k, None) for q, k in ((query, key), (query_out, key_out)))
    _launch(sources, targets, cos, sin, is_interleaved, is_inverse)
    return query_out, key_out


class _SplitAndRotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        length, batch, groups, stacked, head_dim = mixed.shape
        query = mixed.new_empty((length, batch, groups, stacked - 2, head_dim))
        key, value = (mixed.new_empty((length, batch, groups, head_dim)) for _ in range(2))
        _launch(_heads(mixed), (query, key, value), cos, sin, is_interleaved, is_inverse=False)
        return query.flatten(2, 3), key, value

    @staticmethod
    def backward(
        ctx: Any, query_grad: torch.Tensor, key_grad: torch.Tensor, value_grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        length, batch, groups, head_dim = key_grad.shape
        query_grad = query_grad.unflatten(2, (groups, -1))
        mixed_grad = key_grad.new_empty((length, batch, groups, query_grad.shape[3] + 2, head_dim))
        grads = (query_grad, key_grad, value_grad)
        _launch(grads, _heads(mixed_grad), cos, sin, ctx.is_interleaved, is_inverse=True)
        return mixed_grad, None, None, None


def _heads(mixed: torch.Tensor) -> Heads:
    """Return the query, key and value views of a projection."""
    return mixed[..., :-2, :], mixed[..., -2, :], mixed[..., -1, :]


def rotate_query_and_key(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys. Shapes: ``query: [s, b, heads, d]``, ``key: [s, b, groups, d]``."""
    result: tuple[torch.Tensor, torch.Tensor] = _Rotation.apply(query, key, cos, sin, is_interleaved)
    return result


def split_and_rotate(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton version of the torch function of the same name; the results do not keep ``mixed`` alive."""
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _SplitAndRotation.apply(mixed, cos, sin, is_interleaved)
    return result
