"""A branch dropped, added to the residual stream and normalized by Triton, interpreted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.main_grad import Receiver, bias_gradient
from megatron.core.ops.dropout import RowKeys, drop_hidden
from tests.unit.core.kernels.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton
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
    inputs: dict[str, torch.Tensor], keys: tuple[torch.Tensor, torch.Tensor] | None, probability: float, rounded: Any
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
    if "bias" in inputs:
        return total, F.layer_norm(total, (WIDTH,), weight, inputs["bias"], EPSILON)
    return total, F.rms_norm(total, (WIDTH,), weight, EPSILON)


def check_sum_and_norm(dtype: torch.dtype, is_layer_norm: bool) -> None:
    from megatron.core.ops.triton import residual as residual_norm

    torch.manual_seed(9)
    # Parts of 2, 2, 2, 2 and 1 rows.
    residual_norm._MAX_PARTS = 5
    shapes = {"branch": (3, 3, WIDTH), "residual": (3, 3, WIDTH), "weight": (WIDTH,)}
    if is_layer_norm:
        shapes |= {"bias": (WIDTH,)}
    values = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    # Gradients may be transposed, too.
    grads = tuple(torch.randn(3, 3, WIDTH).to(dtype).transpose(0, 1) for _ in range(2))
    # Transposed, as they come from keys of samples and of positions.
    some_keys = tuple(torch.randint(-(2**31), 2**31, (3, 3)).to(torch.int32).t() for _ in range(2))
    for has_branch, keys, probability in [(False, None, 0.0), (True, None, 0.0), (True, some_keys, 0.3)]:
        inputs = {n: value.clone().requires_grad_() for n, value in values.items() if has_branch or n != "branch"}
        wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
        expected = reference(wide, keys, probability, dtype)
        expected_grads = torch.autograd.grad(expected, list(wide.values()), [grad.double() for grad in grads])
        runs = []
        for _ in range(2):
            actual = residual_norm.add_and_normalize(
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
        _, again = residual_norm.add_and_normalize(
            runs[0][0], None, *parameters, subtracts_mean=is_layer_norm, weight_offset=1.0
        )
        assert torch.equal(again, runs[0][1])
        if keys is not None:
            # What was dropped has no gradient.
            dropped = runs[0][2] == 0
            assert 0.2 < dropped.float().mean() < 0.4
            assert torch.equal(dropped, expected_grads[0] == 0)


@pytest.mark.parametrize(
    ("dtype", "is_layer_norm"),
    [
        (torch.float32, True),
        (torch.bfloat16, False),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                *((torch.float32, False), (torch.bfloat16, True)),
                *((torch.float16, False), (torch.float16, True)),
            )
        ),
    ],
)
def test_sum_and_norm_with_their_gradients(dtype: torch.dtype, is_layer_norm: bool) -> None:
    interpret(check_sum_and_norm, dtype, is_layer_norm)


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
