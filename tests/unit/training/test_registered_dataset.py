"""Samples of map-style data sets that scripts register."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint import TrainState
from megatron.config import RunConfig, resolve_arguments
from megatron.core import registry
from megatron.core.datasets import DataHistory, DatasetSplits, ReadCounter
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.errors import ConfigurationError, DataError
from megatron.core.tokenizers import NullTokenizer
from megatron.training import extending
from megatron.training.batch_source import sample_order
from megatron.training.data_plan import sample_targets
from megatron.training.gpt import provide_datasets
from megatron.training.registered_dataset import MapStyleDataset

CONFIG = GPTDatasetConfig(sequence_length=4, random_seed=1, mock=True, eod_token_id=9, vocab_size=10)


class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[list[int]]:
        yield [1, 2]


def sample_of(item: Any, config: GPTDatasetConfig = CONFIG) -> dict[str, list[Any]]:
    dataset = MapStyleDataset("mine", Items(item), range(1), None, "training", config)
    return {name: np.asarray(array).tolist() for name, array in dataset[0].items()}


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda tokens: {"tokens": torch.tensor(tokens)}])
def test_labels_are_the_tokens_shifted_by_one(kind: Callable[[list[int]], Any]) -> None:
    assert sample_of(kind([1, 2, 3, 4, 5])) == {
        "tokens": [1, 2, 3, 4],
        "labels": [2, 3, 4, 5],
        "loss_mask": [1, 1, 1, 1],
        "position_ids": [0, 1, 2, 3],
    }


def test_a_short_item_is_padded_without_effect_on_the_loss() -> None:
    sample = sample_of([1, 2, 3])
    assert (sample["tokens"], sample["labels"]) == ([1, 2, 3, 0], [2, 3, 0, 0])
    assert sample["loss_mask"] == [1, 1, 0, 0]
    assert sample["padding_mask"] == [False, False, False, True]
    sample = sample_of({"tokens": [1, 2], "labels": [5, 6]})
    assert (sample["tokens"], sample["labels"]) == ([1, 2, 0, 0], [5, 6, 0, 0])
    assert sample["loss_mask"] == [1, 1, 0, 0]
    assert sample["padding_mask"] == [False, False, True, True]


def test_a_mask_of_tokens_or_of_labels_excludes_them_from_the_loss() -> None:
    sample = sample_of({"tokens": [1, 2, 3, 4, 5], "loss_mask": [1, 0, 1, 0, 1]})
    assert sample["loss_mask"] == [0, 1, 0, 1]
    sample = sample_of({"tokens": [1, 2, 3, 4], "labels": [5, -100, 7, 8], "loss_mask": torch.tensor([1, 1, 0, 1])})
    assert sample["labels"] == [5, 0, 7, 8]
    assert sample["loss_mask"] == [1, 0, 0, 1]
    by_document = dataclasses.replace(CONFIG, eod_mask_loss=True, reset_attention_mask=True, reset_position_ids=True)
    sample = sample_of({"tokens": [1, 9, 3, 4], "labels": [9, 3, 4, 5]}, by_document)
    assert sample["loss_mask"] == [1, 0, 1, 1]
    assert sample["document_ids"] == [0, 0, 1, 1]
    assert sample["position_ids"] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1, 2, 3, 4, 5, 6], "it has 6 tokens; at most 5 are expected"),
        ({"tokens": [1] * 5, "labels": [1] * 5}, "it has 5 tokens; at most 4 are expected"),
        ([], "its tokens have shape"),
        ([0.5], "its tokens have shape (1,) and type float64; one row of integers is expected"),
        ([[1, 2]], "its tokens have shape (1, 2)"),
        ({"input_ids": [1]}, "it has input_ids, which no part of the run reads; return tokens, or a dictionary"),
        ({"labels": [1]}, "it is a dictionary without tokens; return tokens, or"),
        ({"tokens": [1, 2], "labels": [1]}, "its labels have shape (1,), but its tokens (2,)"),
    ],
)
def test_an_item_of_another_kind_is_rejected(item: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        sample_of(item)
    assert str(caught.value).startswith(message)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    monkeypatch.setattr(registry, "_REGISTERED", {})

    def add(made: Any) -> None:
        extending.register_dataset("mine", lambda config, tokenizer: made)

    return add


def config_of(more: str) -> RunConfig:
    words = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --max-position-embeddings 4 --seq-length 4
        --micro-batch-size 1 --global-batch-size 2 --train-iters 5 --lr 1e-3 --eval-interval 5 --eval-iters 2
        --tokenizer-type NullTokenizer --vocab-size 10 --dataset mine"""
    return resolve_arguments([*words.split(), *more.split()], 1).config


def build(more: str = "", done: TrainState | None = None) -> tuple[DatasetSplits, list[str]]:
    lines: list[str] = []
    config = config_of(more)
    builder = provide_datasets(config, NullTokenizer(10), sample_targets(config, done), lines.append)
    builder.check()
    return builder.build(), lines


def test_one_data_set_is_read_for_training_unless_it_is_split(register: Callable[[Any], None]) -> None:
    register(Items(*([number, number] for number in range(8))))
    splits, lines = build()
    assert (splits.valid, splits.test) == (None, None)
    assert isinstance(splits.train, MapStyleDataset)
    assert len(splits.train) == 16
    assert [int(splits.train[index]["tokens"][0]) for index in (0, 7, 8, 15)] == [0, 7, 0, 7]
    assert lines == ["training data (mine): need 10 samples, have 8 in one epoch, reading 2 epochs"]
    assert splits.train.source_of(9) == "item 1 of data set mine"
    splits, _ = build("--split 6,1,1")
    assert [int(part[0]["tokens"][0]) for part in (splits.train, splits.valid, splits.test)] == [0, 6, 7]  # type: ignore
    # A cyclic order repeats the samples itself, and so does not depend on the length of the run.
    splits, _ = build("--dataloader-type cyclic")
    assert len(splits.train) == 8  # type: ignore[arg-type]


def test_a_resumed_run_continues_and_reports_a_data_set_of_another_length(
    monkeypatch: pytest.MonkeyPatch, register: Callable[[Any], None]
) -> None:
    def resumed(num_items: int, history: DataHistory, more: str = "") -> tuple[DatasetSplits, list[str]]:
        monkeypatch.setattr(registry, "_REGISTERED", {})
        register(Items(*([number, number] for number in range(num_items))))
        done = TrainState(iteration=2, consumed_train_samples=4, train_data=history.to_dict())
        return build(more, done)

    register(Items(*([number, number] for number in range(8))))
    for more in ("", "--dataloader-type cyclic"):
        splits, _ = build(more)
        assert splits.train is not None
        assert splits.history is not None
        order = sample_order(splits.train, config_of(more))  # type: ignore[arg-type]
        history = ReadCounter(splits.history, splits.train, order).history_at(4)  # type: ignore[arg-type]
        same, lines = resumed(8, history, more)
        assert same.history == history
        assert [same.train[index]["tokens"][0] for index in range(4, 8)] == [4, 5, 6, 7]  # type: ignore[index]
        assert not [line for line in lines if "changes" in line]
        if more:
            with pytest.raises(DataError, match="the data differs from the checkpoint's, but --dataloader-type cyclic"):
                resumed(9, history, more)
            continue
        other, lines = resumed(9, history)
        assert [other.train[index]["tokens"][0] for index in (4, 5, 9)] == [0, 1, 5]  # type: ignore[index]
        change = "mine is read from its beginning, because its text has changed"
        assert lines[0] == f" > the training data changes after 4 samples: {change}"
        # Back to the first data set, which continues where it ended.
        later = ReadCounter(other.history, other.train, order).history_at(6)  # type: ignore[arg-type]
        monkeypatch.setattr(registry, "_REGISTERED", {})
        register(Items(*([number, number] for number in range(8))))
        again, _ = build("", TrainState(iteration=3, consumed_train_samples=6, train_data=later.to_dict()))
        assert [again.train[index]["tokens"][0] for index in (6, 9)] == [4, 7]  # type: ignore[index]


def test_a_data_set_may_have_its_own_splits(register: Callable[[Any], None]) -> None:
    register((Items([1, 2]), Items([3, 4])))
    splits, _ = build()
    assert [int(part[0]["tokens"][0]) for part in (splits.train, splits.valid)] == [1, 3]  # type: ignore[index]
    assert splits.test is None
    with pytest.raises(ConfigurationError, match="--split 1,1,0 has no effect: data set mine has its own training"):
        build("--split 1,1,0")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Endless(), "data set mine is Endless; a map-style data set is expected, with __len__ and __getitem__"),
        (Items(), "data set mine is empty"),
        ((Items([1]),) * 4, "data set mine: 4 data sets were returned"),
    ],
)
def test_what_is_no_map_style_data_set_is_rejected(register: Callable[[Any], None], made: Any, message: str) -> None:
    register(made)
    with pytest.raises(ConfigurationError, match=message):
        build()


def test_flags_of_data_files_are_rejected(register: Callable[[Any], None]) -> None:
    register(Items([1]))
    for flags, message in (
        ("--mock-data", "--mock-data and --dataset mine exclude each other"),
        ("--fim-rate 0.5", "--fim-rate needs text, but --dataset mine has none"),
        ("--data-cache-path d", "--data-cache-path d has no effect with --dataset mine"),
        ("--dataloader-type external", "--dataloader-type external and --dataset mine exclude each other"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            config_of(flags)


def test_a_name_that_exists_is_rejected(register: Callable[[Any], None]) -> None:
    register(Items([1]))
    for name, message in (("mine", "already registered"), ("MMAP", "built in")):
        with pytest.raises(ConfigurationError, match=f"data set {name} is {message}"):
            extending.register_dataset(name, lambda config, tokenizer: Items([1]))
