"""Groups of rows in FP8: against separate matrices, and the Triton programs against torch's operators, bit for bit."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.fp8_groups import GRAIN, PaddedGroups, QuantizedGroups, quantize_groups, quantize_weights
from megatron.core.ops.fp8_tensor import E4M3, ROWS, quantize
from megatron.core.ops.gemm import Groups, RowEnds, row_counts
from megatron.core.ops.token_rows import gather_rows
from megatron.core.transformer.moe.expert_dispatch import sort_choices
from tests.unit.core.ops.interpreted import cpu_runs_on_triton, interpret, needs_triton

COUNTS = (5, 0, 33, 16, 1)
WIDTH = 300


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(sum(COUNTS), WIDTH) * 10 ** (6 * torch.rand(sum(COUNTS), 1) - 3)
    x[7] = 0.0
    x[:, 11] = 0.0
    return x.to(dtype)


def as_bytes(data: torch.Tensor | None) -> torch.Tensor:
    assert data is not None
    return data.view(torch.uint8)


def padded_rows(x: torch.Tensor, groups: PaddedGroups) -> torch.Tensor:
    """Return the padded rows of tokens, whose padding is NaN."""
    rows = x.new_full((len(groups.order.choices), x.shape[1]), torch.nan)
    return rows.index_copy(0, groups.order.slots.flatten(), x)


def of_choices(x: torch.Tensor) -> tuple[torch.Tensor, PaddedGroups]:
    """Return tokens with three choices each, of which some are dropped, and the groups of their rows."""
    torch.manual_seed(6)
    tokens = x[::2].contiguous()
    ordered = sort_choices(torch.randint(0, 5, (len(tokens), 3)), 4)
    order = ordered.row_order()
    assert 0 < int(ordered.ends[-1]) < len(order.choices)
    return tokens, PaddedGroups.of(ordered.row_ends(), len(order.choices), x.device, order)


def quantized(x: torch.Tensor, groups: PaddedGroups, **parts: bool) -> QuantizedGroups:
    return quantize_groups(x, groups.group_of, len(groups.ends), order=groups.order, **parts)


@pytest.mark.parametrize("is_on_device", [False, True])
def test_each_group_is_quantized_as_a_separate_matrix(is_on_device: bool) -> None:
    x = rows_of(torch.bfloat16)
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    counts: Groups = RowEnds(ends) if is_on_device else row_counts(COUNTS)
    groups = PaddedGroups.of(counts, len(x), x.device)
    found = quantized(x, groups, plain=True, transpose=True)
    assert found.scale is not None
    assert found.turned_scale is not None
    assert groups.ends.ends.tolist() == [16, 16, 64, 80, 96]
    assert torch.equal(groups.order.choices[groups.order.slots.flatten()], torch.arange(len(x)))
    assert torch.equal(groups.sum_rows(x.new_zeros(len(groups.order.choices), WIDTH)), torch.zeros_like(x))
    starts = (0, *groups.ends.ends.tolist())
    for number, rows in enumerate(x.split(COUNTS)):
        own = slice(starts[number], starts[number] + len(rows))
        padding = slice(own.stop, starts[number + 1])
        assert not as_bytes(found.data)[padding].any()
        assert not as_bytes(found.turned)[:, padding].any()
        if not len(rows):
            continue
        plain, turned = quantize(rows, E4M3, ROWS), quantize(rows.t(), E4M3, ROWS)
        assert torch.equal(as_bytes(found.data)[own], as_bytes(plain.data))
        assert torch.equal(found.scale[own], plain.scale.flatten())
        assert torch.equal(as_bytes(found.turned)[:, own], as_bytes(turned.data))
        assert torch.equal(found.turned_scale[number], turned.scale.flatten())


@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True)])
def test_padded_rows_are_quantized_like_rows_whatever_their_padding(parts: tuple[bool, bool]) -> None:
    x = rows_of(torch.bfloat16)
    groups = PaddedGroups.of(row_counts(COUNTS), len(x), x.device)
    padded = padded_rows(x, groups)
    assert int(padded.isnan().any(1).sum()) == len(padded) - len(x) > 0
    plain, transpose = parts
    expected = quantized(x, groups, plain=plain, transpose=transpose)
    found = quantize_groups(
        padded,
        groups.group_of,
        len(groups.ends),
        order=groups.order,
        is_padded=True,
        plain=plain,
        transpose=transpose,
    )
    for name in ("data", "scale", "turned", "turned_scale"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.float(), other.float()), name


def test_rows_of_tokens_are_quantized_and_summed_like_copies_of_them() -> None:
    tokens, groups = of_choices(rows_of(torch.bfloat16))
    copies = gather_rows(tokens, groups.order)
    found, expected = (
        quantized(tokens, groups, plain=True, transpose=True),
        quantize_groups(copies, groups.group_of, len(groups.ends), plain=True, transpose=True),
    )
    for name in ("data", "scale", "turned", "turned_scale"):
        assert torch.equal(getattr(found, name).float(), getattr(expected, name).float()), name
    # Padding and the choices that were dropped add nothing.
    rows = torch.randn(copies.shape).double().masked_fill((groups.order.choices >= 3 * len(tokens))[:, None], 0.0)
    expected_sum = torch.zeros(tokens.shape).double()
    for row, choice in zip(rows, groups.order.choices.tolist()):
        if choice < 3 * len(tokens):
            expected_sum[choice // 3] += row
    torch.testing.assert_close(groups.sum_rows(rows), expected_sum)


def test_weights_are_quantized_expert_by_expert() -> None:
    torch.manual_seed(4)
    weight = torch.randn(3, 32, 48).bfloat16()
    found = quantize_weights(weight, plain=True, transpose=True)
    assert found.scale is not None
    assert found.turned_scale is not None
    for number, own in enumerate(weight):
        plain, turned = quantize(own, E4M3, ROWS), quantize(own.t(), E4M3, ROWS)
        part = slice(32 * number, 32 * (number + 1))
        assert torch.equal(as_bytes(found.data)[part], as_bytes(plain.data))
        assert torch.equal(found.scale[part], plain.scale.flatten())
        assert torch.equal(as_bytes(found.turned)[:, part], as_bytes(turned.data))
        assert torch.equal(found.turned_scale[number], turned.scale.flatten())


def check_programs(dtype: torch.dtype, has_bad: bool) -> None:
    x = rows_of(dtype)
    if has_bad:
        x[8, 3], x[20, 4] = float("nan"), float("inf")
    groups = PaddedGroups.of(row_counts(COUNTS), len(x), x.device)
    whole = torch.randn(2 * GRAIN, 70).to(dtype)
    long = torch.randn(GRAIN, 4100).to(dtype)
    padded = padded_rows(x, groups)
    of_padded = {"order": groups.order, "is_padded": True}
    chosen, chosen_groups = of_choices(x)
    of_whole = torch.arange(2, dtype=torch.int32)
    for plain, transpose in [(True, True), (True, False), (False, True)]:
        parts = {"plain": plain, "transpose": transpose}
        arguments = (
            ((x, groups.group_of, len(groups.ends)), {"order": groups.order}),
            ((chosen, chosen_groups.group_of, len(chosen_groups.ends)), {"order": chosen_groups.order}),
            ((padded, groups.group_of, len(groups.ends)), of_padded),
            ((whole, of_whole, 2), {}),
            ((long, of_whole[:1], 1), {}),
        )
        expected = [quantize_groups(*given, **more, **parts) for given, more in arguments]
        with cpu_runs_on_triton():
            actual = [quantize_groups(*given, **more, **parts) for given, more in arguments]
        for mine, theirs in zip(actual, expected, strict=True):
            for name in ("data", "scale", "turned", "turned_scale"):
                one, other = getattr(mine, name), getattr(theirs, name)
                assert (one is None) == (other is None)
                if one is not None:
                    assert torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0)), name


@needs_triton
@pytest.mark.parametrize("has_bad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_programs_equal_torchs_operators(dtype: torch.dtype, has_bad: bool) -> None:
    interpret(check_programs, dtype, has_bad)
