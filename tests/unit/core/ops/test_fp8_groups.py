"""Groups of rows in FP8: against separate matrices, and the Triton programs against torch's operators, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.fp8_groups import (
    GRAIN,
    Activation,
    PaddedGroups,
    QuantizedGroups,
    quantize_activated,
    quantize_activation_gradient,
    quantize_groups,
    quantize_weights,
)
from megatron.core.ops.fp8_tensor import E4M3, ROWS, quantize
from megatron.core.ops.gated_activation import gated_activation, gated_kind_of
from megatron.core.ops.gemm import Groups, RowEnds, row_counts
from megatron.core.ops.token_rows import combine_gradients, gather_rows
from megatron.core.transformer.moe.expert_dispatch import sort_choices
from tests.harness.long_cases import some_long
from tests.unit.core.ops.interpreted import cpu_runs_on_triton, interpret, needs_triton

COUNTS = (5, 0, 33, 16, 1)
WIDTH = 300
PARTS = ("data", "scale", "turned", "turned_scale")


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
    for name in PARTS:
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
    for name in PARTS:
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


def dequantized(groups: PaddedGroups, found: QuantizedGroups) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rows of tokens in float64 from their plain form, and from their transpose."""
    slots, plain, turned = groups.order.slots.flatten(), None, None
    if found.data is not None:
        assert found.scale is not None
        plain = (found.data.double() * found.scale[:, None])[slots]
    if found.turned is not None:
        assert found.turned_scale is not None
        group = groups.group_of.repeat_interleave(GRAIN)[slots].long()
        turned = found.turned.double().t()[slots] * found.turned_scale[group]
    return plain, turned


def assert_rounded(actual: torch.Tensor | None, expected: torch.Tensor, dim: int) -> None:
    """Compare with values before they were rounded to E4M3 with scales by amaxes along ``dim``."""
    assert actual is not None
    # Half a unit of the last of three bits, and of the smallest number, 2^-9, if the largest is at most 448.
    most = expected.abs().amax(dim, keepdim=True)
    # They are rounded to float32 before.
    allowed = expected.abs() * (2**-4 + 2**-23) + most * 2**-10 / 224
    assert ((actual - expected).abs() <= allowed).all()


GATES = {"swiglu": F.silu, "geglu": partial(F.gelu, approximate="tanh")}


FEW = (5, 0, 17)


def inputs_of_activation(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, PaddedGroups]:
    """Return padded rows, the gradient of their gated activation, and their groups; the padding is NaN."""
    torch.manual_seed(8)
    up = rows_of(dtype)[: sum(FEW)]
    groups = PaddedGroups.of(row_counts(FEW), len(up), up.device)
    inner = torch.cat((torch.randn(up.shape).to(dtype) * 3, up), 1)
    return padded_rows(inner, groups), padded_rows(torch.randn(up.shape).to(dtype), groups), groups


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_activations_and_their_gradients_are_quantized(kind: str) -> None:
    x, grad, groups = inputs_of_activation(torch.float64)
    activation = partial(gated_activation, kind=kind)
    slots = groups.order.slots.flatten()
    wide = x[slots].requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    expected = GATES[kind](gate) * up
    (expected_grad,) = torch.autograd.grad(expected, wide, grad[slots])
    forward, backward, again = quantized_activation(x, grad, groups, activation)
    assert again.data is None
    assert torch.equal(as_bytes(again.turned), as_bytes(forward.turned))
    for found, values in ((forward, expected.detach()), (backward, expected_grad)):
        plain, turned = dequantized(groups, found)
        assert_rounded(plain, values, 1)
        for group, rows in enumerate(turned.split(FEW)):  # type: ignore[union-attr]
            if len(rows):
                assert_rounded(rows, values.split(FEW)[group], 0)


def test_only_gated_activations_without_offset_and_limit_have_a_kind() -> None:
    assert gated_kind_of(partial(gated_activation, kind="geglu", offset=0.0, limit=None)) == "geglu"
    assert gated_kind_of(partial(gated_activation, kind="swiglu", offset=1.0)) is None
    assert gated_kind_of(partial(gated_activation, kind="swiglu", limit=7.0)) is None
    assert gated_kind_of(partial(F.gelu, approximate="tanh")) is None
    assert gated_kind_of(F.silu) is None


def assert_equal(actual: QuantizedGroups, expected: QuantizedGroups) -> None:
    for name in PARTS:
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0)), name


def quantized_activation(
    x: torch.Tensor, grad: torch.Tensor, groups: PaddedGroups, activation: Activation
) -> tuple[QuantizedGroups, ...]:
    """Return an activation, the gradient of its input, and the transpose of the activation, quantized."""
    parts = {"plain": True, "transpose": True}
    return (
        quantize_activated(x, groups, activation, **parts),
        *quantize_activation_gradient(grad, x, groups, activation, **parts, activated=True),
    )


def quantized_after_activation(
    x: torch.Tensor, grad: torch.Tensor, groups: PaddedGroups, activation: Activation
) -> tuple[QuantizedGroups, ...]:
    """Return the same from an activation and a gradient that are written before they are quantized."""
    leaf = x.clone().requires_grad_()
    activated = activation(leaf)
    (x_grad,) = torch.autograd.grad(activated, leaf, grad)
    forward, backward = (groups.quantize(each, plain=True, transpose=True) for each in (activated, x_grad))
    return forward, backward, replace(forward, data=None, scale=None)


def check_activations(dtype: torch.dtype, kind: str) -> None:
    """Compare with kernels of the activation and of casts bit for bit, and with torch's operators in float64."""
    x, grad, groups = inputs_of_activation(dtype)
    activation = partial(gated_activation, kind=kind)
    slots = groups.order.slots.flatten()
    of_torch = quantized_activation(x.double(), grad.double(), groups, activation)
    with cpu_runs_on_triton():
        mine = quantized_activation(x, grad, groups, activation)
        theirs = quantized_after_activation(x, grad, groups, activation)
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)
        forward, backward, _ = theirs
        plain = quantize_activated(x, groups, activation, plain=True, transpose=False)
        assert_equal(plain, replace(forward, turned=None, turned_scale=None))
        turned, nothing = quantize_activation_gradient(
            grad, x, groups, activation, plain=False, transpose=True, activated=False
        )
        assert_equal(turned, replace(backward, data=None, scale=None))
        assert_equal(nothing, QuantizedGroups.of(None, None))
    for fused, of_twin in zip(mine, of_torch, strict=True):
        for number, (found, expected) in enumerate(zip(dequantized(groups, fused), dequantized(groups, of_twin))):
            if found is None or expected is None:
                assert found is expected is None
                continue
            for rows, expected_rows in zip(found.split(FEW), expected.split(FEW)):
                if len(rows):
                    # Both are rounded to E4M3, and one to bfloat16 before, which the interpreter truncates.
                    most = expected_rows.abs().amax(1 - number, keepdim=True)
                    allowed = expected_rows.abs() * (2**-3 + 2**-6) + most * (2**-9 / 224 + 2**-18)
                    assert ((rows - expected_rows).abs() <= allowed).all()
    # A value that is not finite is NaN in its row and in the column of its group.
    bad = int(slots[20])
    x[bad, 4] = float("inf")
    with cpu_runs_on_triton():
        mine = quantized_activation(x, grad, groups, activation)
        for one, other in zip(mine, quantized_after_activation(x, grad, groups, activation), strict=True):
            assert_equal(one, other)
    for found in mine[:2]:
        assert found.scale is not None
        assert found.scale.isnan().nonzero().flatten().tolist() == [bad]


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "kind"),
    some_long(
        list(itertools.product((torch.float32, torch.bfloat16), ("swiglu", "geglu"))),
        ((torch.float32, "geglu"), (torch.bfloat16, "swiglu")),
    ),
)
def test_programs_quantize_activations_as_they_compute_them(dtype: torch.dtype, kind: str) -> None:
    interpret(check_activations, dtype, kind)


def check_programs(dtype: torch.dtype, has_bad: bool, plain: bool, transpose: bool) -> None:
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
    # By powers of two, so that the products need no rounding, which the interpreter does otherwise than torch.
    powers = torch.randint(-3, 4, (len(chosen), chosen_groups.order.per_token)).float().exp2()
    weighted = {"order": chosen_groups.order, "weights": powers}
    parts = {"plain": plain, "transpose": transpose}
    arguments = (
        ((x, groups.group_of, len(groups.ends)), {"order": groups.order}),
        ((chosen, chosen_groups.group_of, len(chosen_groups.ends)), {"order": chosen_groups.order}),
        ((padded, groups.group_of, len(groups.ends)), of_padded),
        ((whole, of_whole, 2), {}),
        ((long, of_whole[:1], 1), {}),
        ((chosen, chosen_groups.group_of, len(chosen_groups.ends)), weighted),
    )
    expected = [quantize_groups(*given, **more, **parts) for given, more in arguments]
    with cpu_runs_on_triton():
        actual = [quantize_groups(*given, **more, **parts) for given, more in arguments]
    for mine, theirs in zip(actual, expected, strict=True):
        for name in PARTS:
            one, other = getattr(mine, name), getattr(theirs, name)
            assert (one is None) == (other is None)
            if one is not None:
                assert torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0)), name

    # Quantized as they are weighted, rows have the bits of weighted rows that are written in between.
    weights, empty = torch.rand(powers.shape), x.new_zeros(len(chosen_groups.order.choices), WIDTH)
    with cpu_runs_on_triton():
        written, _ = combine_gradients(chosen, empty, weights, chosen_groups.order)
        expected_rows = chosen_groups.quantize(written, **parts)
        found = chosen_groups.quantize(chosen, is_padded=False, weights=weights, **parts)
        assert_equal(found, expected_rows)


BOTH, PLAIN, TRANSPOSE = (True, True), (True, False), (False, True)


@needs_triton
@pytest.mark.parametrize(
    ("parts", "dtype", "has_bad"),
    some_long(
        list(itertools.product((BOTH, PLAIN, TRANSPOSE), (torch.float32, torch.bfloat16), (False, True))),
        ((BOTH, torch.bfloat16, True), (PLAIN, torch.float32, False), (TRANSPOSE, torch.float32, True)),
    ),
)
def test_programs_equal_torchs_operators(parts: tuple[bool, bool], dtype: torch.dtype, has_bad: bool) -> None:
    interpret(check_programs, dtype, has_bad, *parts)
