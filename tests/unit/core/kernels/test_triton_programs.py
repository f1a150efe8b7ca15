"""Triton's programs, interpreted on the CPU, against their torch twins and float64."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops import cross_entropy
from megatron.core.ops import gated_activation as gates
from megatron.core.ops.gated_activation import gated_activation
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.rotary_pos_embedding import (
    RotaryAngles,
    apply_rotary,
    apply_rotary_to_both,
    split_and_rotate,
    split_projection,
)
from tests.harness.toy_model import tensor_parallel_group
from tests.unit.core.kernels.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

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
        losses = vocab_parallel_cross_entropy(logits, labels, vocab_size, tp)
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
    gates._GATES["mish_glu"] = F.mish
    gates._STEEPNESS["steep_glu"] = 1.7
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
