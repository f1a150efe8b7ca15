"""A branch added to the residual stream and normalised by Triton, interpreted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.core.kernels.interpreted import close, interpret, needs_triton

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
    branch = inputs["branch"]
    if "branch_bias" in inputs:
        branch = branch + inputs["branch_bias"]
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
    from megatron.core.kernels.triton_programs import residual_norm

    torch.manual_seed(9)
    # Parts of 2, 2, 2, 2 and 1 rows.
    residual_norm._MAX_PARTS = 5
    shapes = {"branch": (3, 3, WIDTH), "residual": (3, 3, WIDTH), "weight": (WIDTH,)}
    if is_layer_norm:
        shapes |= {"bias": (WIDTH,), "branch_bias": (WIDTH,)}
    inputs = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}
    wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    grads = tuple(torch.randn(3, 3, WIDTH).to(dtype) for _ in range(2))
    # Transposed, as they come from keys of samples and of positions.
    some_keys = tuple(torch.randint(-(2**31), 2**31, (3, 3)).to(torch.int32).t() for _ in range(2))
    for keys, probability in [(None, 0.0), (some_keys, 0.3)]:
        expected = reference(wide, keys, probability, dtype)
        expected_grads = torch.autograd.grad(expected, list(wide.values()), [grad.double() for grad in grads])
        runs = []
        for _ in range(2):
            actual = residual_norm.add_and_normalise(
                inputs["branch"],
                inputs["residual"],
                inputs["weight"],
                inputs.get("bias"),
                EPSILON,
                subtracts_mean=is_layer_norm,
                weight_offset=1.0,
                branch_bias=inputs.get("branch_bias"),
                keys=keys,
                probability=probability,
            )
            runs.append((*actual, *torch.autograd.grad(actual, list(inputs.values()), grads)))
        for name, one, other, again in zip(
            ("total", "normalised", *inputs), runs[0], (*expected, *expected_grads), runs[1]
        ):
            assert one.dtype == dtype, name
            close(one, other)
            assert torch.equal(one, again), name
        if keys is not None:
            # What was dropped has no gradient.
            dropped = runs[0][2] == 0
            assert 0.2 < dropped.float().mean() < 0.4
            assert torch.equal(dropped, expected_grads[0] == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_layer_norm", [False, True])
def test_sum_and_norm_with_their_gradients(dtype: torch.dtype, is_layer_norm: bool) -> None:
    interpret(check_sum_and_norm, dtype, is_layer_norm)
