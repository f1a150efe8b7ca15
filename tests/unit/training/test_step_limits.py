"""Which losses and gradient norms a guarded step accepts."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.training.training_step import is_within


@pytest.mark.parametrize(
    ("loss", "norm", "is_accepted"),
    [
        (2.0, 3.0, True),
        (2.1, 3.0, False),
        (2.0, 3.1, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (-math.inf, 1.0, False),
    ],
)
def test_what_is_at_most_the_limit_and_finite_is_accepted(loss: float, norm: float, is_accepted: bool) -> None:
    found = is_within((2.0, 3.0), torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64))
    assert bool(found) is is_accepted


def test_without_a_limit_any_finite_loss_is_accepted() -> None:
    assert bool(is_within((math.inf, math.inf), torch.tensor(1e30), torch.tensor(math.inf)))
    assert not bool(is_within((math.inf, math.inf), torch.tensor(math.inf), torch.tensor(1.0)))
