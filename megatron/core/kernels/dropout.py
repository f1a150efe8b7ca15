"""Dropout whose mask is a function of two keys for each row and of the column.

No generator is drawn from and no mask is kept: the backward pass computes it again from the keys. The mask of a column
``c`` follows from 32-bit words, all products and sums wrapping around and all shifts bringing in zeros::

    x = k0 + (c + 1) * 0x9E3779B1
    x ^= x >> 16;  x *= 0x21F0AAAD;  x ^= x >> 15;  x ^= k1;  x *= 0x735A2D97;  x ^= x >> 15

The element is kept where ``x >> 8`` is at least ``round(p * 2**24)``, and then divided by ``1 - p``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron.core.kernels.triton_choice import runs_on_triton

_COLUMN_STEP = 0x9E3779B1
_FIRST_FACTOR = 0x21F0AAAD
_SECOND_FACTOR = 0x735A2D97
_MASK_BITS = 24

# Elements in a block of rows. On CPU the words of a block stay in the cache; elsewhere this bounds the memory of words.
_CPU_BLOCK = 1 << 15
_BLOCK = 1 << 26


class RowKeys(NamedTuple):
    """Hold two int32 tensors with a key for each row: of the shape of what is dropped without its last dimension."""

    k0: torch.Tensor
    k1: torch.Tensor


def keyed_dropout(
    x: torch.Tensor, keys: RowKeys, probability: float, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x`` with elements set to 0 and the others divided by ``1 - probability``.

    ``columns`` number the last dimension; None is 0, 1, ….

    Shapes: ``x: […, c]``; keys ``[…]``; ``columns: [c]`` of any integers ``-> […, c]``.
    """
    output: torch.Tensor = _KeyedDropout.apply(x, *keys, columns, probability)  # type: ignore[no-untyped-call]
    return output


def drop_hidden(
    x: torch.Tensor, keys: RowKeys, probability: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what keyed dropout leaves of hidden states, added to the ``residual`` stream where that is given.

    Shapes: ``x, residual: […, h]``; keys ``[…]`` ``-> […, h]``.
    """
    tensors = (x,) if residual is None else (x, residual)
    if tensors[-1].dtype == x.dtype and runs_on_triton(*tensors):
        from megatron.core.kernels.triton_programs import dropout as programs

        return programs.drop_hidden(x, keys, probability, residual)
    dropped = keyed_dropout(x, keys, probability)
    return dropped if residual is None else residual + dropped


def drop_elements(
    x: torch.Tensor, keys: RowKeys, probability: float, columns: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what `keyed_dropout` returns, without a gradient."""
    rows = x.reshape(-1, x.shape[-1])
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    k0, k1 = (key.reshape(-1, 1) for key in keys)
    steps = _column_steps(x, columns)
    # Kept where the unsigned word is at least this one; subtracting 2**31 from both makes signed words of them.
    smallest_kept = (round(probability * (1 << _MASK_BITS)) << (32 - _MASK_BITS)) - (1 << 31)
    factor = 1.0 / (1.0 - probability)
    limit = _CPU_BLOCK if x.device.type == "cpu" else _BLOCK
    length = max(1, min(limit // rows.shape[1], rows.shape[0]))
    words = torch.empty((length, rows.shape[1]), dtype=torch.int32, device=x.device)
    shifted = torch.empty_like(words)
    kept = torch.empty_like(words, dtype=x.dtype)
    for start in range(0, rows.shape[0], length):
        block = slice(start, min(start + length, rows.shape[0]))
        size = block.stop - start
        word, other, mask = words[:size], shifted[:size], kept[:size]
        torch.add(k0[block], steps, out=word)
        _xor_shifted(word, 16, other)
        word.mul_(_FIRST_FACTOR)
        _xor_shifted(word, 15, other)
        word.bitwise_xor_(k1[block]).mul_(_SECOND_FACTOR)
        _xor_shifted(word, 15, other)
        # A product with 0 and 1 of x's own type, since torch's filling by a mask is slow on CPU.
        torch.ge(word.bitwise_xor_(-(1 << 31)), smallest_kept, out=mask)
        torch.mul(rows[block], factor, out=output[block]).mul_(mask)
    return output.view(x.shape)


def _column_steps(x: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    if columns is None:
        columns = torch.arange(x.shape[-1], device=x.device)
    # A product of int64 whose lowest 32 bits are those of the 32-bit product.
    return ((columns.to(torch.int64) + 1) * _COLUMN_STEP).to(torch.int32)


def _xor_shifted(word: torch.Tensor, shift: int, other: torch.Tensor) -> None:
    """Compute ``word ^= word >> shift`` in place, with zeros coming in; ``other`` is room of the same shape."""
    torch.bitwise_right_shift(word, shift, out=other)
    word.bitwise_xor_(other.bitwise_and_((1 << (32 - shift)) - 1))


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        k0: torch.Tensor,
        k1: torch.Tensor,
        columns: torch.Tensor | None,
        probability: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(k0, k1, columns)
        ctx.probability = probability
        return drop_elements(x, RowKeys(k0, k1), probability, columns)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        k0, k1, columns = ctx.saved_tensors
        return drop_elements(grad, RowKeys(k0, k1), ctx.probability, columns), None, None, None, None
