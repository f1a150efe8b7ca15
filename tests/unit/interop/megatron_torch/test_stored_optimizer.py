"""Which main parameters may have been rounded to a weight: how a flat buffer is known to lie as it is taken to."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint.formats.megatron.stored_optimizer import is_weight_of, may_be_in_float8
from megatron.core.ops.fp8_tensor import E4M3, WHOLE, quantize


@pytest.fixture
def main() -> torch.Tensor:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5))
    return values * torch.logspace(-9, 1, 4000)


def test_every_number_that_was_rounded_in_fp8_is_its_own(main: torch.Tensor) -> None:
    weight = quantize(main.bfloat16().view(1, -1), E4M3, WHOLE).values()[0].bfloat16()
    assert (weight == 0).any()
    assert all(is_weight_of(one, other, main) for one, other in zip(main, weight, strict=True))
    exact = [is_weight_of(one, other) for one, other in zip(main, weight, strict=True)]
    assert not all(exact)


def test_others_are_not(main: torch.Tensor) -> None:
    weight = quantize(main.bfloat16().view(1, -1), E4M3, WHOLE).values()[0].bfloat16()
    large = main.abs() > 1e-3 * main.abs().max()
    taken = [is_weight_of(one, other, main) for one, other in zip(main[large], weight[large].roll(1), strict=True)]
    assert sum(taken) < 0.1 * len(taken)
    nan = torch.tensor(float("nan"))
    assert is_weight_of(nan, nan.bfloat16())
    assert not is_weight_of(nan, torch.tensor(1.0), main)
    assert not is_weight_of(torch.tensor(1.0), nan, main)


def test_a_weight_of_a_near_iteration_is_not(main: torch.Tensor) -> None:
    """What moved by a few per cent would be rounded to the same in fp8; a weight that never was in fp8 is no such."""
    main = main[main.abs() > 1e-6]
    weight = main.bfloat16()
    moved = 1.03 * main
    taken = [is_weight_of(one, other, moved) for one, other in zip(moved, weight, strict=True)]
    # One in sixteen of bfloat16's numbers is one of E4M3's, too.
    assert sum(taken) < 0.1 * len(taken)


def test_arguments_may_say_that_nothing_was_gathered_in_fp8() -> None:
    assert may_be_in_float8({})
    assert may_be_in_float8({"fp8_param_gather": True})
    assert not may_be_in_float8({"fp8_param_gather": False})
