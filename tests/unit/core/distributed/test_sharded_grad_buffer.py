"""The memory that sharded gradients borrow."""

from __future__ import annotations

import torch

from megatron.core.distributed.fully_sharded_data_parallel import BucketPool


def test_memory_that_came_back_is_lent_again() -> None:
    pool = BucketPool(7, torch.bfloat16, torch.device("cpu"))
    assert not pool.has_free
    first, second = pool.take(), pool.take()
    assert (first.numel(), first.dtype) == (7, torch.bfloat16)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.has_free
    assert pool.take() is first
    assert not pool.has_free
    assert pool.num_allocated == 2
