"""Triton kernels of softmax cross-entropy rows: one read forward, one read and one write backward.

A row's width is a multiple of 16 in every padded vocabulary. The number of its real columns is not. Loads and stores
are masked by the width, which keeps them 16 bytes wide, and the padding is masked in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FORWARD_BLOCK = 8192
_BACKWARD_BLOCK = 2048


@triton.jit
def normalizer_program(
    logits: tl.tensor,
    labels: tl.tensor,
    normalizer: tl.tensor,
    label_logit: tl.tensor,
    width: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write one row's log-sum-exp, and the logit of its label, or 0 if another rank holds the label's column."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    maximum = -float("inf")
    total = 0.0
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        x = tl.where(column < num_columns, x, -float("inf"))
        highest = tl.maximum(maximum, tl.max(x, axis=0))
        # If all values so far are -inf, -inf - -inf would be NaN.
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift), axis=0)
        maximum = highest
    tl.store(normalizer + row, maximum + tl.log(total))
    label = tl.load(labels + row)
    is_here = (label >= 0) & (label < num_columns)
    tl.store(label_logit + row, tl.load(logits + label, mask=is_here, other=0.0).to(tl.float32))


@triton.jit
def gradient_program(
    logits: tl.tensor,
    labels: tl.tensor,
    log_normalizer: tl.tensor,
    row_grad: tl.tensor,
    width: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Overwrite one block of a row with its gradient, and padding with zeros."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits += row * width
    x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
    label = tl.load(labels + row).to(tl.int32)
    probability = tl.exp(x - tl.load(log_normalizer + row))
    gradient = (probability - tl.where(column == label, 1.0, 0.0)) * tl.load(row_grad + row)
    gradient = tl.where(column < num_columns, gradient, 0.0)
    tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < width)


def normalizer_and_label_logits(
    logits: torch.Tensor, labels: torch.Tensor, num_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of the torch function of the same name."""
    num_rows, width = logits.shape
    normalizer, label_logit = logits.new_empty((2, num_rows), dtype=torch.float32).unbind()
    if num_rows:
        block = min(_FORWARD_BLOCK, triton.next_power_of_2(width))
        normalizer_program[(num_rows,)](
            logits, labels, normalizer, label_logit, width, num_columns, BLOCK=block, num_warps=8
        )
    return normalizer, label_logit


def overwrite_with_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_columns: int,
    log_normalizer: torch.Tensor,
    row_grad: torch.Tensor,
) -> None:
    """Triton version of the torch function of the same name."""
    num_rows, width = logits.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BACKWARD_BLOCK))
        gradient_program[grid](
            logits, labels, log_normalizer, row_grad, width, num_columns, BLOCK=_BACKWARD_BLOCK, num_warps=4
        )
