"""Copies for an asynchronous save: equal to the moment they were taken, in memory that is taken once."""

from __future__ import annotations

import torch

from megatron.core.dist_checkpointing.staging import StagingArea
from megatron.core.dist_checkpointing.storage import ShardEntry


def entries(seed: int) -> list[ShardEntry]:
    torch.manual_seed(seed)
    wide = torch.randn(6, 9)
    return [
        ShardEntry("d", torch.randn(3, dtype=torch.float64)),
        ShardEntry("columns", wide[:, 2:5]),
        ShardEntry("scalar", wide[3, 4]),
        ShardEntry("b", torch.randn(5, 7).bfloat16().t()),
        ShardEntry("none", wide[:0].bfloat16()),
        ShardEntry("bytes", torch.arange(7, dtype=torch.uint8)),
    ]


def test_copies_stay_as_they_were_taken() -> None:
    synchronized: list[bool] = []
    area = StagingArea(lambda: synchronized.append(True))
    live = entries(1)
    copies = area.copy(live)
    assert synchronized == [True]
    for entry in live:
        entry.values.zero_()
    for copy, expected in zip(copies, entries(1), strict=True):
        assert copy.key == expected.key
        assert copy.values.dtype == expected.values.dtype
        assert torch.equal(copy.values, expected.values)
        assert copy.values.is_contiguous()


def test_memory_is_taken_once_and_grows_where_it_must() -> None:
    area = StagingArea(lambda: None)
    first = area.copy(entries(1))
    size = area.num_bytes
    assert size == sum(entry.values.nbytes for entry in first)
    for seed in (2, 3):
        again = area.copy(entries(seed)[seed - 2 :])
        assert again[0].values.untyped_storage().data_ptr() == first[0].values.untyped_storage().data_ptr()
        assert area.num_bytes == size
    area.copy([ShardEntry("large", torch.zeros(100))])
    assert area.num_bytes == 400
