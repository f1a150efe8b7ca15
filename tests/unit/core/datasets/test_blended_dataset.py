"""Blends, splits and their builder: what is built, reported, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import BlendedDataset, normalize_weights, samples_per_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder, DatasetSplits
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.gpt_dataset_config import (
    Blend,
    GPTDatasetConfig,
    ValidationSet,
    parse_blend,
    parse_split,
    split_boundaries,
    suggest_split,
)
from megatron.core.datasets.index_builder import NumpyIndexBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.errors import ConfigurationError, DataError

Sizes = tuple[int | None, int | None, int | None]


def write_text(prefix: Path, num_documents: int, document_length: int, first_token: int = 1) -> str:
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for number in range(num_documents):
            builder.add_document(np.full(document_length, first_token + number))
        builder.finalize()
    return str(prefix)


def build(
    tmp_path: Path, sizes: Sizes, lines: list[str] | None = None, one_epoch_below: int = 0, **options: object
) -> DatasetSplits:
    values = {"sequence_length": 8, "path_to_cache": str(tmp_path / "cache")} | options
    report = (lambda line: None) if lines is None else lines.append
    config = GPTDatasetConfig(**values)  # type: ignore[arg-type]
    builder = BlendedDatasetBuilder(config, sizes, report, one_epoch_below=one_epoch_below)
    builder.check()
    return builder.build()


def refusal(tmp_path: Path, sizes: Sizes, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        build(tmp_path, sizes, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_who_watches_learns_how_much_of_each_split_is_indexed(tmp_path: Path) -> None:
    a, b = write_text(tmp_path / "a", 20, 40), write_text(tmp_path / "b", 20, 40)
    config = GPTDatasetConfig(
        sequence_length=8,
        path_to_cache=str(tmp_path / "cache"),
        blend=Blend((a, b), (0.75, 0.25)),
        split="90,10,0",
    )
    told: list[tuple[str, int, int]] = []
    for _ in range(2):
        builder = BlendedDatasetBuilder(config, (40, 8, 0), lambda line: None)
        builder.told = lambda *told_now: told.append(told_now)
        builder.build()
    # Each data set is begun, and its samples are found: then it is half done. The second time all is in the cache.
    built = [("train", done, 40) for done in (0, 0, 15, 30, 35)] + [("valid", done, 8) for done in (0, 0, 3, 6, 7, 8)]
    found = [("train", done, 40) for done in (0, 0, 30)] + [("valid", done, 8) for done in (0, 0, 6, 8)]
    assert told == [*built, *found]


def test_a_split_of_one_sample_is_reported_and_one_of_none_is_not(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "a", 20, 40),), None)
    config = GPTDatasetConfig(sequence_length=8, path_to_cache=str(tmp_path / "cache"), blend=blend, split="90,10,0")
    told: list[tuple[str, int, int]] = []
    builder = BlendedDatasetBuilder(config, (1, 0, 0), lambda line: None)
    builder.told = lambda *told_now: told.append(told_now)
    builder.build()
    assert told[-1] == ("train", 1, 1)
    assert {split for split, _, _ in told} == {"train"}


def test_parse_blend() -> None:
    assert parse_blend(["a"]) == Blend(("a",), None)
    assert parse_blend(["a", "b", "c"]) == Blend(("a", "b", "c"), None)
    assert parse_blend(["0.3", "a", "7e3", "b"]) == Blend(("a", "b"), (0.3, 7000.0))
    assert parse_blend(["1", "a"]) == Blend(("a",), (1.0,))
    for items, words in (
        (["0.3", "a", "b", "c"], "'b' is not a weight"),
        (["1", "a", "2"], "mix entries with and without a weight"),
        ([], "list of data paths is empty"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            parse_blend(items)


def test_parse_split() -> None:
    assert parse_split("949,50,1") == (0.949, 0.05, 0.001)
    assert parse_split(" 969, 30, 1 ")[0] == 0.969
    assert parse_split("1") == (1.0, 0.0, 0.0)
    assert parse_split(".5/.5") == (0.5, 0.5, 0.0)
    for text in ("", "a,b", "1,2,3,4", "-1,2,3", "0,0,0", "1;2"):
        with pytest.raises(ConfigurationError, match="--split"):
            parse_split(text)


def test_split_boundaries_round_sequences() -> None:
    assert split_boundaries(parse_split("949,50,1"), 1200) == [range(1139), range(1139, 1199), range(1199, 1200)]
    assert split_boundaries(parse_split("99,1,0"), 70) == [range(69), range(69, 70), None]
    assert split_boundaries(parse_split("949,50,1"), 3) == [range(3), range(3, 3), range(3, 3)]


def test_suggested_splits_leave_nothing_empty() -> None:
    for num_sequences in range(1, 60):
        for text in ("949,50,1", "99,1,0", "1,1,1", "0,0,1", "700,200,100"):
            shares = parse_split(text)
            suggestion = suggest_split(shares, num_sequences)
            if suggestion is None:
                assert num_sequences < sum(share > 0 for share in shares)
                continue
            parts = split_boundaries(parse_split(suggestion), num_sequences)
            assert [part is not None and len(part) > 0 for part in parts] == [share > 0 for share in shares]


def test_configuration_reports_all_problems_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        GPTDatasetConfig(
            sequence_length=0, blend=Blend(("a", "b"), (1.0, 0.0)), mock=True, split="x", eod_mask_loss=True
        )
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for words in ("--seq-length", "2 data sources", "--eod-mask-loss", "--split 'x'", "the weight of b is 0"):
        assert words in text


def test_a_split_that_is_empty_names_one_that_works(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "few", 7, 30),))
    text = refusal(tmp_path, (10, 2, 0), blend=blend, split="949,50,1")
    assert "2 valid samples are needed" in text
    assert "has 7 sequences, and --split 949,50,1 leaves none of them for valid" in text
    assert text.endswith("use --split 6,1,0")
    splits = build(tmp_path, (10, 2, 0), blend=blend, split="6,1,0")
    assert splits.train is not None
    assert splits.valid is not None
    assert splits.test is None


def test_a_test_split_without_data_is_off_and_named(tmp_path: Path) -> None:
    few, lines = Blend((write_text(tmp_path / "few", 30, 30),)), list[str]()
    assert build(tmp_path, (10, 2, 4), lines, blend=few, split="949,50,1").test is None
    assert [line for line in lines if "test" in line] == [
        f" > no test data: 4 test samples are needed, but {tmp_path / 'few'} has 30 sequences, and --split 949,50,1 "
        "leaves none of them for test; use --split 27,2,1",
    ]
    short = Blend((write_text(tmp_path / "short", 10, 7),))
    lines.clear()
    assert build(tmp_path, (10, 2, 4), lines, blend=short, split="6,3,1").test is None
    assert any("no test data: too little test data: need 4 samples of 8 + 1 tokens, have 7 tokens" in x for x in lines)


def test_a_test_blend_leaves_out_what_has_no_share(tmp_path: Path) -> None:
    prefixes = (write_text(tmp_path / "few", 8, 30), write_text(tmp_path / "many", 90, 30))
    lines: list[str] = []
    splits = build(tmp_path, (10, 0, 4), lines, blend=Blend(prefixes, (1.0, 1.0)), split="95,0,5")
    assert [line for line in lines if "test" in line] == [
        f" > 4 test samples are needed, but {prefixes[0]} has 8 sequences, and --split 95,0,5 leaves none of them for "
        "test; use --split 7,0,1"
    ]
    assert splits.test is not None
    assert {splits.test.source_of(i) for i in range(len(splits.test))} == {prefixes[1]}


def test_too_few_sequences_to_divide(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "one", 1, 300),))
    text = refusal(tmp_path, (10, 2, 2), blend=blend, split="949,50,1")
    assert "too few to divide" in text
    assert "--valid-data-path" in text


def test_a_small_validation_set_is_one_epoch_of_each_data_set(tmp_path: Path) -> None:
    prefixes, lines = (write_text(tmp_path / "a", 20, 40), write_text(tmp_path / "b", 20, 40, 100)), list[str]()
    options = {"blend": Blend(prefixes, (0.9, 0.1)), "split": "80,10,10"}
    usual = build(tmp_path, (40, 60, 20), **options)
    small = build(tmp_path, (40, 60, 20), lines, one_epoch_below=20, **options)
    assert usual.valid is not None
    assert usual.train is not None
    assert small.valid is not None
    assert small.test is not None
    assert small.train is not None
    assert len(usual.valid) >= 60
    # Two documents of 40 tokens of each data set: 9 samples of 8 + 1 tokens.
    assert (len(small.valid), len(small.test)) == (18, 18)
    sources = [small.valid.source_of(i) for i in range(18)]
    assert [sources.count(prefix) for prefix in prefixes] == [9, 9]
    assert isinstance(small.valid, BlendedDataset)
    assert sorted(small.valid.dataset_sample_index) == sorted([*range(9), *range(9)]), "each sample once"
    assert [line for line in lines if "once" in line] == [
        f" > {name} data: each evaluation reads all 18 samples once; with --eval-iters N it reads N iterations"
        for name in ("valid", "test")
    ]
    assert [tuple(small.train[i]["tokens"]) for i in range(40)] == [
        tuple(usual.train[i]["tokens"]) for i in range(40)
    ], "the order of training is the same"
    at_the_limit = build(tmp_path, (40, 60, 18), one_epoch_below=18, **options).valid
    assert at_the_limit is not None
    assert [at_the_limit.source_of(i) for i in range(60)] == [usual.valid.source_of(i) for i in range(60)]


@pytest.mark.parametrize(("one_epoch_below", "num_samples"), [(0, 5), (5, 1)])
@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_validation_text_below_one_sample_is_repeated(
    tmp_path: Path, names: tuple[str, ...], one_epoch_below: int, num_samples: int
) -> None:
    prefixes, lines = tuple(write_text(tmp_path / name, 1, 3, 10 * i) for i, name in enumerate(names)), list[str]()
    train = Blend((write_text(tmp_path / "train", 9, 40),))
    splits = build(tmp_path, (4, 5, 0), lines, one_epoch_below, blend_per_split=(train, Blend(prefixes), None))
    assert splits.valid is not None
    assert len(splits.valid) >= num_samples
    assert {splits.valid.source_of(i) for i in range(num_samples)} <= set(prefixes)
    tokens = splits.valid[0]["tokens"]
    assert (tokens.tolist() * 2)[3:11] == tokens.tolist()[3:] + tokens.tolist()[:3]
    repeated = [line for line in lines if "less than one sample, repeated" in line]
    assert len(repeated) == len(names)
    if len(names) == 1:
        epochs = -(-(8 * num_samples + 1) // 3)
        line = f" > valid data {prefixes[0]}: less than one sample, repeated: need {num_samples} samples, "
        assert repeated == [f"{line}reading {epochs} epochs"]


def test_a_share_of_zero_is_off_and_reported(tmp_path: Path) -> None:
    blend, lines = Blend((write_text(tmp_path / "text", 20, 30),)), list[str]()
    splits = build(tmp_path, (10, 2, 2), lines, blend=blend, split="90,10,0")
    assert splits.test is None
    assert " > no test data: --split 90,10,0 has no share for it" in lines
    assert "has a training share of 0" in refusal(tmp_path, (10, 2, 2), blend=blend, split="0,1,1")


def test_a_split_that_asks_for_nothing_may_be_empty(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "text", 3, 30),))
    splits = build(tmp_path, (4, 0, 0), blend=blend, split="949,50,1")
    assert (splits.valid, splits.test) == (None, None)
    assert splits.train is not None
    assert len(splits.train) >= 4


def test_too_little_text_is_refused_and_repeated_text_reported(tmp_path: Path) -> None:
    tiny = Blend((write_text(tmp_path / "tiny", 4, 2),))
    text = refusal(tmp_path, (10, 0, 0), blend=tiny, split="1,0,0")
    assert "too little train data: need 10 samples of 8 + 1 tokens, have 8 tokens" in text
    lines: list[str] = []
    more = Blend((write_text(tmp_path / "more", 4, 5),))
    splits = build(tmp_path, (10, 0, 0), lines, blend=more, split="1,0,0")
    assert splits.train is not None
    assert len(splits.train) >= 10
    assert [line for line in lines if "more" in line] == [
        f" > train data {tmp_path / 'more'}: need 10 samples, have 2 in one epoch, reading 5 epochs"
    ]


def test_per_split_paths(tmp_path: Path) -> None:
    one, two = write_text(tmp_path / "one", 6, 20), write_text(tmp_path / "two", 9, 20, first_token=50)
    lines: list[str] = []
    splits = build(tmp_path, (5, 6, 7), lines, blend_per_split=(Blend((one,)), Blend((two,)), None))
    assert isinstance(splits.train, GPTDataset)
    assert isinstance(splits.valid, GPTDataset)
    assert (len(splits.train.sequences), len(splits.valid.sequences)) == (6, 9)
    assert splits.test is None
    assert " > no test data: --test-data-path is not set" in lines
    text = refusal(tmp_path, (5, 6, 7), blend_per_split=(None, Blend((two,)), None))
    assert "--train-data-path is not set" in text


def test_missing_file_of_a_blend_is_named(tmp_path: Path) -> None:
    one = write_text(tmp_path / "one", 6, 20)
    assert "nowhere.idx does not exist" in refusal(
        tmp_path, (5, 0, 0), blend=Blend((one, str(tmp_path / "nowhere"))), split="1"
    )


def test_wrong_vocabulary_is_found_before_training(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "one", 6, 20), write_text(tmp_path / "two", 6, 20, first_token=95)))
    text = refusal(tmp_path, (5, 0, 0), blend=blend, split="1", vocab_size=97)
    assert text.startswith(f"{tmp_path / 'two'} contains token id 97, but the vocabulary has 97 ids (0 to 96)")
    build(tmp_path, (5, 0, 0), blend=blend, split="1", vocab_size=101)


def test_blend_follows_its_weights_and_names_its_sources(tmp_path: Path) -> None:
    prefixes = tuple(write_text(tmp_path / f"part{i}", 5 + i, 40 + i, 100 * i + 1) for i in range(3))
    splits = build(tmp_path, (1000, 0, 0), blend=Blend(prefixes, (5.0, 3.0, 2.0)), split="1")
    train = splits.train
    assert isinstance(train, BlendedDataset)
    assert len(train) == 1000
    assert np.bincount(train.dataset_index).tolist() == [500, 300, 200]
    for i in range(0, 1000, 37):
        number = int(train.dataset_index[i])
        assert int(train[i]["tokens"].min()) // 100 == number
        assert train.source_of(i) == prefixes[number]
    with pytest.raises(IndexError):
        train[1000]


def test_unweighted_blend_larger_than_one_epoch_repeats_in_proportion(tmp_path: Path) -> None:
    prefixes = (write_text(tmp_path / "one", 10, 41), write_text(tmp_path / "two", 20, 41))
    lines: list[str] = []
    one_epoch = build(tmp_path, (None, 0, 0), lines, blend=Blend(prefixes), split="1").train
    assert one_epoch is not None
    assert len(one_epoch) == 51 + 102
    within = build(tmp_path, (100, 0, 0), lines, blend=Blend(prefixes), split="1").train
    assert within is not None
    assert len(within) == 100
    assert not [line for line in lines if "epochs" in line]
    all_of_it = build(tmp_path, (153, 0, 0), lines, blend=Blend(prefixes), split="1").train
    assert all_of_it is not None
    assert len(all_of_it) == 153
    assert not [line for line in lines if "epochs" in line]
    beyond = build(tmp_path, (1000, 0, 0), lines, blend=Blend(prefixes), split="1").train
    assert isinstance(beyond, BlendedDataset)
    assert len(beyond) >= 1000
    counts = np.bincount(beyond.dataset_index)
    assert abs(counts[1] / counts[0] - 2) < 0.02
    assert len([line for line in lines if "epochs" in line]) == 2


@pytest.mark.parametrize(("length", "num_left"), [(3, 1), (8, 1), (9, 2)])
def test_unweighted_blend_leaves_out_a_data_set_without_samples(length: int, num_left: int, tmp_path: Path) -> None:
    prefixes = (write_text(tmp_path / "short", 1, length), write_text(tmp_path / "long", 10, 41))
    train = build(tmp_path, (40, 0, 0), blend=Blend(prefixes), split="1").train
    assert isinstance(train, BlendedDataset)
    assert len(train.datasets) == num_left
    assert {train.source_of(i) for i in range(40)} == set(prefixes[-num_left:])


def test_extreme_weights_stay_in_range(tmp_path: Path) -> None:
    random = np.random.RandomState(5)
    prefixes = tuple(write_text(tmp_path / f"part{i}", 3, 9 + i) for i in range(13))
    for attempt in range(12):
        weights = tuple((10.0 ** random.uniform(-6, 6, size=13)).tolist())
        wanted = int(random.randint(1, 90))
        train = build(tmp_path, (wanted, 0, 0), blend=Blend(prefixes, weights), split="1", random_seed=attempt).train
        assert isinstance(train, BlendedDataset)
        assert wanted <= len(train) <= wanted + 13
        for i in range(len(train)):
            assert train[i]["tokens"].shape == (8,)


def test_what_is_reported_of_a_further_validation_set_has_its_name(tmp_path: Path) -> None:
    main, web = write_text(tmp_path / "main", 10, 41), write_text(tmp_path / "web", 2, 41)
    lines: list[str] = []
    further = ValidationSet("web", Blend((web,)), num_samples=40)
    splits = build(tmp_path, (5, 0, 0), lines, blend=Blend((main,)), split="1", extra_valid=(further,))
    assert len(splits.extra_valid["web"]) >= 40
    (repeated,) = [line for line in lines if "epochs" in line]
    assert repeated.startswith(f" > valid data {web}: need 40 samples")
    assert repeated.endswith(" [validation set web]")


def test_weights_are_normalized_twice_as_in_megatron() -> None:
    """The second division changes the last bit of some weights; the first has to come before it."""
    random = np.random.RandomState(3)
    for _ in range(50):
        weights = random.uniform(size=7)
        once = weights / weights.sum()
        assert normalize_weights(weights.tolist()).tolist() == (once / once.sum()).tolist()


def test_many_equal_data_sets_get_no_more_than_they_hold(tmp_path: Path) -> None:
    # Rounding up gives 60 samples where 7 are asked for: the first data set is then asked beyond its own part.
    prefix = write_text(tmp_path / "text", 2, 9)
    weights = (0.6, *([0.4 / 59] * 59))
    assert sum(samples_per_dataset(weights, 7)) == 64
    train = build(tmp_path, (7, 0, 0), blend=Blend((prefix,) * 60, weights), split="1").train
    assert isinstance(train, BlendedDataset)
    assert int(np.bincount(train.dataset_index)[0]) > samples_per_dataset(weights, 7, 0.005)[0]
    assert all(len(train[i]["tokens"]) == 8 for i in range(len(train)))


def test_blend_is_read_from_the_cache_again(tmp_path: Path) -> None:
    prefixes = (write_text(tmp_path / "one", 10, 41), write_text(tmp_path / "two", 20, 41))
    trains = [build(tmp_path, (30, 0, 0), blend=Blend(prefixes, (1.0, 2.0)), split="1").train for _ in range(2)]
    assert len(list((tmp_path / "cache").glob("*-BlendedDataset-train-dataset_index.npy"))) == 1
    assert all(np.array_equal(trains[0][i]["tokens"], trains[1][i]["tokens"]) for i in range(30))  # type: ignore[index]
    build(tmp_path, (30, 0, 0), blend=Blend(prefixes, (1.0, 2.0001)), split="1")
    assert len(list((tmp_path / "cache").glob("*-BlendedDataset-train-dataset_index.npy"))) == 2


def test_a_blend_that_takes_nothing_of_a_data_set_is_read_from_the_cache_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blend = Blend((write_text(tmp_path / "text", 2, 9),) * 60, (0.6, *([0.4 / 59] * 59)))
    first = build(tmp_path, (7, 0, 0), blend=blend, split="1").train
    assert isinstance(first, BlendedDataset)
    assert np.bincount(first.dataset_index, minlength=60).min() == 0
    monkeypatch.setattr("megatron.core.datasets.blended_dataset.np.bincount", None)
    again = build(tmp_path, (7, 0, 0), blend=blend, split="1").train
    assert isinstance(again, BlendedDataset)
    assert again.dataset_index.tolist() == first.dataset_index.tolist()


def test_mock_data_needs_no_files(tmp_path: Path) -> None:
    splits = build(tmp_path, (12, 5, 0), mock=True, vocab_size=31)
    assert isinstance(splits.train, MockGPTDataset)
    assert isinstance(splits.valid, MockGPTDataset)
    assert (len(splits.train), len(splits.valid), splits.test) == (12, 5, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_samples", [8, 9])
def test_text_that_is_read_twice_is_reported(num_samples: int, tmp_path: Path) -> None:
    lines: list[str] = []
    build(tmp_path, (num_samples, 0, 0), lines, blend=Blend((write_text(tmp_path / "a", 1, 65),)), split="1")
    assert [line for line in lines if "epoch" in line] == [
        f" > train data {tmp_path / 'a'}: need 9 samples, have 8 in one epoch, reading 2 epochs"
    ] * (num_samples - 8)


def test_further_validation_sets_are_checked_and_need_no_other_data(tmp_path: Path) -> None:
    web = write_text(tmp_path / "web", 2, 41)
    further = (ValidationSet("web", Blend((web,)), num_samples=4),)
    splits = build(tmp_path, (5, 0, 0), mock=True, extra_valid=further)
    assert isinstance(splits.train, MockGPTDataset)
    assert splits.extra_valid["web"].source_of(0) == web
    config = GPTDatasetConfig(
        sequence_length=8, mock=True, extra_valid=(ValidationSet("web", Blend((str(tmp_path / "no"),)), 4),)
    )
    with pytest.raises(DataError, match=r"^validation set web: .*no\.idx does not exist"):
        BlendedDatasetBuilder(config, (5, 0, 0), print).check()


def test_a_weight_of_a_data_set_without_tokens_is_rejected(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "text", 10, 41), write_text(tmp_path / "empty", 3, 0)), (1.0, 1.0))
    text = refusal(tmp_path, (10, 0, 0), blend=blend, split="1")
    assert f"have 0 tokens in {tmp_path / 'empty'};" in text
    assert "--eval-iters" not in text
    assert build(tmp_path, (10, 0, 0), blend=Blend(blend.prefixes), split="1").train is not None
    one_token = Blend((blend.prefixes[0], write_text(tmp_path / "one", 1, 1)), (1.0, 1.0))
    assert build(tmp_path, (10, 0, 0), blend=one_token, split="1").train is not None


def test_the_vocabulary_is_compared_with_the_first_tokens_alone(tmp_path: Path, monkeypatch) -> None:
    blend = Blend((write_text(tmp_path / "text", 3, 20, first_token=95),))
    monkeypatch.setattr("megatron.core.datasets.blended_megatron_dataset_builder._PROBED_TOKENS", 41)
    assert "token id 97" in refusal(tmp_path, (5, 0, 0), blend=blend, split="1", vocab_size=97)
    monkeypatch.setattr("megatron.core.datasets.blended_megatron_dataset_builder._PROBED_TOKENS", 40)
    build(tmp_path, (5, 0, 0), blend=blend, split="1", vocab_size=97)
    assert "token id 96" in refusal(tmp_path, (5, 0, 0), blend=blend, split="1", vocab_size=96)


def test_indices_are_built_by_the_builder_that_is_given(tmp_path: Path) -> None:
    class Counted(NumpyIndexBuilder):
        calls = 0

        def sample_index(self, *arguments: Any) -> Any:
            self.calls += 1
            return super().sample_index(*arguments)

    config = GPTDatasetConfig(sequence_length=8, blend=Blend((write_text(tmp_path / "a", 1, 65),)), split="1")
    given = Counted()
    BlendedDatasetBuilder(config, (5, 0, 0), print, given).build()
    assert given.calls == 1


def test_all_validation_data_is_read_once_whatever_its_weights(tmp_path: Path) -> None:
    prefixes = (write_text(tmp_path / "one", 10, 41), write_text(tmp_path / "two", 20, 41))
    valid = build(tmp_path, (0, None, 0), blend=Blend(prefixes, (9.0, 1.0)), split="0,1,0").valid
    assert isinstance(valid, BlendedDataset)
    assert np.bincount(valid.dataset_index).tolist() == [51, 102]
    assert "which needs a number of samples" in refusal(
        tmp_path, (None, 0, 0), blend=Blend(prefixes, (9.0, 1.0)), split="1"
    )


def test_the_first_token_of_a_vocabulary_is_one_of_it(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "text", 3, 20, first_token=0),))
    build(tmp_path, (5, 0, 0), blend=blend, split="1", vocab_size=3)
    with IndexedDatasetBuilder(tmp_path / "negative", np.int32) as builder:
        builder.add_document([1, -1] * 10)
        builder.finalize()
    text = refusal(tmp_path, (1, 0, 0), blend=Blend((str(tmp_path / "negative"),)), split="1", vocab_size=3)
    assert "contains token id -1" in text


def test_short_last_samples_of_a_validation_blend_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    blend = Blend((write_text(tmp_path / "one", 10, 41), write_text(tmp_path / "two", 20, 41)))
    lines: list[str] = []
    for drop_last, num_valid in ((True, 51 + 102), (False, 52 + 103)):
        splits = build(
            tmp_path,
            (None, None, 0),
            lines,
            blend_per_split=(blend, blend, None),
            drop_last_partial_validation_sequence=drop_last,
        )
        assert splits.train is not None
        assert splits.valid is not None
        assert (len(splits.train), len(splits.valid)) == (51 + 102, num_valid)
    assert not [line for line in lines if "epochs" in line]
