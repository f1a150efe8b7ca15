"""Which tensors hold values that are not finite."""

from __future__ import annotations

import torch

from megatron.core.distributed.weight_checks import not_finite


def test_empty_tensors_and_integers_are_passed_over() -> None:
    infinite = torch.tensor([1.0, float("-inf")])
    tensors = [torch.empty(0), torch.arange(3), torch.ones(2, dtype=torch.bool), infinite, torch.ones(2)]
    assert not_finite(tensors) == [infinite]
    assert not_finite([torch.empty(0), torch.arange(3)]) == []
