"""Parameters whose memory is taken and given."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.weight_prefetch import alloc_storage, free_storage, has_memory


def test_memory_is_taken_and_given_again() -> None:
    linear = nn.Linear(3, 5)
    free_storage(linear)
    assert not any(has_memory(parameter) for parameter in linear.parameters())
    assert linear.weight.untyped_storage().nbytes() == 0
    alloc_storage(linear.weight)
    assert linear.weight.untyped_storage().nbytes() == 60
    assert has_memory(linear.weight)
    assert not has_memory(linear.bias)


def test_what_has_memory_or_needs_none_is_left_as_it_is() -> None:
    full, empty, meta = torch.full((3,), 7.0), torch.empty(0, 4), torch.empty(3, device="meta")
    for parameter in (full, empty, meta):
        assert has_memory(parameter)
        alloc_storage(parameter)
    assert full.tolist() == [7.0] * 3
    assert empty.untyped_storage().nbytes() == 0
    assert has_memory(torch.ones(1, dtype=torch.int8))
