"""The compiled index builder equals the NumPy one, both equal their definitions, and progress is told."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import normalize_weights, samples_per_dataset
from megatron.core.datasets.index_builder import (
    CountedIndexBuilder,
    EpochPlan,
    IndexBuilder,
    NumpyIndexBuilder,
    count_samples,
    plan_epochs,
    sample_index_dtype,
    select_index_builder,
    shuffle_index_dtype,
)
from megatron.core.errors import DataError


@pytest.fixture(scope="module")
def compiled() -> IndexBuilder:
    lines: list[str] = []
    builder = select_index_builder(lines.append)
    if builder.name != "compiled":
        pytest.skip(f"the C++ extension is not built: {lines}")
    return builder


def helpers() -> Any:
    from megatron.core.datasets import _helpers

    return _helpers


numpy_builder = NumpyIndexBuilder()


def assert_identical(left: Any, right: Any) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


def walk_samples(lengths: list[int], documents: list[int], sequence_length: int, num_samples: int) -> list[list[int]]:
    """Find sample starts the slow way: token by token."""
    tokens = [(place, offset) for place, document in enumerate(documents) for offset in range(lengths[document])]
    rows = [[0, 0]]
    for sample in range(1, num_samples + 1):
        rows.append(list(tokens[min(sample * sequence_length, len(tokens) - 1)]))
    return rows


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    epochs=st.integers(1, 4),
    sequence_length=st.integers(1, 23),
    drop_last=st.booleans(),
    separate=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_indices_of_a_dataset(
    compiled: IndexBuilder,
    lengths: list[int],
    epochs: int,
    sequence_length: int,
    drop_last: bool,
    separate: bool,
    seed: int,
) -> None:
    if lengths[-1] == 0:
        lengths = [*lengths, 1]
    sizes = np.array(lengths, np.int32)
    documents = np.arange(len(sizes), dtype=np.int32)
    num_samples = count_samples(int(sizes.sum()) * epochs, sequence_length, drop_last)
    built = []
    for builder in (compiled, numpy_builder):
        state = np.random.RandomState(seed)
        document_index = builder.document_index(documents, epochs, state, separate)
        sample_index = builder.sample_index(sizes, document_index, sequence_length, num_samples)
        shuffle_index = builder.shuffle_index(num_samples // 2, num_samples, state)
        built.append((document_index, sample_index, shuffle_index, state.randint(1 << 30, size=3)))
    for left, right in zip(*built, strict=True):
        assert_identical(left, right)
    document_index, sample_index, shuffle_index, _ = built[1]
    if lengths[document_index[-1]] > 0:
        assert sample_index.tolist() == walk_samples(lengths, document_index.tolist(), sequence_length, num_samples)
    assert np.bincount(document_index).tolist() == [epochs] * len(lengths)
    assert sorted(shuffle_index[: num_samples // 2].tolist()) == list(range(num_samples // 2))
    assert sorted(shuffle_index.tolist()) == list(range(num_samples))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 255, 256, 257, 65535, 65536, 65537, 300001])
def test_shuffles_are_numpys(compiled: IndexBuilder, size: int) -> None:
    left, right = np.random.RandomState(11), np.random.RandomState(11)
    left.randint(5, size=17)  # start in the middle of a block of the generator
    right.randint(5, size=17)
    for _ in range(2):
        assert_identical(compiled.shuffle_index(size, size, left), numpy_builder.shuffle_index(size, size, right))
    assert left.randint(1 << 30) == right.randint(1 << 30)


def blend_slowly(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """Follow the definition: the largest error, the first one of equal ones."""
    taken = [0] * len(weights)
    datasets, samples = [], []
    for i in range(size):
        errors = [weight * max(i, 1) - count for weight, count in zip(weights, taken, strict=True)]
        datasets.append(errors.index(max(errors)))
        samples.append(taken[datasets[-1]])
        taken[datasets[-1]] += 1
    return datasets, samples


def compiled_blends(*arguments: Any) -> list[tuple[Any, Any]]:
    """Blend with every kind of vectors that this processor has, by weights and size or by sizes."""
    function = helpers().blending_indices if len(arguments) == 2 else helpers().exhaustive_blending_indices
    blends = []
    for bits in (0, 32, 256, 512):
        with contextlib.suppress(ValueError):  # this processor has no such vectors
            blends.append(function(*arguments, vector_bits=bits))
    assert len(blends) >= 2
    return blends


# Few distinct weights make ties, which the lowest data set wins; nearly equal ones must not be taken for equal.
some_weights = st.one_of(
    st.floats(1e-6, 1e6),
    st.floats(1e-300, 1e300),
    st.sampled_from([1.0, 2.0, 3.0, 5.0, 1.0 + 2.0**-52, 1.0 - 2.0**-53, 1.0 + 2.0**-30]),
)


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(some_weights, min_size=1, max_size=70), size=st.integers(0, 400))
def test_blends(compiled: IndexBuilder, weights: list[float], size: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    dataset, sample = numpy_builder.blending_indices(shares, size)
    assert (dataset.dtype, sample.dtype) == (np.int16, np.int64)
    assert (dataset.tolist(), sample.tolist()) == blend_slowly(shares.tolist(), size)
    for blend in (compiled.blending_indices(shares, size), *compiled_blends(shares, size)):
        assert_identical(blend[0], dataset)
        assert_identical(blend[1], sample)


@pytest.mark.parametrize("kind", ["shares", "sizes", "whole", "one large", "tiny", "not all"])
@pytest.mark.parametrize("num_datasets", [5, 64, 300])
def test_long_blends(compiled: IndexBuilder, num_datasets: int, kind: str) -> None:
    random = np.random.RandomState(num_datasets)
    weights = {
        "shares": random.rand(num_datasets),
        "sizes": np.exp(2 * random.randn(num_datasets)),
        "whole": random.randint(1, 12, size=num_datasets).astype(np.float64),
        "one large": np.r_[2.5 * num_datasets, random.rand(num_datasets - 1)],
        "tiny": 10.0 ** random.uniform(-9, 0, size=num_datasets),
        "not all": np.where(np.arange(num_datasets) % 3 > 0, random.rand(num_datasets), 0.0),
    }[kind]
    shares = weights / weights.sum() * (0.9 if kind == "not all" else 1.0)
    expected = numpy_builder.blending_indices(shares, 6007)
    for blend in compiled_blends(shares, 6007):
        assert_identical(blend[0], expected[0])
        assert_identical(blend[1], expected[1])


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.one_of(st.integers(0, 50), st.sampled_from([20, 21])), min_size=1, max_size=40))
def test_exhaustive_blends_use_every_sample_once(compiled: IndexBuilder, sizes: list[int]) -> None:
    values = np.array(sizes, np.int64)
    dataset, sample = numpy_builder.exhaustive_blending_indices(values)
    for blend in (compiled.exhaustive_blending_indices(values), *compiled_blends(values)):
        assert_identical(blend[0], dataset)
        assert_identical(blend[1], sample)
    for number, size in enumerate(sizes):
        assert sample[dataset == number].tolist() == list(range(size))


def test_equal_weights_take_turns(compiled: IndexBuilder) -> None:
    for builder in (compiled, numpy_builder):
        dataset, _ = builder.blending_indices(np.full(3, 1 / 3), 9)
        assert dataset.tolist() == [0, 1, 2] * 3


@settings(max_examples=300, deadline=None)
@given(exponents=st.lists(st.floats(-12, 12), min_size=1, max_size=40), requested=st.integers(1, 60))
def test_extreme_weights_take_within_one_sample_of_their_part(
    compiled: IndexBuilder, exponents: list[float], requested: int
) -> None:
    weights = [10.0**exponent for exponent in exponents]
    parts = np.array(samples_per_dataset(weights, requested))
    shares = normalize_weights(weights)
    size = int(parts.sum())
    assert requested <= size <= requested + len(weights)
    dataset, sample = compiled.blending_indices(shares, size)
    for twin, built in zip(numpy_builder.blending_indices(shares, size), (dataset, sample), strict=True):
        assert_identical(twin, built)
    assert 0 <= dataset.min() <= dataset.max() < len(weights)
    taken = np.cumsum(dataset[:, None] == np.arange(len(weights)), axis=0)  # after each step
    exact = np.arange(1, size + 1)[:, None] * shares
    assert np.all(taken < exact + 1 + 1e-9)  # never more than one ahead of the weights
    assert np.all(taken > exact - 2)
    assert np.all(taken[-1] >= parts - 1)
    for number in range(len(weights)):
        assert sample[dataset == number].tolist() == list(range(taken[-1, number]))


def test_shares_that_are_none_are_refused(compiled: IndexBuilder) -> None:
    for builder in (compiled, numpy_builder):
        for share in (-0.1, 1.5, float("nan"), float("inf")):
            with pytest.raises(DataError, match="data set 1 of a blend has the weight"):
                builder.blending_indices(np.array([0.5, share]), 3)


def test_the_sample_index_is_the_same_in_64_bits(compiled: IndexBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(2)
    lengths = random.randint(0, 90, size=401).astype(np.int32)
    lengths[::50] = 2000  # more samples in a document than are written at a time
    documents = np.tile(np.arange(401, dtype=np.int32), 3)
    random.shuffle(documents)
    for length in (1, 7, 64):
        num_samples = count_samples(3 * int(lengths.sum()), length)
        narrow = compiled.sample_index(lengths, documents, length, num_samples)
        assert narrow.dtype == np.int32
        with monkeypatch.context() as patched:
            patched.setattr("megatron.core.datasets.index_builder._INT32_MAX", 1000)
            wide = compiled.sample_index(lengths, documents, length, num_samples)
            assert wide.dtype == np.int64
            assert_identical(wide, numpy_builder.sample_index(lengths, documents, length, num_samples))
        assert_identical(narrow, wide.astype(np.int32))


def test_plan_epochs() -> None:
    # 101 tokens give 10 samples of 10 in one epoch; two epochs (202 tokens) give 20.
    assert plan_epochs(101, 10, None) == EpochPlan(1, False, None)
    assert plan_epochs(101, 10, 0) == EpochPlan(1, False, None)
    assert plan_epochs(101, 10, 10) == EpochPlan(1, False, None)
    assert plan_epochs(101, 10, 11) == EpochPlan(2, True, 10)
    assert plan_epochs(101, 10, 17) == EpochPlan(2, True, 10)  # 7 of the last epoch's 10: below 80 %
    assert plan_epochs(101, 10, 18) == EpochPlan(2, False, None)
    assert plan_epochs(101, 10, 20) == EpochPlan(2, False, None)
    # The last token of the first epoch begins no sample: it has no label there.
    assert plan_epochs(100, 10, 10) == EpochPlan(2, True, 9)
    assert plan_epochs(7, 10, 3).num_epochs == 5  # 31 tokens of text that never fills a sample by itself
    with pytest.raises(DataError, match="3 samples are needed, but the documents contain no tokens"):
        plan_epochs(0, 10, 3)


def test_samples_that_do_not_fit_are_refused(compiled: IndexBuilder) -> None:
    lengths, documents = np.array([4, 4], np.int32), np.array([0, 1], np.int32)
    for builder in (compiled, numpy_builder):
        assert len(builder.sample_index(lengths, documents, 3, 3)) == 4
        with pytest.raises(DataError, match="4 samples of 3 tokens"):
            builder.sample_index(lengths, documents, 3, 4)
        with pytest.raises(DataError, match="a blend of 40000 data sets"):
            builder.blending_indices(np.full(40000, 1 / 40000), 3)
    with pytest.raises(DataError, match="unknown sequence"):
        compiled.sample_index(lengths, np.array([0, 7], np.int32), 3, 2)


def test_a_missing_extension_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core.datasets._helpers", None)
    import megatron.core.datasets as package

    monkeypatch.delattr(package, "_helpers", raising=False)
    lines: list[str] = []
    assert select_index_builder(lines.append).name == "NumPy"
    assert len(lines) == 1
    assert "compiled index builder not found" in lines[0]
    assert "using the NumPy index builder" in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize(("num_samples", "num_epochs"), [(None, 1), (0, 1), (1, 2), (2, 4)])
def test_text_of_less_than_a_sample_is_repeated_for_one(num_samples: int | None, num_epochs: int) -> None:
    assert plan_epochs(5, 8, num_samples).num_epochs == num_epochs
    assert plan_epochs(1, 8, num_samples).num_epochs == (8 * (num_samples or 0) + 1)


def test_shuffles_of_64_bit_numbers_are_numpys(compiled: IndexBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron.core.datasets.index_builder.shuffle_index_dtype", lambda num_samples: np.dtype(np.int64)
    )
    left, right = np.random.RandomState(11), np.random.RandomState(11)
    assert_identical(compiled.shuffle_index(70, 100, left), numpy_builder.shuffle_index(70, 100, right))
    assert left.randint(1 << 30) == right.randint(1 << 30)


@pytest.mark.parametrize("num_data_sets", [0, 32768])
def test_a_blend_of_more_data_sets_than_can_be_numbered_is_rejected(num_data_sets: int, compiled: IndexBuilder) -> None:
    for builder in (compiled, numpy_builder):
        with pytest.raises(DataError, match=f"a blend of {num_data_sets} data sets cannot be indexed"):
            builder.exhaustive_blending_indices(np.ones(num_data_sets, np.int64))
        with pytest.raises(DataError, match=f"a blend of {num_data_sets} data sets cannot be indexed"):
            builder.blending_indices(np.ones(num_data_sets), 1)
        with pytest.raises(DataError, match=r"has the weight 1\.5"):
            builder.blending_indices(np.array([0.5, 1.5]), 1)


@pytest.mark.parametrize(
    ("tokens", "length", "num_samples", "plan"),
    [
        # The last epoch is shuffled by itself where less than four fifths of its samples are needed.
        (6, 1, 8, EpochPlan(2, True, 5)),
        (6, 1, 9, EpochPlan(2, False, None)),
        (6, 1, 5, EpochPlan(1, False, None)),
        (0, 8, 0, EpochPlan(1, False, None)),
    ],
)
def test_epochs_are_planned(tokens: int, length: int, num_samples: int, plan: EpochPlan) -> None:
    assert plan_epochs(tokens, length, num_samples) == plan


def test_one_token_and_none_make_no_sample() -> None:
    assert [count_samples(tokens, 1, drop) for tokens in (0, 1, 2) for drop in (True, False)] == [0, 0, 0, 0, 1, 1]


def test_numbers_are_as_wide_as_they_must_be() -> None:
    assert [sample_index_dtype(2**31 + more) for more in (-1, 0)] == [np.int32, np.int64]
    assert [shuffle_index_dtype(2**32 + more) for more in (-3, -2, -1)] == [np.uint32, np.int64, np.int64]


@pytest.mark.parametrize("sizes", [[0, 2, 2], [9, 1], [1, 9], [3, 0, 5, 0], [1], [*[0] * 32766, 1]], ids=len)
def test_all_samples_are_blended_alike_and_none_of_an_empty_data_set(compiled: IndexBuilder, sizes: list[int]) -> None:
    values = np.array(sizes, np.int64)
    left, right = (builder.exhaustive_blending_indices(values) for builder in (compiled, numpy_builder))
    for one, other in zip(left, right, strict=True):
        assert_identical(one, other)
    assert np.bincount(right[0], minlength=len(sizes)).tolist() == sizes


class Builder:
    """Stand for an index builder: each index is its arguments."""

    name = "stand-in"

    def __getattr__(self, name: str) -> Any:
        return lambda *words: (name, *words)


def test_a_data_set_is_half_done_when_its_samples_are_found() -> None:
    told: list[tuple[str, int, int]] = []
    counted = CountedIndexBuilder(Builder(), lambda *words: told.append(words))
    lengths = documents = np.zeros(1, np.int32)
    counted.sample_index(lengths, documents, 4, 100)
    assert told == []
    counted.begin("train", 100)
    counted.next_data_set(61)
    counted.sample_index(lengths, documents, 4, 61)
    counted.next_data_set(59)
    counted.sample_index(lengths, documents, 4, 59)
    counted.next_data_set(0)
    counted.end()
    assert told == [("train", done, 100) for done in (0, 0, 30, 61, 90, 100, 100)]
    counted.next_data_set(5)
    counted.begin("valid", 7)
    assert told[7:] == [("valid", 0, 7)]


def test_the_indices_are_those_of_the_other_builder() -> None:
    counted = CountedIndexBuilder(Builder(), lambda *words: None)
    ids, weights, state = np.zeros(1, np.int32), np.ones(2), np.random.RandomState(3)
    assert counted.name == "stand-in"
    assert counted.document_index(ids, 2, state, True) == ("document_index", ids, 2, state, True)
    assert counted.document_index(ids, 2, state)[-1] is False
    assert counted.sample_index(ids, ids, 4, 9) == ("sample_index", ids, ids, 4, 9)
    assert counted.shuffle_index(5, 9, state) == ("shuffle_index", 5, 9, state)
    assert counted.blending_indices(weights, 8) == ("blending_indices", weights, 8)
    assert counted.exhaustive_blending_indices(ids) == ("exhaustive_blending_indices", ids)
