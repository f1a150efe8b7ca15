"""Deferred weight gradients arrive whole, in their micro-batch, and as often as they are expected."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.main_grad import MainGrad, WeightGradQueue, attach_main_grad


def make_parameter(num_uses: int = 1) -> tuple[nn.Parameter, MainGrad, list[float]]:
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    completions: list[float] = []
    main_grad = MainGrad(
        torch.full((2, 3), torch.nan, dtype=torch.float64),
        num_uses,
        on_complete=lambda: completions.append(main_grad.tensor.sum().item()),
    )
    attach_main_grad(parameter, main_grad)
    return parameter, main_grad, completions


def operands(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 5), value, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64, requires_grad=True)


def test_products_wait_for_their_micro_batch() -> None:
    parameter, main_grad, completions = make_parameter()
    queue = WeightGradQueue([parameter, nn.Parameter(torch.zeros(1))])
    for microbatch in (0, 1):
        with queue.collecting(microbatch):
            main_grad.add_matmul(*operands(10.0**microbatch))
    assert main_grad.is_empty
    queue.run(1)
    assert main_grad.tensor.tolist() == [[50.0] * 3] * 2
    queue.run(0)
    assert main_grad.tensor.tolist() == [[55.0] * 3] * 2
    assert completions == [300.0, 330.0]
    assert not main_grad.tensor.requires_grad


def test_other_contributions_are_made_at_once() -> None:
    parameter, main_grad, completions = make_parameter()
    queue = WeightGradQueue([parameter])
    with queue.collecting(0):
        main_grad.add(torch.ones(2, 3, dtype=torch.float64))
    assert completions == [6.0]
    queue.run(0)
    assert completions == [6.0]


def test_contributions_of_a_parameter_with_two_uses_stay_together() -> None:
    parameter, main_grad, completions = make_parameter(num_uses=2)
    queue = WeightGradQueue([parameter])
    rows = torch.ones(1, 3, dtype=torch.float64)
    for microbatch in (0, 1):
        with queue.collecting(microbatch):
            main_grad.add_matmul(*operands(1.0))
            main_grad.add_rows(torch.tensor([1]), rows)
    assert completions == []
    queue.run(0)
    queue.run(1)
    assert completions == [33.0, 66.0]


def test_outside_of_a_split_pass_nothing_is_put_off() -> None:
    parameter, main_grad, completions = make_parameter()
    queue = WeightGradQueue([parameter])
    main_grad.add_matmul(*operands(1.0))
    assert completions == [30.0]
    with pytest.raises(KeyError):
        queue.run(0)
