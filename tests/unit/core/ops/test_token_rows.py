"""Rows of tokens: torch functions against loops in float64, and Triton's programs against the torch functions."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.gemm import RowEnds
from megatron.core.ops.token_rows import (
    RowOrder,
    add_groups,
    combine_gradients,
    combine_rows,
    gather_rows,
    sum_rows,
    weights_gradient,
)
from megatron.core.transformer.moe.expert_dispatch import combine, sort_choices, take_rows
from tests.unit.core.ops.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

NUM_TOKENS, PER_TOKEN, NUM_EXPERTS, WIDTH = 11, 3, 6, 70
DTYPES = [torch.float32, torch.bfloat16]


def orders() -> dict[str, RowOrder]:
    """Return every kind of order; expert 2 has no tokens, and with dropped choices two tokens have none."""
    generator = torch.Generator().manual_seed(3)
    experts = torch.tensor([0, 1, 3, 4, 5])
    indices = torch.stack([experts[torch.randperm(5, generator=generator)[:PER_TOKEN]] for _ in range(NUM_TOKENS)])
    dropped = indices.clone()
    dropped[3] = dropped[7] = dropped[1, 2] = NUM_EXPERTS
    whole, partial = sort_choices(indices, NUM_EXPERTS), sort_choices(dropped, NUM_EXPERTS)
    return {
        "all": whole.row_order(may_drop=False),
        "all read": whole.row_order(NUM_TOKENS * PER_TOKEN),
        "dropped": partial.row_order(),
        "dropped read": partial.row_order(NUM_TOKENS * PER_TOKEN - 7),
        "padded": partial.padded_row_order(int(whole.counts().max()) + 2),
        "of no token": sort_choices(indices[:0], NUM_EXPERTS).padded_row_order(2),
    }


def looped(
    x: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, order: RowOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each choice, and each token's weighted sum, one after the other."""
    taken = torch.zeros(len(order.choices), x.shape[1], dtype=x.dtype)
    total = torch.zeros_like(x)
    for row, choice in enumerate(order.choices.tolist()):
        if choice < weights.numel():
            token, number = divmod(choice, PER_TOKEN)
            assert order.slots[token, number] == row
            taken[row] = x[token]
            total[token] += weights[token, number] * rows[row]
    is_dropped = order.slots >= len(order.choices)
    assert int(is_dropped.sum()) == weights.numel() - int((order.choices < weights.numel()).sum())
    return taken, total


def operands(order: RowOrder, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return tokens, weights, rows and a gradient; rows without a choice have no numbers."""
    generator = torch.Generator().manual_seed(4)
    num_tokens = len(order.slots)
    shapes = ((num_tokens, WIDTH), (num_tokens, PER_TOKEN), (len(order.choices), WIDTH), (num_tokens, WIDTH))
    x, weights, rows, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    rows[order.choices >= weights.numel()] = torch.nan
    return x, weights.masked_fill(order.slots >= len(rows), 0.0), rows, grad


@pytest.mark.parametrize("kind", orders())
def test_rows_are_those_of_a_loop_over_choices(kind: str) -> None:
    order = orders()[kind]
    x, weights, rows, grad = operands(order, torch.float64)
    taken, total = looped(x, weights, rows, order)
    assert torch.equal(gather_rows(x, order), taken)
    torch.testing.assert_close(combine_rows(rows, weights, order, rows.dtype), total, rtol=1e-13, atol=1e-13)
    ones = torch.ones_like(weights)
    torch.testing.assert_close(sum_rows(rows, order), looped(x, ones, rows, order)[1], rtol=1e-13, atol=1e-13)
    filled = rows.nan_to_num(0.0).requires_grad_()
    weights.requires_grad_()
    if len(x):
        expected = torch.autograd.grad(looped(x, weights, filled, order)[1], (filled, weights), grad)
        with torch.no_grad():
            found = combine_gradients(grad, rows, weights, order)
        for actual, exact in zip(found, expected):
            torch.testing.assert_close(actual, exact, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", ["all", "dropped", "padded"])
def test_gradients_are_those_of_differences(kind: str) -> None:
    order = orders()[kind]
    x, weights, rows, _ = operands(order, torch.float64)
    rows = rows.nan_to_num(0.0)
    few = [each[:, :4].clone().requires_grad_() for each in (x, rows)]
    assert torch.autograd.gradcheck(lambda given: take_rows(given, order), few[0])
    assert torch.autograd.gradcheck(lambda *given: combine(*given, order), (few[1], weights.requires_grad_()))


def check_programs(dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import token_rows as programs

    programs._BLOCK = 32
    for order in orders().values():
        x, weights, rows, grad = operands(order, dtype)
        exact = [each.double() for each in (x, weights, rows, grad)]
        with cpu_runs_on_triton():
            taken, summed = gather_rows(x, order), sum_rows(rows, order)
            combined = combine_rows(rows, weights, order, dtype)
            wide = combine_rows(rows, weights.float(), order, torch.float32)
            found = combine_gradients(grad, rows, weights, order)
            assert torch.equal(weights_gradient(grad, rows, weights, order), found[1])
        assert torch.equal(taken, gather_rows(x, order))
        if not len(x):
            assert not taken.any()
            continue
        close(summed, sum_rows(exact[2], order))
        close(combined, combine_rows(exact[2], exact[1], order, torch.float64))
        close(wide, combine_rows(exact[2], exact[1], order, torch.float64))
        for actual, expected in zip(found, combine_gradients(exact[3], exact[2], exact[1], order)):
            assert actual.dtype == dtype
            close(actual, expected)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_of_rows(dtype: torch.dtype) -> None:
    interpret(check_programs, dtype)


def check_added_groups(dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import token_rows as programs

    programs._BLOCK = 32
    ends = RowEnds(torch.tensor([0, 4, 4, 9, 9], dtype=torch.int32))
    groups = torch.randn(5, 7, 10, generator=torch.Generator().manual_seed(5)).to(dtype)
    groups[ends.are_empty()] = torch.nan
    before = torch.randn(5, 7, 10, generator=torch.Generator().manual_seed(6))
    for overwrite in (False, True):
        expected = groups.double().nan_to_num(0.0) + (0.0 if overwrite else before.double())
        twin, total = before.clone(), before.clone()
        add_groups(twin, groups.clone(), ends, overwrite=overwrite)
        with cpu_runs_on_triton():
            add_groups(total, groups, ends, overwrite=overwrite)
        assert torch.equal(total, twin)
        close(total, expected)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_without_rows_add_zeros(dtype: torch.dtype) -> None:
    interpret(check_added_groups, dtype)
