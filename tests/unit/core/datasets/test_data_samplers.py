"""The order of samples depends on seed and consumed samples, not on ranks."""

from __future__ import annotations

import hashlib
import itertools
import struct

import numpy as np
import pytest
import torch

from megatron.core.datasets.data_samplers import (
    PADDING_ID,
    DataloaderType,
    MicroBatchSampler,
    SampleOrder,
    WholeSetSampler,
    sample_ids_hash,
)
from megatron.core.errors import DataError

KINDS: tuple[DataloaderType, ...] = ("single", "cyclic")


def global_order(order: SampleOrder, consumed: int, micro_batch_size: int, dp: int, limit: int) -> list[int]:
    """Interleave what the ranks read, chunk after chunk."""
    samplers = [MicroBatchSampler(order, consumed, micro_batch_size, rank, dp) for rank in range(dp)]
    chunks = zip(*(itertools.islice(sampler, limit // (micro_batch_size * dp)) for sampler in samplers), strict=True)
    return [sample for chunk in chunks for part in chunk for sample in part]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("micro_batch_size", "dp"), [(1, 1), (3, 1), (1, 2), (3, 2), (1, 4), (3, 4), (12, 1)])
def test_the_global_order_is_the_same_at_any_layout(kind: DataloaderType, micro_batch_size: int, dp: int) -> None:
    order = SampleOrder(kind, 101, seed=77)
    for consumed in (0, 24, 36):
        limit = 48 if kind == "single" else 360
        assert global_order(order, consumed, micro_batch_size, dp, limit) == order.sample_ids(consumed, limit).tolist()


def test_single_is_sequential_and_drops_the_last_part() -> None:
    order = SampleOrder("single", 23)
    assert list(MicroBatchSampler(order, 0, 2, 1, 3)) == [[2, 3], [8, 9], [14, 15]]
    assert list(MicroBatchSampler(order, 6, 2, 0, 3)) == [[6, 7], [12, 13]]
    assert order.sample_ids(20, 6).tolist() == [20, 21, 22]


def test_cyclic_permutes_every_epoch_anew() -> None:
    order = SampleOrder("cyclic", 29, seed=3)
    epochs = [order.sample_ids(29 * epoch, 29).tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(29)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert order.sample_ids(20, 40).tolist() == (epochs[0] + epochs[1] + epochs[2])[20:60]
    assert SampleOrder("cyclic", 29, seed=4).sample_ids(0, 29).tolist() != epochs[0]
    assert order.sample_ids(29 * 10**6 + 5, 3).tolist() == order.epoch_permutation(10**6)[5:8].tolist()


def test_cyclic_goes_on_where_a_micro_batch_is_larger_than_the_data() -> None:
    order = SampleOrder("cyclic", 5, seed=3)
    assert global_order(order, 3, 4, 2, 24) == order.sample_ids(3, 24).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_at_another_layout_continues(kind: DataloaderType) -> None:
    order = SampleOrder(kind, 200, seed=5)
    whole = global_order(order, 0, 2, 4, 160)
    resumed = global_order(order, 0, 2, 4, 64) + global_order(order, 64, 3, 2, 48) + global_order(order, 112, 1, 1, 48)
    assert resumed == whole


def test_batch_sizes_may_change_in_mid_run() -> None:
    order = SampleOrder("cyclic", 37, seed=5)
    micro_batches = iter(MicroBatchSampler(order, 0, 2, 0, 1))
    consumed = 0
    for num_microbatches in (1, 1, 2, 4, 4):
        step = [sample for _ in range(num_microbatches) for sample in next(micro_batches)]
        assert step == order.sample_ids(consumed, 2 * num_microbatches).tolist()
        consumed += 2 * num_microbatches


def test_a_permutation_is_drawn_once_although_reading_is_ahead_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def count_draws(count: int, generator: torch.Generator) -> torch.Tensor:
        drawn.append(generator.initial_seed())
        return permute(count, generator=generator)

    permute = torch.randperm
    monkeypatch.setattr(torch, "randperm", count_draws)
    order = SampleOrder("cyclic", 37, seed=5)
    read = iter(MicroBatchSampler(order, 0, 2, 0, 1))
    ahead = [next(read) for _ in range(7)]
    for step in range(60):
        assert order.sample_ids(2 * step, 2).tolist() == ahead[step]
        ahead.append(next(read))
    assert len(drawn) == len(set(drawn)) == 1 + 2 * (60 + 6) // 37


def test_no_samples_left_is_refused_with_the_values() -> None:
    order = SampleOrder("single", 23)
    with pytest.raises(
        DataError,
        match=r"20 of the data set's 23 samples are consumed: 3 are left, but one micro-batch on every rank needs 6",
    ):
        MicroBatchSampler(order, 20, 2, 0, 3)
    with pytest.raises(DataError, match="has no samples"):
        SampleOrder("cyclic", 0)


def test_sample_ids_hash() -> None:
    expected = hashlib.blake2b(struct.pack("<4q", 7, 0, 2**40, 3), digest_size=8).hexdigest()
    assert sample_ids_hash(np.array([7, 0, 2**40, 3])) == expected
    assert len(expected) == 16
    assert sample_ids_hash(np.array([7, 0, 3, 2**40])) != expected
    assert sample_ids_hash(np.empty(0, np.int64)) == hashlib.blake2b(b"", digest_size=8).hexdigest()


@pytest.mark.parametrize(("num_samples", "rounds"), [(11, 2), (12, 2), (13, 3), (1, 1), (0, 0)])
def test_a_whole_set_is_read_once_by_equally_many_micro_batches(num_samples: int, rounds: int) -> None:
    samplers = [WholeSetSampler(num_samples, 2, rank, 3) for rank in range(3)]
    assert [len(sampler) for sampler in samplers] == [rounds] * 3
    micro_batches = [part for parts in zip(*samplers, strict=True) for part in parts]
    assert {len(part) for part in micro_batches} <= {2}
    read = [sample for part in micro_batches for sample in part]
    assert read == [*range(num_samples), *[PADDING_ID] * (6 * rounds - num_samples)]
