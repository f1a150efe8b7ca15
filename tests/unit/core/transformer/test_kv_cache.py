from __future__ import annotations

import pytest
import torch

from megatron.core.transformer.kv_cache import KeyValueCache


def positions(start: int, end: int, offset: float = 0.0) -> torch.Tensor:
    """Return ``[end - start, 2, 3, 5]``: every element holds its position."""
    return torch.arange(start, end, dtype=torch.float64)[:, None, None, None].expand(-1, 2, 3, 5) + offset


def test_updates_append_and_return_all_positions() -> None:
    cache = KeyValueCache(7)
    for start, end in ((0, 4), (4, 5), (5, 7)):
        key, value = cache.update(2, positions(start, end), positions(start, end, 0.5))
        assert torch.equal(key, positions(0, end))
        assert torch.equal(value, positions(0, end, 0.5))
        assert cache.length(2) == end


def test_layers_are_apart() -> None:
    cache = KeyValueCache(6)
    cache.update(0, positions(0, 3), positions(0, 3))
    key, _ = cache.update(5, positions(2, 3), positions(2, 3))
    assert torch.equal(key, positions(2, 3))
    assert (cache.length(0), cache.length(5), cache.length(1)) == (3, 1, 0)


def test_nothing_is_allocated_after_the_first_update() -> None:
    cache = KeyValueCache(6)
    first, _ = cache.update(0, positions(0, 2), positions(0, 2))
    second, _ = cache.update(0, positions(2, 3), positions(2, 3))
    assert first.data_ptr() == second.data_ptr()
    assert first.untyped_storage().nbytes() == 6 * 2 * 3 * 5 * 8
    assert first.dtype == torch.float64


def test_more_positions_than_there_is_room_for_are_refused() -> None:
    cache = KeyValueCache(4)
    cache.update(0, positions(0, 3), positions(0, 3))
    with pytest.raises(AssertionError, match="5 positions in a cache of 4"):
        cache.update(0, positions(3, 5), positions(3, 5))
