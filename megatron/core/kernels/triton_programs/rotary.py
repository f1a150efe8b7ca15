"""Queries and keys rotated in one launch: one read and one write of each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 1024
"""Pairs of channels that one program rotates."""


@triton.jit
def _rotate_tile(
    source,
    target,
    first_head,
    num_heads,
    head_stride,
    cos,
    sin,
    IS_INTERLEAVED: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSED: tl.constexpr,
):
    """Rotate ``HEADS`` heads of one token; ``PAIRS`` and ``PASSED`` are the powers of two that hold the channels."""
    head = first_head + tl.arange(0, HEADS)[:, None]
    has_head = head < num_heads
    source += head * head_stride
    target += head * HEAD_DIM
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
    if HEAD_DIM > ROTARY_DIM:
        passed = ROTARY_DIM + tl.arange(0, PASSED)[None, :]
        inside = has_head & (passed < HEAD_DIM)
        tl.store(target + passed, tl.load(source + passed, mask=inside), mask=inside)


@triton.jit
def rotate_program(
    query: tl.tensor,
    key: tl.tensor,
    query_out: tl.tensor,
    key_out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    batch: tl.tensor,
    query_heads: tl.tensor,
    key_heads: tl.tensor,
    query_stride_s: tl.tensor,
    query_stride_b: tl.tensor,
    query_stride_h: tl.tensor,
    key_stride_s: tl.tensor,
    key_stride_b: tl.tensor,
    key_stride_h: tl.tensor,
    angle_stride_s: tl.tensor,
    angle_stride_b: tl.tensor,
    IS_INTERLEAVED: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSED: tl.constexpr,
):
    """Rotate some heads of one token: programs along axis 1 take the query's heads first, then the key's."""
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    sample = token % batch
    cos += position * angle_stride_s + sample * angle_stride_b
    sin += position * angle_stride_s + sample * angle_stride_b
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(query_heads, HEADS)
    if tile < query_tiles:
        _rotate_tile(
            query + position * query_stride_s + sample * query_stride_b,
            query_out + token * query_heads * HEAD_DIM,
            tile * HEADS,
            query_heads,
            query_stride_h,
            cos,
            sin,
            IS_INTERLEAVED,
            IS_INVERSE,
            ROTARY_DIM,
            HEAD_DIM,
            HEADS,
            PAIRS,
            PASSED,
        )
    else:
        _rotate_tile(
            key + position * key_stride_s + sample * key_stride_b,
            key_out + token * key_heads * HEAD_DIM,
            (tile - query_tiles) * HEADS,
            key_heads,
            key_stride_h,
            cos,
            sin,
            IS_INTERLEAVED,
            IS_INVERSE,
            ROTARY_DIM,
            HEAD_DIM,
            HEADS,
            PAIRS,
            PASSED,
        )


def block_sizes(rotary_dim: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time sizes of a program for heads of this width."""
    pairs = triton.next_power_of_2(rotary_dim // 2)
    return {
        "ROTARY_DIM": rotary_dim,
        "HEAD_DIM": head_dim,
        "HEADS": max(1, _TILE // pairs),
        "PAIRS": pairs,
        "PASSED": triton.next_power_of_2(head_dim - rotary_dim) if head_dim > rotary_dim else 0,
    }


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_interleaved: bool,
    is_inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    length, batch, query_heads, head_dim = query.shape
    key_heads = key.shape[2]
    query_out = query.new_empty(query.shape)
    key_out = key.new_empty(key.shape)
    sizes = block_sizes(cos.shape[-1], head_dim)
    tiles = triton.cdiv(query_heads, sizes["HEADS"]) + triton.cdiv(key_heads, sizes["HEADS"])
    if query.numel():
        rotate_program[(length * batch, tiles)](
            query,
            key,
            query_out,
            key_out,
            cos,
            sin,
            batch,
            query_heads,
            key_heads,
            *query.stride()[:3],
            *key.stride()[:3],
            cos.stride(0),
            cos.stride(1) if cos.shape[1] > 1 else 0,
            IS_INTERLEAVED=is_interleaved,
            IS_INVERSE=is_inverse,
            **sizes,
        )
    return query_out, key_out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return _launch(query, key, cos, sin, is_interleaved, is_inverse=False)

    @staticmethod
    def backward(
        ctx: Any, query_grad: torch.Tensor, key_grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grads = _launch(query_grad, key_grad, cos, sin, ctx.is_interleaved, is_inverse=True)
        return *grads, None, None, None


def rotate_query_and_key(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what the torch twin of the same name does."""
    result: tuple[torch.Tensor, torch.Tensor] = _Rotation.apply(query, key, cos, sin, is_interleaved)
    return result
