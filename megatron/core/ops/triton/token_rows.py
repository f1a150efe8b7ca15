"""Triton kernels that permute tokens to rows sorted by expert, and combine the rows of each token.

Every row and every token is written by one program, and a token's rows are summed in the order of its choices, so that
results are deterministic. Arithmetic is float32, and a result is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def gather_program(
    x: tl.tensor,
    choices: tl.tensor,
    rows: tl.tensor,
    per_token: tl.tensor,
    num_choices: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write one block of a row: that of the choice's token, or zeros for a row without a choice."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    choice = tl.load(choices + row)
    token = choice // per_token
    values = tl.load(x + token * width + column, mask=inside & (choice < num_choices), other=0.0)
    tl.store(rows + row * width + column, values, mask=inside)


@triton.jit
def sum_program(
    rows: tl.tensor,
    slots: tl.tensor,
    weights: tl.tensor,
    total: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one block of the sum of a token's rows, weighted if there are ``weights``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sums = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(PER_TOKEN):
        slot = tl.load(slots + token * PER_TOKEN + number)
        values = tl.load(rows + slot * width + column, mask=inside & (slot < num_rows), other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.load(weights + token * PER_TOKEN + number).to(tl.float32)
        sums += values
    tl.store(total + token * width + column, sums.to(total.dtype.element_ty), mask=inside)


@triton.jit
def combine_gradient_program(
    grad: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    choices: tl.tensor,
    rows_grad: tl.tensor,
    weights_grad: tl.tensor,
    per_token: tl.tensor,
    num_choices: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write the gradient of a row, zeros without a choice, if it is needed, and the gradient of its weight."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(choices + row)
    has_choice = choice < num_choices
    token = choice // per_token
    weight = tl.load(weights + choice, mask=has_choice, other=0.0).to(tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < width
        out = tl.load(grad + token * width + column, mask=inside & has_choice, other=0.0).to(tl.float32)
        values = tl.load(rows + row * width + column, mask=inside & has_choice, other=0.0).to(tl.float32)
        products += out * values
        if rows_grad is not None:
            tl.store(rows_grad + row * width + column, (out * weight).to(rows_grad.dtype.element_ty), mask=inside)
    tl.store(weights_grad + choice, tl.sum(products).to(weights_grad.dtype.element_ty), mask=has_choice)


@triton.jit
def add_groups_program(
    groups: tl.tensor, ends: tl.tensor, total: tl.tensor, size: tl.tensor, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add a block of the matrix of a group with rows to ``total``, or overwrite it; others are zeros."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    has_rows = tl.load(ends + group) > start
    inside = place < size
    values = tl.load(groups + group * size + place, mask=inside & has_rows, other=0.0).to(tl.float32)
    if ADDS:
        inside = inside & has_rows
        values += tl.load(total + group * size + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + group * size + place, values.to(total.dtype.element_ty), mask=inside)


def gather_rows(x: torch.Tensor, choices: torch.Tensor, per_token: int) -> torch.Tensor:
    """Triton version of the torch function of the same name, with ``per_token`` choices."""
    num_rows, width = len(choices), x.shape[1]
    rows = x.new_empty(num_rows, width)
    if rows.numel():
        gather_program[(num_rows, triton.cdiv(width, _BLOCK))](
            x.contiguous(), choices.contiguous(), rows, per_token, len(x) * per_token, width, BLOCK=_BLOCK
        )
    return rows


def sum_rows(rows: torch.Tensor, weights: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Triton version of the torch function of the same name, and with ``weights`` of ``combine_rows``."""
    (num_tokens, per_token), width = slots.shape, rows.shape[1]
    total = rows.new_empty((num_tokens, width), dtype=dtype)
    if total.numel():
        sum_program[(num_tokens, triton.cdiv(width, _BLOCK))](
            rows.contiguous(), slots.contiguous(), None if weights is None else weights.contiguous(), total,
            len(rows), width, PER_TOKEN=per_token, BLOCK=_BLOCK,
        )  # fmt: skip
    return total


def combine_gradients(
    grad: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    choices: torch.Tensor,
    has_dropped_choices: bool,
    *,
    of_rows: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Triton version of the torch function of the same name, or without ``of_rows`` of ``weights_gradient``."""
    num_rows, width = rows.shape
    rows_grad = torch.empty_like(rows, memory_format=torch.contiguous_format) if of_rows else None
    # The program writes the gradients of the weights of choices that have rows.
    make = torch.zeros_like if has_dropped_choices else torch.empty_like
    weights_grad = make(weights, memory_format=torch.contiguous_format)
    if rows.numel():
        combine_gradient_program[(num_rows,)](
            grad.contiguous(), rows.contiguous(), weights.contiguous(), choices.contiguous(),
            rows_grad, weights_grad, weights.shape[1], weights.numel(), width, BLOCK=_BLOCK,
        )  # fmt: skip
    return rows_grad, weights_grad


def add_groups(total: torch.Tensor, groups: torch.Tensor, ends: torch.Tensor, *, overwrite: bool) -> None:
    """Triton version of the torch function of the same name."""
    assert total.is_contiguous(), "main gradients are slices of flat buffers"
    size = total[0].numel()
    add_groups_program[(triton.cdiv(size, _BLOCK), len(total))](
        groups.contiguous(), ends, total, size, ADDS=not overwrite, BLOCK=_BLOCK
    )
