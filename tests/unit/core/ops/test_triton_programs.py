"""Triton's programs, interpreted on the CPU, against their torch twins and float64, alone and in a whole model."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules import module as hooks

from megatron.core.distributed import GatherHook
from megatron.core.main_grad import MainGrad, Receiver, attach_main_grad, bias_gradient, leave_parts, receive_parts
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops import cross_entropy, fp8_tensor
from megatron.core.ops import gated_activation as gated_activation_module
from megatron.core.ops.dropout import DropoutKeys, DropoutSamples, RowKeys, drop_hidden
from megatron.core.ops.fp8_quantizers import Float8State
from megatron.core.ops.fp8_tensor import (
    E4M3,
    E5M2,
    ROWS,
    SEGMENTS_OF_32,
    SEGMENTS_OF_128,
    SQUARES_OF_128,
    WHOLE,
    Quantized,
    amax_of,
    quantize,
    quantize_both,
    quantize_whole,
    scale_of,
)
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.ops.linear_attention import causal_convolution, recurrent_causal_convolution
from megatron.core.process_group import Group, single_rank_group
from megatron.core.tensor_parallel.cross_entropy import vocab_sharded_cross_entropy
from megatron.core.transformer.mlp import ACTIVATIONS, FeedForward
from megatron.core.transformer.rotary_pos_embedding import (
    RotaryAngles,
    apply_rotary,
    apply_rotary_to_both,
    split_and_rotate,
    split_projection,
)
from tests.harness.float8_products import assert_products
from tests.harness.toy_model import make_batch, make_float8_model, make_model, tensor_parallel_group
from tests.unit.core.ops.interpreted import ULP, close, cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)]


def check_block_sizes() -> None:
    from megatron.core.ops import triton as triton_kernels

    sizes = {
        f"{module.name}.{name}": value
        for module in pkgutil.iter_modules(triton_kernels.__path__)
        for name, value in vars(importlib.import_module(f"{triton_kernels.__name__}.{module.name}")).items()
        if name.endswith(("_BLOCK", "_TILE", "_ROWS", "_COLUMNS"))
    }
    assert {"cross_entropy._FORWARD_BLOCK", "query_key_value._TILE", "column_sums._ROWS"} <= sizes.keys()
    # Triton takes no other ranges.
    assert all(size & (size - 1) == 0 < size for size in sizes.values()), sizes


def test_block_sizes_are_powers_of_two() -> None:
    interpret(check_block_sizes)


def check_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    from megatron.core.ops.triton import cross_entropy as programs

    programs._FORWARD_BLOCK, programs._BACKWARD_BLOCK = 64, 128
    for width, num_columns in [(300, 290), (48, 48), (40, 1), (24, 0)]:
        logits = (4 * torch.randn(9, width)).to(dtype)
        logits[0, : min(70, num_columns - 1)] = -torch.inf
        # Some labels are other ranks'.
        labels = torch.randint(-20, width + 20, (9,))
        labels[1] = num_columns - 1
        twin, result = logits.clone(), logits.clone()
        expected = cross_entropy.normalizer_and_label_logits(twin, labels, num_columns)
        with cpu_runs_on_triton():
            actual = cross_entropy.normalizer_and_label_logits(result, labels, num_columns)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(result, logits)
        row_grad = torch.rand(9)
        whole = torch.logaddexp(expected[0], torch.randn(9))
        cross_entropy.overwrite_with_gradient(twin, labels, num_columns, expected[0], whole, row_grad)
        with cpu_runs_on_triton():
            cross_entropy.overwrite_with_gradient(result, labels, num_columns, actual[0], whole, row_grad)
        if num_columns:
            close(result, twin)
        assert not result[:, num_columns:].any()


@pytest.mark.default(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_cross_entropy(dtype: torch.dtype) -> None:
    interpret(check_rows, dtype)


def check_loss_of_ranks(dtype: torch.dtype, vocab_size: int) -> None:
    torch.manual_seed(6)
    tp = tensor_parallel_group()
    whole = (3 * torch.randn(5, 3, 2 * 24)).to(dtype)
    labels = torch.randint(0, vocab_size, (3, 5)).t()
    weights = torch.rand(5, 3)
    wide = whole.double().requires_grad_()
    expected = F.cross_entropy(wide[..., :vocab_size].flatten(0, 1), labels.flatten(), reduction="none").view(5, 3)
    (expected * weights).sum().backward()
    assert wide.grad is not None
    shard = whole.chunk(2, dim=-1)[tp.rank].contiguous().requires_grad_()
    logits = shard * 1
    with cpu_runs_on_triton():
        losses = vocab_sharded_cross_entropy(logits, labels, vocab_size, tp)
        (gradient,) = torch.autograd.grad(losses, logits, weights)
    assert gradient.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(losses.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
    close(gradient, wide.grad.chunk(2, dim=-1)[tp.rank])


@pytest.mark.parametrize(("dtype", "vocab_size"), [(torch.float32, 45), (torch.bfloat16, 45), (torch.float32, 24)])
def test_two_ranks_have_the_loss_of_one_and_its_gradient_in_the_logits(dtype: torch.dtype, vocab_size: int) -> None:
    interpret(check_loss_of_ranks, dtype, vocab_size, world_size=2)


def check_gated_activations(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    from megatron.core.ops.triton import activation as programs

    programs._BLOCK = 32
    for kind in programs.GATED_KINDS:
        x = (2 * torch.randn(5, 3, 2 * 70)).to(dtype).requires_grad_()
        grad = torch.randn(5, 3, 70).to(dtype)
        expected = gated_activation(x.double(), kind)
        (expected_grad,) = torch.autograd.grad(expected, x, grad.double())
        with cpu_runs_on_triton():
            actual = gated_activation(x, kind)
            # A gradient that is the same for every element has no memory of its own.
            (of_sum,) = torch.autograd.grad(actual.sum(), x, retain_graph=True)
            (actual_grad,) = torch.autograd.grad(actual, x, grad)
        close(actual, expected)
        close(actual_grad, expected_grad)
        close(of_sum, torch.autograd.grad(gated_activation(x.double(), kind).sum(), x)[0])


@pytest.mark.default(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    interpret(check_gated_activations, dtype)


def check_new_gates() -> None:
    """Compare gated activations that are new to the tables with autograd in float64, plain and with limits."""
    gated_activation_module._GATES["mish_glu"] = F.mish
    gated_activation_module._STEEPNESS["steep_glu"] = 1.7
    functions = {"mish_glu": F.mish, "steep_glu": lambda x: x * torch.sigmoid(1.7 * x)}
    x = (2 * torch.randn(5, 3, 2 * 70)).requires_grad_()
    for kind, function in functions.items():
        for offset, limit in ((0.0, None), (1.0, 0.75)):
            gate, up = x.double().chunk(2, dim=-1)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            expected = function(gate) * (up + offset)
            with cpu_runs_on_triton():
                actual = gated_activation(x, kind, offset, limit)
                (actual_grad,) = torch.autograd.grad(actual.sum(), x)
            close(actual, expected)
            close(actual_grad, torch.autograd.grad(expected.sum(), x)[0])


def test_a_gated_activation_without_a_program_is_computed_by_torch() -> None:
    interpret(check_new_gates)


def check_rotation(dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(8)
    from megatron.core.ops.triton import query_key_value as programs

    programs._TILE = 32
    # Queries and keys are views of one projection, as attention cuts them; 12 of 20 channels or all are rotated.
    for rotary_dim, batch_of_angles, groups, members in [(12, 1, 2, 3), (12, 2, 5, 1), (20, 2, 5, 1)]:
        half = 3 * torch.randn(3, batch_of_angles, 1, rotary_dim // 2)
        full = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
        angles = RotaryAngles(full.cos(), full.sin(), interleaved)
        mixed = torch.randn(3, 2, groups, members + 2, 20).to(dtype).requires_grad_()
        query, key, _ = split_projection(mixed)
        compare_heads(
            mixed,
            (apply_rotary(query, angles), apply_rotary(key, angles)),
            partial(apply_rotary_to_both, query, key, angles),
        )
        compare_heads(mixed, split_and_rotate(mixed, angles), partial(split_and_rotate, mixed, angles))


def compare_heads(
    mixed: torch.Tensor, expected: tuple[torch.Tensor, ...], rotate: Callable[[], tuple[torch.Tensor, ...]]
) -> None:
    with cpu_runs_on_triton():
        actual = rotate()
        # As they come from attention that has the heads before the sequence, but for one.
        grads = [torch.randn(2, x.shape[2], 3, 20).to(x.dtype).permute(2, 0, 1, 3) for x in actual]
        grads[-1] = grads[-1].contiguous()
        (actual_grad,) = torch.autograd.grad(actual, mixed, grads, retain_graph=True)
    assert all(x.is_contiguous() for x in (*actual, actual_grad))
    (expected_grad,) = torch.autograd.grad(expected, mixed, grads, retain_graph=True)
    for one, other in zip((*actual, actual_grad), (*expected, expected_grad), strict=True):
        close(one, other)


@pytest.mark.default(2)
@pytest.mark.parametrize(
    ("dtype", "interleaved"),
    [
        (torch.float32, False),
        (torch.bfloat16, True),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.long),
        pytest.param(torch.float32, True, marks=pytest.mark.long),
    ],
)
def test_rotation_of_queries_and_keys_and_of_their_projection(dtype: torch.dtype, interleaved: bool) -> None:
    interpret(check_rotation, dtype, interleaved)


def check_convolution(dtype: torch.dtype, silu: bool) -> None:
    from megatron.core.ops.triton import causal_convolution as programs

    torch.manual_seed(13)
    programs._ROWS, programs._COLUMNS = 4, 8
    # Tiles of positions and channels are cut off at the end, also before a window is full.
    for batch, positions, channels, width in [(2, 11, 10, 4), (1, 2, 8, 4), (3, 5, 3, 2), (2, 4, 9, 1)]:
        starts = torch.rand(batch, positions) < 0.3
        x = torch.randn(batch, positions, channels).to(dtype)
        weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)
        state = torch.randn(batch, width - 1, channels)
        grads = torch.randn(batch, positions, channels).to(dtype), torch.randn(batch, width - 1, channels)
        for with_bias, with_state, document_starts in [(bias, state, starts), (None, None, None)]:
            leaves = [each for each in (x, weight, with_bias, with_state) if each is not None]
            wide = [each.double().requires_grad_() for each in leaves]
            expected = recurrent_causal_convolution(
                *(wide if len(wide) == 4 else [*wide, None, None]), document_starts, silu=silu, return_state=True
            )
            leaves = [each.detach().requires_grad_() for each in leaves]
            with cpu_runs_on_triton():
                actual = causal_convolution(
                    *(leaves if len(leaves) == 4 else [*leaves, None, None]),
                    *(document_starts,),
                    silu=silu,
                    return_state=True,
                )
                actual_grads = torch.autograd.grad(actual, leaves, grads)
            expected_grads = torch.autograd.grad(expected, wide, [each.double() for each in grads])
            for one, other in zip((*actual, *actual_grads), (*expected, *expected_grads)):
                if one.numel():
                    close(one, other)


@pytest.mark.default(1)
@pytest.mark.parametrize(("dtype", "silu"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)])
def test_causal_convolution(dtype: torch.dtype, silu: bool) -> None:
    interpret(check_convolution, dtype, silu)


BIAS_DTYPES = [torch.float32, torch.bfloat16]


def check_activations(dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import activation as programs

    torch.manual_seed(11)
    # Parts of 4, 4, 4 and 3 rows; blocks of 32, 32 and 6 columns.
    programs._BLOCK, programs._MAX_PARTS = 32, 4
    for kind in programs.PLAIN_KINDS:
        activation = ACTIVATIONS[kind]
        x = (2 * torch.randn(5, 3, 70)).to(dtype).requires_grad_()
        bias = torch.zeros(70, dtype=dtype, requires_grad=True)
        # As it comes from a product: transposed.
        grad = torch.randn(3, 5, 70).to(dtype).transpose(0, 1)
        expected = activation(x.double() + bias.double())
        actual = programs.activate_with_bias(x, bias, activation, kind)
        assert torch.equal(actual, activation(x))
        for one, other in zip(
            torch.autograd.grad(actual, (x, bias), grad), torch.autograd.grad(expected, (x, bias), grad.double())
        ):
            close(one, other)
    empty = torch.zeros(0, 3, 70, requires_grad=True)
    (of_nothing,) = torch.autograd.grad(programs.activate_with_bias(empty, bias, F.gelu, "gelu").sum(), bias)
    assert torch.equal(of_nothing, torch.zeros(70, dtype=dtype))


@pytest.mark.default(1)
@pytest.mark.parametrize("dtype", BIAS_DTYPES)
def test_activations_and_the_bias_before_them(dtype: torch.dtype) -> None:
    interpret(check_activations, dtype)


def check_split(dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import query_key_value as programs

    torch.manual_seed(12)
    # Tiles of two heads; parts of 2, 2 and 1 tokens.
    programs._TILE, programs._MAX_PARTS = 64, 3
    for groups, members in [(5, 1), (3, 2), (1, 3)]:
        mixed = torch.randn(5, 1, groups, members + 2, 20).to(dtype).requires_grad_()
        for of_batch in (mixed, mixed.expand(5, 2, groups, members + 2, 20)):
            bias = torch.zeros(groups * (members + 2) * 20, dtype=dtype, requires_grad=True)
            actual = split_projection(of_batch, bias)
            # As they come from attention that has the heads before the sequence, but for one.
            grads = [torch.randn(x.shape[1], x.shape[2], 5, 20).to(dtype).permute(2, 0, 1, 3) for x in actual]
            grads[-1] = grads[-1].contiguous()
            expected = split_projection(of_batch.double() + bias.double().view(mixed.shape[2:]))
            wide_grads = torch.autograd.grad(expected, (mixed, bias), [grad.double() for grad in grads])
            for one, other in zip(torch.autograd.grad(actual, (mixed, bias), grads), wide_grads):
                close(one, other)


@pytest.mark.default(1)
@pytest.mark.parametrize("dtype", BIAS_DTYPES)
def test_a_projection_in_parts_and_its_bias(dtype: torch.dtype) -> None:
    interpret(check_split, dtype)


def check_receivers() -> None:
    torch.manual_seed(13)
    parameters = [torch.zeros(70, dtype=torch.bfloat16) for _ in range(3)]
    events: list[str] = []
    totals = [torch.full((70,), 7.0) for _ in range(2)]
    for name, parameter, total in zip(("first", "third"), parameters[::2], totals):
        attach_main_grad(parameter, MainGrad(total, on_complete=partial(events.append, name)))
    expected = torch.zeros(3, 70, dtype=torch.float64)
    for num_parts in (130, 3):
        parts = torch.randn(3, num_parts, 70)
        first, second, third = receive_parts(parts, [Receiver.of(parameter) for parameter in parameters])
        assert first is None
        assert third is None
        assert second is not None
        assert second.dtype == torch.bfloat16
        close(second, parts[1].double().sum(0))
        # The first contribution overwrites what was there, the second is added.
        expected += parts.double().sum(1)
        close(totals[0], expected[0])
        close(totals[1], expected[2])
    assert events == ["first", "third", "first", "third"]
    # Several layers' contributions meet in autograd.
    attach_main_grad(parameters[1], MainGrad(torch.zeros(70), num_uses=2))
    assert Receiver.of(parameters[1]).main_grad is None


def test_sums_go_into_main_gradients_or_to_autograd() -> None:
    interpret(check_receivers)


class _LeavesSums(torch.autograd.Function):
    """Receive partial sums of some widths in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: list[torch.Tensor], receivers: list[Receiver]) -> torch.Tensor:
        ctx.parts, ctx.receivers = parts, receivers
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        at = 0
        for parts in ctx.parts:
            assert receive_parts(parts, ctx.receivers[at : at + len(parts)]) == [None] * len(parts)
            at += len(parts)
        return grad, None, None


def check_sums_of_a_backward_pass() -> None:
    from megatron.core.ops.triton import column_sums

    torch.manual_seed(14)
    shapes = [(2, 130, 70), (1, 3, 200), (1, 64, 32), (2, 65, 33), (1, 1, 96), (2, 7, 70), (1, 9, 5)]
    widths = [width for count, _, width in shapes for _ in range(count)]
    events: list[int] = []
    main_grads = [MainGrad(torch.full((width,), 7.0)) for width in widths]
    for number, main_grad in enumerate(main_grads):
        main_grad.on_complete = partial(events.append, number)
    receivers = [Receiver(torch.float32, main_grad) for main_grad in main_grads]
    launched: list[int] = []
    sum_parts = column_sums.sum_parts

    def count(parts: Any, totals: Any, adds: Any) -> None:
        launched.append(len(totals))
        sum_parts(parts, totals, adds)

    expected = [torch.zeros(width, dtype=torch.float64) for width in widths]
    triton_package = sys.modules["megatron.core.ops.triton"]
    for _ in range(2):
        all_parts = [torch.randn(shape) for shape in shapes]
        events.clear()
        launched.clear()
        x = torch.ones(1, requires_grad=True)
        with patch.object(triton_package, "sum_parts", count, create=True):
            _LeavesSums.apply(x, all_parts, receivers).backward()  # type: ignore[no-untyped-call]
        assert launched == [7, 3]
        assert events == [*range(len(widths))]
        for total, part in zip(expected, [part for parts in all_parts for part in parts], strict=True):
            total += part.double().sum(0)
    for main_grad, total in zip(main_grads, expected, strict=True):
        close(main_grad.tensor, total)
    # Neither memory that is allocated for the first contribution nor communication waits, nor do captured layers.
    for change in ({"on_begin": lambda: None}, {"may_wait": False}, {"is_awaited": lambda: True}):
        main_grads[0].on_begin, main_grads[0].may_wait = None, True
        for name, value in change.items():
            setattr(main_grads[0], name, value)
        with patch.object(triton_package, "sum_parts", count, create=True):
            launched.clear()
            _LeavesSums.apply(x, all_parts, receivers).backward()  # type: ignore[no-untyped-call]
        assert launched == [2, 8]


def test_sums_of_a_backward_pass_are_computed_together() -> None:
    interpret(check_sums_of_a_backward_pass)


def check_parts_left_with_a_gradient() -> None:
    grad = torch.randn(5, 3, 70)
    # A third of the true sum, so that it shows what was summed.
    parts = grad.view(1, 15, 70)[:, :5]
    to_autograd = Receiver(torch.float32, None)
    leave_parts(grad, parts)
    close(bias_gradient(grad, to_autograd), parts[0].double().sum(0))
    main_grad = MainGrad(torch.zeros(70))
    assert bias_gradient(grad, Receiver(torch.float32, main_grad)) is None
    close(main_grad.tensor, parts[0].double().sum(0))
    # Somebody else's gradient was added to it, in place or into another tensor.
    rows = grad.view(15, 70)
    close(bias_gradient(grad + 0, to_autograd), rows.double().sum(0))
    grad.add_(1.0)
    close(bias_gradient(grad, to_autograd), rows.double().sum(0))


def test_parts_are_summed_only_of_an_unchanged_gradient() -> None:
    interpret(check_parts_left_with_a_gradient)


def check_activation_of_another_kind(is_registered: bool) -> None:
    """Compare with autograd in float64, which sees the same two matmuls with the function itself between them."""
    model = make_model(single_rank_group(), openai_gelu=True, num_layers=1)
    mlp = next(module for module in model.modules() if isinstance(module, FeedForward))
    mlp.activation = F.mish
    if is_registered:
        mlp.kind, ACTIVATIONS["mish"] = "mish", F.mish
    parameters = [*mlp.linear_fc1.parameters(), *mlp.linear_fc2.parameters()]
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 2, 28)
    weight, bias, weight_2, bias_2 = (parameter.detach().double().requires_grad_() for parameter in parameters)
    expected = F.mish(x.double() @ weight.t() + bias) @ weight_2.t() + bias_2
    expected_grads = torch.autograd.grad(expected.sum(), [weight, bias, weight_2, bias_2])
    with cpu_runs_on_triton():
        actual = mlp(x).hidden
        grads = torch.autograd.grad(actual.sum(), parameters)
    close(actual, expected)
    for one, other in zip(grads, expected_grads, strict=True):
        close(one, other)


@pytest.mark.parametrize("is_registered", [False, True])
def test_an_activation_without_a_program_keeps_its_own_gradient(is_registered: bool) -> None:
    interpret(check_activation_of_another_kind, is_registered)


def check_cast(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    for rows, width in [(70, 45), (64, 128), (1, 3)]:
        x = torch.randn(rows, width) * torch.logspace(-6, 3, width)
        x[0, : min(3, width)] = torch.tensor([torch.inf, -1e30, torch.nan])[: min(3, width)]
        for given in (x.bfloat16(), x, x.bfloat16().t()):
            scale, amax, expected_amax = torch.full((1, 1), 0.5), torch.zeros(()), torch.zeros(())
            expected = quantize_whole(given, dtype, scale, expected_amax, transpose=True)
            with cpu_runs_on_triton():
                actual = quantize_whole(given, dtype, scale, amax, transpose=True)
                one = quantize_whole(given, dtype, scale, None, plain=False, transpose=True)
            for ours, theirs in zip(actual, expected):
                assert ours is not None
                assert theirs is not None
                assert ours.data.is_contiguous()
                torch.testing.assert_close(ours.values(), theirs.values(), rtol=0, atol=0, equal_nan=True)
            assert one[0] is None
            assert one[1] is not None
            assert torch.equal(one[1].data.view(torch.uint8), actual[1].data.view(torch.uint8))  # type: ignore[union-attr]
            assert amax == torch.inf
            assert not expected_amax.isfinite()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_bytes_are_those_of_torch(dtype: torch.dtype) -> None:
    interpret(check_cast, dtype)


def same_bits(actual: Quantized | None, expected: Quantized | None) -> None:
    """Compare quantized matrices bit for bit; NaN has any sign."""
    assert actual is not None
    assert expected is not None
    assert actual.data.is_contiguous()
    (one, scale), (other, other_scale) = ((each.data, each.block_scales()) for each in (actual, expected))
    assert torch.equal(one.float().isnan(), other.float().isnan())
    assert torch.equal(one.view(torch.uint8)[~one.float().isnan()], other.view(torch.uint8)[~one.float().isnan()])
    torch.testing.assert_close(scale, other_scale, rtol=0, atol=0, equal_nan=True)


def hard_matrix(rows: int, columns: int) -> torch.Tensor:
    """Return a matrix of many magnitudes, in which some blocks have infinity, NaN, zeros or denormals only."""
    x = torch.randn(rows, columns) * torch.logspace(-30, 30, columns) * torch.logspace(-7, 7, rows).unsqueeze(1)
    # The largest numbers of blocks: just below, at and just above what a power of two brings into range.
    edges = [1.75, torch.tensor(1.75).nextafter(torch.tensor(2.0)).item(), 1.0, 1.9, 2.0**-140, 224 * 2.0**-149]
    for place, edge in enumerate((*edges, 225 * 2.0**-149, 28672 * 2.0**-149, 28673 * 2.0**-149, -0.0)):
        x[place % rows, :] = 0.0
        x[place % rows, place % columns] = edge
    x[rows // 2, columns // 2], x[-1, -1], x[-1, 0] = torch.inf, torch.nan, -torch.inf
    x[rows // 2 :, : columns // 3] = 0.0
    return x


def check_scaled_casts(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    for rows, width in [(150, 200), (128, 256), (1, 3), (33, 160)]:
        wide = hard_matrix(rows, width)
        for x in (wide, wide.bfloat16(), wide.clamp(-1e3, 1e3).half(), wide.t().contiguous().t()):
            for blocks in (ROWS, SEGMENTS_OF_128, SQUARES_OF_128, SEGMENTS_OF_32):
                expected = quantize_both(x, dtype, blocks, transpose=True)
                with cpu_runs_on_triton():
                    both = quantize_both(x, dtype, blocks, transpose=True)
                    first, none = quantize_both(x, dtype, blocks, transpose=False)
                    no, second = quantize_both(x, dtype, blocks, plain=False, transpose=True)
                assert none is no is None
                for actual in (both, (first, second)):
                    for ours, theirs in zip(actual, expected):
                        same_bits(ours, theirs)
                        assert ours is not None
                        assert ours.has_tiles is (blocks == SEGMENTS_OF_32 and (rows, width) == (128, 256))
            amax = amax_of(x, ROWS)
            with cpu_runs_on_triton():
                assert torch.equal(amax_of(x.nan_to_num(), WHOLE), x.nan_to_num().abs().max().float().view(1, 1))
                assert amax_of(x, WHOLE).isfinite().all() == x.isfinite().all()
                scale = scale_of(amax, dtype)
            torch.testing.assert_close(scale, scale_of(amax, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [E4M3, pytest.param(E5M2, marks=pytest.mark.long)])
def test_casts_with_scales_of_their_own_are_those_of_torch(dtype: torch.dtype) -> None:
    interpret(check_scaled_casts, dtype)


def check_scales_in_tiles() -> None:
    x = torch.randn(256, 384) * torch.logspace(-9, 9, 384)
    with cpu_runs_on_triton():
        parts = quantize_both(x, E4M3, SEGMENTS_OF_32, transpose=True)
    for part, matrix in zip(parts, (x, x.t())):
        assert part is not None
        expected = quantize(matrix, E4M3, SEGMENTS_OF_32)
        tiles = fp8_tensor.swizzled(expected.scale.to(torch.float8_e8m0fnu))
        assert torch.equal(part.scale.view(torch.uint8).reshape(-1), tiles.view(torch.uint8))
        assert torch.equal(part.values(), expected.values())
        assert torch.equal(part.first_rows(40).values(), expected.values()[:40])
        # Like the matrix, scales are concatenated along either dim.
        for dim in (0, 1):
            data, scale = (
                torch.cat((each, each), dim) for each in (part.data.view(torch.uint8), part.scale.view(torch.uint8))
            )
            twice = Quantized(data.view(E4M3), scale.view(torch.float8_e8m0fnu), part.blocks)
            assert torch.equal(twice.values(), torch.cat((expected.values(),) * 2, dim))


def test_scales_are_in_the_tiles_that_cublas_reads() -> None:
    interpret(check_scales_in_tiles)


def check_shared_amax() -> None:
    x, seen = torch.randn(40, 48), []

    def share(amax: torch.Tensor) -> None:
        seen.append(amax.clone())
        amax.clamp_(min=100.0)

    expected = quantize_both(x, E4M3, ROWS, transpose=True, share=share)
    with cpu_runs_on_triton():
        actual = quantize_both(x, E4M3, ROWS, transpose=True, share=share)
    assert torch.equal(*seen)
    for ours, theirs in zip(actual, expected):
        same_bits(ours, theirs)


def test_amaxes_of_columns_are_shared_before_they_scale() -> None:
    interpret(check_shared_amax)


def check_float8_layer(recipe: str) -> None:
    model = make_float8_model(recipe, num_layers=1, hidden_size=128, ffn_hidden_size=256, add_bias_linear=False)
    mlp = next(module for module in model.modules() if isinstance(module, FeedForward))
    with cpu_runs_on_triton():
        for name, layer in (("fc1", mlp.linear_fc1), ("fc2", mlp.linear_fc2)):
            assert_products(layer, 64, 2, torch.Generator().manual_seed(1), name)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_gradients_of_a_float8_layer_are_products_of_its_quantized_operands(recipe: str) -> None:
    interpret(check_float8_layer, recipe)


def check_gated_casts(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import GATED_KINDS, cast_gated_gradient_with_scale, cast_gated_with_scale

    torch.manual_seed(2)
    for (rows, width), kind in [((70, 90), "swiglu"), ((64, 128), "geglu"), ((1, 3), "geglu"), ((130, 33), "swiglu")]:
        assert kind in GATED_KINDS
        x = (torch.randn(rows, 2 * width) * 3).to(dtype).requires_grad_()
        grad = torch.randn(rows, width).to(dtype)
        if rows == 130:
            x.data[0, 0], x.data[1, -1], x.data[2, 3], grad[3, 3] = torch.inf, torch.nan, -torch.inf, torch.nan
        with cpu_runs_on_triton():
            y = gated_activation(x, kind)
        (x_grad,) = torch.autograd.grad(y, x, grad)
        # Values near the largest saturate with the scale of the activation.
        scale, grad_scale = torch.full((1, 1), 2.0**-6), torch.full((1, 1), 2.0**-3)
        amaxes = [torch.zeros(()) for _ in range(4)]
        expected = quantize_whole(y.detach(), E4M3, scale, amaxes[0], transpose=True)
        expected_grad = quantize_whole(x_grad, grad_dtype, grad_scale, amaxes[1], transpose=True)
        plain = cast_gated_with_scale(x, kind, scale, amaxes[2])
        args = x.detach(), kind, grad_dtype, grad_scale
        *both, again = cast_gated_gradient_with_scale(grad.t().contiguous().t(), *args, amaxes[3], scale)
        for data, theirs in zip((plain, again, *both), (*expected, *expected_grad), strict=True):
            assert theirs is not None
            same_bits(Quantized(data, theirs.scale, WHOLE), theirs)
        if rows == 130:
            continue
        assert amaxes[0] == amaxes[2] > 0
        assert amaxes[1] == amaxes[3] > 0
        exact = x.detach().double().requires_grad_()
        (exact_grad,) = torch.autograd.grad(gated_activation(exact, kind), exact, grad.double())
        # Half a unit of the last place of E4M3 or E5M2, and what the rounding to the dtype of x adds.
        part = {E4M3: 2**-4, E5M2: 2**-3}[grad_dtype] + 2 * ULP[dtype]
        wanted = exact_grad.clamp(-448 / 8, 448 / 8) if grad_dtype is E4M3 else exact_grad
        error = (Quantized(both[0], grad_scale, WHOLE).values(torch.float64) - wanted).abs()
        assert bool((error <= part * wanted.abs() + 2**-10 + 2 * ULP[dtype]).all())


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"), [(torch.bfloat16, E5M2), (torch.float32, E4M3), (torch.float16, E5M2)]
)
def test_gated_activations_and_their_gradients_in_float8(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    interpret(check_gated_casts, dtype, grad_dtype)


def watch_gated_casts() -> Counter[str]:
    """Count the launches of the programs that cast a gated activation as they compute it."""
    from megatron.core.ops.triton import fp8_gated_cast

    launches: Counter[str] = Counter()
    for name in ("gated_cast_program", "gated_gradient_cast_program"):
        setattr(fp8_gated_cast, name, Counted(getattr(fp8_gated_cast, name), launches, name))
    return launches


def make_gated(tp: Group, **settings: Any) -> tuple[GPTModel, FeedForward, Float8State]:
    """Return a model of one layer with SwiGLU and delayed scaling, its feed-forward layer, and the state of scales."""
    shape = {"num_layers": 1, "ffn_hidden_size": 96, **LLAMA, **settings}
    model = make_float8_model("delayed", tp=tp, sequence_parallel=tp.size > 1, **shape)
    mlp = next(module for module in model.modules() if isinstance(module, FeedForward))
    assert mlp.linear_fc1.quantizers is not None
    state = mlp.linear_fc1.quantizers._state
    assert state is not None
    return model, mlp, state


def equal_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def check_quantized_activation(is_recomputed: bool) -> None:
    launches, tp = watch_gated_casts(), tensor_parallel_group()
    again: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}
    model, mlp, state = make_gated(tp, **(again if is_recomputed else {}))
    tokens, labels, positions, _ = make_batch(8, 3, 53)

    def step() -> list[torch.Tensor]:
        state.amax.zero_()
        losses = model(tokens, positions, labels=labels)
        return [losses.detach(), *torch.autograd.grad(losses.mean(), list(model.parameters())), state.amax.clone()]

    with cpu_runs_on_triton():
        step()
        assert not launches, "there are no scales of earlier steps"
        state.update(tp, 1)
        actual = step()
        assert launches == {"gated_cast_program": 1 + is_recomputed, "gated_gradient_cast_program": 1}
        launches.clear()
        mlp.linear_fc1.register_forward_hook(lambda module, given, output: None)
        equal_bits(actual, step())
        assert not launches


@pytest.mark.parametrize(("is_recomputed", "world_size"), [(False, 1), (False, 2), (True, 1)])
def test_an_activation_quantized_as_it_is_computed_changes_no_bit(is_recomputed: bool, world_size: int) -> None:
    interpret(check_quantized_activation, is_recomputed, world_size=world_size)


def check_hooks_of_gated_layers() -> None:
    launches = watch_gated_casts()
    _, mlp, state = make_gated(single_rank_group())
    first, second = mlp.linear_fc1, mlp.linear_fc2
    x = torch.randn(16, 2, first.weight.shape[1]).bfloat16().requires_grad_()

    def step() -> list[torch.Tensor]:
        state.amax.zero_()
        output = mlp(x).hidden
        gradients = torch.autograd.grad(output.float().square().sum(), [x, first.weight, second.weight])
        return [output.detach(), *gradients, state.amax.clone()]

    with cpu_runs_on_triton():
        step()
        state.update(single_rank_group(), 1)
        first.register_forward_pre_hook(GatherHook(()))
        actual = step()
        assert launches == {"gated_cast_program": 1, "gated_gradient_cast_program": 1}
        launches.clear()
        for register in (
            lambda: first.register_forward_hook(lambda module, given, output: None),
            lambda: second.register_forward_pre_hook(lambda module, given: None),
            lambda: second.register_full_backward_hook(lambda module, grad, output: None),
            lambda: first.register_full_backward_pre_hook(lambda module, grad: None),
            lambda: hooks.register_module_full_backward_hook(lambda module, grad, output: None),
        ):
            handle = register()
            equal_bits(actual, step())
            handle.remove()
        with torch.autograd.detect_anomaly(check_nan=True):
            equal_bits(actual, step())
        assert not launches
        state.amax.zero_()
        with torch.no_grad():
            assert torch.equal(mlp(x).hidden, actual[0])
        assert launches == {"gated_cast_program": 1}
        assert not state.amax.any()
        first.weight.requires_grad_(False)
        assert mlp._quantized_activation(x) is None


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_hooks_read_activations_and_gradients_in_16_bits() -> None:
    interpret(check_hooks_of_gated_layers)


WIDTH = 70
EPSILON = 0.01


def keeps(first_key: int, second_key: int, channel: int, probability: float) -> bool:
    """Follow the rule of dropout in Python's integers."""
    x = (first_key + (channel + 1) * 0x9E3779B1) % 2**32
    x ^= x >> 16
    x = x * 0x21F0AAAD % 2**32
    x ^= x >> 15
    x ^= second_key % 2**32
    x = x * 0x735A2D97 % 2**32
    x ^= x >> 15
    return x >> 8 >= round(probability * 2**24)


def reference(
    inputs: dict[str, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor] | None,
    probability: float,
    rounded: Any,
    is_layer_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and its norm in float64; the sum is ``rounded``, as the stream is."""
    branch = inputs.get("branch", torch.zeros(()))
    if keys is not None:
        pairs = zip(*(key.flatten().tolist() for key in keys))
        kept = torch.tensor([[keeps(a, b, channel, probability) for channel in range(WIDTH)] for a, b in pairs])
        branch = branch * kept.view(branch.shape) / (1 - probability)
    total = inputs["residual"] + branch
    total = total + (total.to(rounded).double() - total).detach()
    weight = inputs["weight"] + 1
    if is_layer_norm:
        return total, F.layer_norm(total, (WIDTH,), weight, inputs.get("bias"), EPSILON)
    return total, F.rms_norm(total, (WIDTH,), weight, EPSILON)


def check_sum_and_norm(dtype: torch.dtype, is_layer_norm: bool, has_bias: bool) -> None:
    from megatron.core.ops.triton import residual

    torch.manual_seed(9)
    # Parts of 2, 2, 2, 2 and 1 rows.
    residual._MAX_PARTS = 5
    shapes = {"branch": (3, 3, WIDTH), "residual": (3, 3, WIDTH), "weight": (WIDTH,)}
    if has_bias:
        shapes |= {"bias": (WIDTH,)}
    values = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    # Gradients may be transposed, too.
    grads = tuple(torch.randn(3, 3, WIDTH).to(dtype).transpose(0, 1) for _ in range(2))
    # Transposed, as they come from keys of samples and of positions.
    some_keys = tuple(torch.randint(-(2**31), 2**31, (3, 3)).to(torch.int32).t() for _ in range(2))
    for has_branch, keys, probability in [(False, None, 0.0), (True, None, 0.0), (True, some_keys, 0.3)]:
        inputs = {n: value.clone().requires_grad_() for n, value in values.items() if has_branch or n != "branch"}
        wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
        expected = reference(wide, keys, probability, dtype, is_layer_norm)
        expected_grads = torch.autograd.grad(expected, list(wide.values()), [grad.double() for grad in grads])
        runs = []
        for _ in range(2):
            actual = residual.add_and_normalize(
                inputs["residual"],
                inputs.get("branch"),
                inputs["weight"],
                inputs.get("bias"),
                EPSILON,
                subtracts_mean=is_layer_norm,
                weight_offset=1.0,
                keys=keys,
                probability=probability,
                sums_branch_grad=True,
            )
            of_inputs = torch.autograd.grad(actual, list(inputs.values()), grads)
            runs.append((*actual, *of_inputs))
            if has_branch:
                of_branch = of_inputs[list(inputs).index("branch")]
                of_rows = expected_grads[list(inputs).index("branch")].flatten(0, 1)
                assert hasattr(of_branch, "column_parts")
                close(bias_gradient(of_branch, Receiver(dtype, None)), of_rows.sum(0), units=2)
        for name, one, other, again in zip(
            ("total", "normalized", *inputs), runs[0], (*expected, *expected_grads), runs[1]
        ):
            assert one.dtype == dtype, name
            # The interpreter cuts the stream down, and then a sum over its rows.
            close(one, other, units=2 if name in ("weight", "bias") else 1)
            assert torch.equal(one, again), name
        assert has_branch or torch.equal(runs[0][0], values["residual"])
        # Recompute takes the stream that a call has left.
        parameters = inputs["weight"], inputs.get("bias"), EPSILON
        _, again = residual.add_and_normalize(
            runs[0][0], None, *parameters, subtracts_mean=is_layer_norm, weight_offset=1.0
        )
        assert torch.equal(again, runs[0][1])
        if keys is not None:
            # What was dropped has no gradient.
            dropped = runs[0][2] == 0
            assert 0.2 < dropped.float().mean() < 0.4
            assert torch.equal(dropped, expected_grads[0] == 0)


@pytest.mark.parametrize(
    ("dtype", "is_layer_norm", "has_bias"),
    [
        (torch.float32, True, True),
        (torch.bfloat16, False, False),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                *((torch.float32, False, False), (torch.bfloat16, True, True), (torch.bfloat16, True, False)),
                *((torch.float16, False, False), (torch.float16, True, True)),
            )
        ),
    ],
)
def test_sum_and_norm_with_their_gradients(dtype: torch.dtype, is_layer_norm: bool, has_bias: bool) -> None:
    interpret(check_sum_and_norm, dtype, is_layer_norm, has_bias)


def check_dropout_keys() -> None:
    cases = [(3, 70, range(5), slice(None)), (1, 1100, range(2, 4), slice(300, 700)), (2, 1, range(1), slice(None))]
    for batch, length, layers, hidden in cases:
        for first_sample in (0, 1, 17):
            made = []
            for is_on_triton in (False, True):
                with cpu_runs_on_triton() if is_on_triton else nullcontext():
                    samples = DropoutSamples.at(5, 7, first_sample, batch, "cpu")
                    positions = torch.arange(length).flip(0)
                    keys = DropoutKeys(samples, positions, hidden, layers)
                    made.append((samples.number, samples.states, *keys._of_sites))
            assert made[0][0] == made[1][0]
            for in_torch, on_triton in zip(made[0][1:], made[1][1:], strict=True):
                assert in_torch.dtype == on_triton.dtype
                assert torch.equal(in_torch, on_triton)


def test_dropout_keys_are_those_of_torch() -> None:
    interpret(check_dropout_keys)


def check_dropout(dtype: torch.dtype) -> None:
    from megatron.core.ops.triton import residual as programs

    torch.manual_seed(10)
    programs._BLOCK = 32
    keys = RowKeys(*(torch.randint(-(2**31), 2**31, (3, 5)).to(torch.int32).t() for _ in range(2)))
    x, residual = (torch.randn(5, 3, WIDTH).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(3, 5, WIDTH).to(dtype).transpose(0, 1)
    for others in ((), (residual,)):
        wide = [tensor.double() for tensor in (x, *others)]
        expected = drop_hidden(wide[0], keys, 0.3, *wide[1:])
        with cpu_runs_on_triton():
            actual = drop_hidden(x, keys, 0.3, *others)
            actual_grads = torch.autograd.grad(actual, (x, *others), grad)
        assert actual.dtype == dtype
        close(actual, expected)
        for one, other in zip(actual_grads, torch.autograd.grad(expected, (x, *others), grad.double())):
            close(one, other)
            assert torch.equal(one == 0, other == 0)
    with cpu_runs_on_triton():
        assert drop_hidden(x[:0], RowKeys(keys.k0[:0], keys.k1[:0]), 0.3).shape == (0, 3, WIDTH)
        # A stream in another precision than the branch is torch's.
        assert drop_hidden(x, keys, 0.3, residual.double()).dtype == torch.float64


@pytest.mark.parametrize(
    "dtype",
    [*(pytest.param(dtype, marks=pytest.mark.long) for dtype in (torch.float32, torch.float16)), torch.bfloat16],
)
def test_dropout_and_its_sum_with_the_stream(dtype: torch.dtype) -> None:
    interpret(check_dropout, dtype)


LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "add_bias_linear": False,
}
NEOX = {"position_embedding_type": "rope", "rotary_percent": 0.4, "apply_layernorm_1p": True, "geglu": True}
PARALLEL = {"use_parallel_residual": True}
SHARED = PARALLEL | {"shared_parallel_norm": True, "norm_parameters": "weight", "residual_multiplier": 0.6}
GPT2 = {"openai_gelu": True}
FUSED = GPT2 | {"gemm_activation_fusion": True}
THROUGH = {"apply_residual_connection_post_layernorm": True}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def check_model(settings: dict[str, Any]) -> None:
    from megatron.core.ops.triton import (
        activation,
        column_sums,
        cross_entropy,
        gemm_activation,
        query_key_value,
        residual,
    )

    launches: Counter[str] = Counter()
    for module, attribute, name in [
        (query_key_value, "rotate_program", "rotate"),
        (activation, "gated_forward_program", "gate"),
        (activation, "gated_backward_program", "gate gradient"),
        (activation, "plain_backward_program", "activation gradient"),
        (gemm_activation, "forward_program", "fused activation"),
        (gemm_activation, "gradient_program", "fused activation gradient"),
        (query_key_value, "join_program", "join"),
        (column_sums, "sums_program", "sums"),
        (residual, "forward_program", "norm"),
        (residual, "backward_program", "norm gradient"),
        (residual, "dropout_program", "dropout"),
        (cross_entropy, "normalizer_program", "normalizer"),
        (cross_entropy, "gradient_program", "loss gradient"),
    ]:
        setattr(module, attribute, Counted(getattr(module, attribute), launches, name))
    tp = tensor_parallel_group()
    model = make_model(tp, sequence_parallel=tp.size > 1, **settings)
    tokens, labels, positions, _ = make_batch(8, 3, 53)
    samples = DropoutSamples.at(5, 0, 0, 3, "cpu")

    def step() -> list[torch.Tensor]:
        losses = model(tokens, positions, labels=labels, dropout_samples=samples)
        return [losses.detach(), *torch.autograd.grad(losses.mean(), list(model.parameters()))]

    expected = step()
    assert not launches
    with cpu_runs_on_triton():
        launches.clear()
        actual = step()
    # In both directions: behind the embedding, at the end of the last layer, and where attention has no norm behind it.
    num_drops = 2 * (1 + 1 + 2 * settings.get("use_parallel_residual", False)) if "hidden_dropout" in settings else 0
    is_gated = settings.get("swiglu", False) or settings.get("geglu", False)
    has_bias = settings.get("add_bias_linear", True)
    # Branches with a bias that meet a norm; several ranks of a CPU add it to their sum.
    num_branches = (1 if settings.get("use_parallel_residual", False) else 3) if has_bias and tp.size == 1 else 0
    num_branches = num_branches if settings.get("residual_multiplier") is None else 0
    num_norms = 2 if settings.get("shared_parallel_norm", False) else 4
    num_joins = 2 if settings.get("position_embedding_type") is None else 0
    num_activations = 0 if is_gated or not has_bias else 2
    is_fused = settings.get("gemm_activation_fusion", False)
    fused = {"fused activation": 2, "fused activation gradient": 2}
    assert launches == {
        **({} if num_joins else {"rotate": 4}),
        **({"gate": 2, "gate gradient": 2} if is_gated else {}),
        **(fused if is_fused else {"activation gradient": num_activations} if num_activations else {}),
        **({"join": num_joins} if num_joins else {}),
        "sums": num_norms + num_branches + num_activations + num_joins,
        "norm": num_norms,
        "norm gradient": num_norms,
        **({"dropout": num_drops} if num_drops else {}),
        "normalizer": 1,
        "loss gradient": 1,
    }
    for one, other in zip(actual, expected, strict=True):
        close(one, other)


class Counted:
    """Count a program's launches."""

    def __init__(self, program: Any, launches: Counter[str], name: str) -> None:
        self.program, self.launches, self.name = program, launches, name

    def __getitem__(self, grid: Any) -> Any:
        self.launches[self.name] += 1
        return self.program[grid]


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        pytest.param(LLAMA, 1, marks=pytest.mark.long),
        (LLAMA | DROPOUT, 2),
        pytest.param(NEOX, 1, marks=pytest.mark.long),
        pytest.param(NEOX | DROPOUT, 1, marks=pytest.mark.long),
        (NEOX | DROPOUT | PARALLEL, 2),
        (NEOX | SHARED, 1),
        pytest.param(GPT2, 1, marks=pytest.mark.long),
        pytest.param(GPT2 | DROPOUT, 2, marks=pytest.mark.long),
        (GPT2 | THROUGH, 1),
        (FUSED, 1),
        pytest.param(FUSED | DROPOUT, 2, marks=pytest.mark.long),
    ],
    ids=[
        "llama",
        "llama, dropout, 2 ranks",
        "neox",
        "neox, dropout",
        "neox, parallel, dropout, 2 ranks",
        "neox, one norm without bias for parallel layers",
        "gpt2",
        "gpt2, dropout, 2 ranks",
        "gpt2, stream through the norms",
        "gpt2, activation in GEMMs",
        "gpt2, activation in GEMMs, dropout, 2 ranks",
    ],
)
def test_a_model_on_triton_equals_the_model_in_torch(settings: dict[str, Any], world_size: int) -> None:
    interpret(check_model, settings, world_size=world_size)


def adamw_in_float64(
    state: list[torch.Tensor], gradient: torch.Tensor, decay: torch.Tensor, multiplier: float, step: int
) -> list[torch.Tensor]:
    """Return the weights and moments of AdamW's update, in float64."""
    p, m, v = (tensor.double() for tensor in state)
    g = gradient.double() * multiplier
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    update = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    return [p - 0.01 * decay * p - 0.01 * update, m, v]


def check_adamw(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    from megatron.core.ops.triton import AdamWNumbers, update_adamw

    numbers = AdamWNumbers(0.01, (0.1, 0.0), (0.9, 0.95), 1e-8)
    eps = torch.finfo(torch.float32).eps
    for num_elements, has_decays in [(128, False), (1024 + 384, True), (2048, True)]:
        is_second = torch.randint(0, 2, (num_elements // 128,), dtype=torch.uint8) if has_decays else None
        second = torch.zeros(num_elements) if is_second is None else is_second.repeat_interleave(128)
        state = [torch.randn(num_elements), torch.randn(num_elements), torch.rand(num_elements)]
        gradient = (10 ** (4 * torch.rand(num_elements) - 3) * torch.randn(num_elements)).to(dtype)
        rounded = None if dtype is torch.float32 else torch.full((num_elements,), 7.0, dtype=dtype)
        multiplier = torch.tensor(0.37, dtype=torch.float64)
        for step in (1, 2, 1000):
            corrections = 1.0 - torch.tensor((0.9, 0.95), dtype=torch.float64) ** step
            args = (is_second, torch.tensor(False), multiplier, corrections, numbers, 128)
            before = [tensor.clone() for tensor in state]
            update_adamw(gradient, *state, rounded, *args)
            assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
            assert rounded is None or step > 1 or bool((rounded == 7.0).all())
            expected = adamw_in_float64(state, gradient, 0.1 * (1 - second.double()), 0.37, step)
            update_adamw(gradient, *state, rounded, is_second, torch.tensor(True), *args[2:])
            sizes = [before[0].abs() + 0.1, before[1].abs() + gradient.float().abs(), expected[2]]
            for actual, exact, size in zip(state, expected, sizes, strict=True):
                assert float(((actual.double() - exact).abs() / size.double()).max()) <= 4 * eps
            if dtype is torch.float16:
                assert torch.equal(rounded, state[0].half())
            elif rounded is not None:
                close(rounded, state[0])
            gradient = -0.3 * gradient


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_against_float64(dtype: torch.dtype) -> None:
    interpret(check_adamw, dtype)
