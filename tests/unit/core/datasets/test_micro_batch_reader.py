"""Reading micro-batches, also those that the caller makes: checks of token ids, and errors that name the sample."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.batch import Batch, BatchContents, BatchLayout
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder
from megatron.core.datasets.data_samplers import PADDING_ID
from megatron.core.datasets.gpt_dataset import GPTSample, SampleDataset
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.micro_batch_reader import ExternalReader, MicroBatchReader
from megatron.core.datasets.sample_keys import data_set_numbers
from megatron.core.errors import DataError

LENGTH = 16


def text_dataset(tmp_path: Path, mmap_bin_files: bool = True) -> SampleDataset:
    prefixes = []
    for name, first in (("low", 1), ("high", 500)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            builder.add_document(np.arange(first, first + 200))
            builder.finalize()
        prefixes.append(str(tmp_path / name))
    config = GPTDatasetConfig(
        sequence_length=LENGTH, blend=Blend(tuple(prefixes), (1.0, 1.0)), split="1", mmap_bin_files=mmap_bin_files
    )
    train = BlendedDatasetBuilder(config, (20, 0, 0), lambda line: None).build().train
    assert train is not None
    return train


def read(dataset: SampleDataset, sample_ids: list[int], vocab_size: int = 700) -> torch.Tensor:
    layout = BatchLayout(BatchContents(), len(sample_ids), LENGTH, vocab_size)
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    MicroBatchReader(dataset, layout, vocab_size).read(sample_ids, memory.numpy())
    tokens = layout.unpack(memory).tokens
    assert tokens is not None
    return tokens


def of_file(dataset: SampleDataset, name: str) -> list[int]:
    return [i for i in range(20) if dataset.source_of(i).endswith(name)]


class Broken:
    """A data set of somebody else's, of which sample 7 is broken."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> GPTSample:
        if index == 7:
            raise self.error
        return {
            "tokens": np.arange(LENGTH),
            "labels": np.arange(1, LENGTH + 1),
            "loss_mask": np.ones(LENGTH, np.float32),
            "position_ids": np.arange(LENGTH),
        }

    def source_of(self, index: int) -> str:
        if isinstance(self.error, DataError):
            raise self.error
        return "tape 3"


def test_token_ids_beyond_the_vocabulary_name_the_sample_and_the_file(tmp_path: Path) -> None:
    dataset = text_dataset(tmp_path)
    low, high = of_file(dataset, "low")[0], of_file(dataset, "high")[0]
    assert torch.equal(read(dataset, [low], 300)[0], torch.from_numpy(dataset[low]["tokens"]))
    largest = int(dataset[high]["labels"].max())
    with pytest.raises(DataError) as caught:
        read(dataset, [low, high], 300)
    text = str(caught.value)
    assert text.startswith(f"sample {high} from {tmp_path / 'high'}: ")
    assert f"contains token id {largest}, but the vocabulary has 300 ids" in text
    assert "--tokenizer-type" in text
    assert "\n" not in text
    assert read(dataset, [low, high]).shape == (2, LENGTH)


def test_what_fills_a_micro_batch_counts_nothing(tmp_path: Path) -> None:
    dataset = text_dataset(tmp_path)
    layout = BatchLayout(BatchContents(padding_mask=True), 3, LENGTH, 700)
    memory = np.empty(layout.num_bytes, np.uint8)
    MicroBatchReader(dataset, layout, 700).read([4, PADDING_ID, PADDING_ID], memory)
    batch = layout.unpack(torch.from_numpy(memory))
    assert batch.loss_mask is not None
    assert batch.loss_mask.sum(dim=1).tolist() == [LENGTH, 0, 0]
    assert batch.padding_mask is not None
    assert batch.padding_mask.sum(dim=1).tolist() == [0, LENGTH, LENGTH]
    assert batch.num_tokens is not None
    assert batch.num_tokens.item() == LENGTH
    assert dataset[0]["loss_mask"].all()


def test_the_last_label_is_checked_too(tmp_path: Path) -> None:
    dataset = text_dataset(tmp_path)
    sample = of_file(dataset, "low")[0]
    last_label = int(dataset[sample]["labels"][-1])
    assert read(dataset, [sample], last_label + 1).shape == (1, LENGTH)
    with pytest.raises(DataError, match=f"token id {last_label}"):
        read(dataset, [sample], last_label)


@pytest.mark.parametrize("num_bytes_left", [0, 201])
def test_a_file_that_was_cut_short_since_it_was_opened_is_named(num_bytes_left: int, tmp_path: Path) -> None:
    dataset = text_dataset(tmp_path, mmap_bin_files=False)
    sample = max(of_file(dataset, "high"), key=lambda number: int(dataset[number]["tokens"][0]))
    os.truncate(tmp_path / "high.bin", num_bytes_left)
    prefix = tmp_path / "high"
    reason = (
        f"^sample {sample} from {prefix}: {prefix}.bin shrank below its 400 bytes while it was in use; write it again$"
    )
    with pytest.raises(DataError, match=reason):
        read(dataset, [of_file(dataset, "low")[0], sample])


def test_errors_of_the_system_are_the_users_to_mend() -> None:
    with pytest.raises(DataError, match=r"^sample 7 from tape 3: \[Errno 5\] Input/output error$"):
        read(Broken(OSError(5, "Input/output error")), [3, 7])


def test_errors_that_nobody_foresaw_say_in_one_line_where_they_were_made() -> None:
    with pytest.raises(DataError) as caught:
        read(Broken(ValueError("no text\nin this one")), [3, 7])
    reason = "sample 7 from tape 3: reading it failed with ValueError: no text in this one"
    assert str(caught.value).startswith(f"{reason} ({__file__}, line ")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_damaged_index_does_not_hide_which_sample_it_was() -> None:
    with pytest.raises(DataError, match=r"^sample 7: the blend is damaged$"):
        read(Broken(DataError("the blend is damaged")), [3, 7])


def test_the_data_set_of_each_sample_is_laid_out(tmp_path: Path) -> None:
    dataset = text_dataset(tmp_path)
    layout = BatchLayout(BatchContents(data_sets=True), 3, LENGTH, 700)
    memory = np.empty(layout.num_bytes, np.uint8)
    ids = [of_file(dataset, name)[0] for name in ("high", "low", "high")]
    MicroBatchReader(dataset, layout, 700, partial(data_set_numbers, dataset)).read(ids, memory)
    batch = layout.unpack(torch.from_numpy(memory))
    assert batch.data_sets is not None
    assert batch.data_sets.tolist() == data_set_numbers(dataset, np.array(ids)).tolist()
    assert len(set(batch.data_sets.tolist())) == 2


EXTERNAL_LENGTH, VOCABULARY = 16, 90


def made_sample(first: int = 0, **others: object) -> GPTSample:
    sample = {
        "tokens": np.arange(first, first + EXTERNAL_LENGTH),
        "labels": np.zeros(EXTERNAL_LENGTH, np.int64),
        "loss_mask": np.ones(EXTERNAL_LENGTH, np.float32),
        "position_ids": np.arange(EXTERNAL_LENGTH),
    }
    return {name: value for name, value in (sample | others).items() if value is not None}  # type: ignore[return-value]


def read_external(microbatches: Iterator[Sequence[GPTSample]], resets: bool = False) -> Iterator[Batch]:
    layout = BatchLayout(BatchContents(position_ids=resets, document_ids=resets), 2, EXTERNAL_LENGTH, VOCABULARY)
    reader = ExternalReader(microbatches, layout, VOCABULARY, reset_position_ids=resets, reset_attention_mask=resets)
    while True:
        memory = torch.full((layout.num_bytes,), 173, dtype=torch.uint8)
        reader.read(memory.numpy())
        yield layout.unpack(memory)


def test_micro_batches_come_in_the_callers_order_and_the_run_says_where_they_end() -> None:
    batches = read_external(
        iter([[made_sample(3), made_sample(5)], [made_sample(7), made_sample(9, position_ids=None)]])
    )
    for first in (3, 7):
        tokens = next(batches).tokens
        assert tokens is not None
        assert tokens[:, 0].tolist() == [first, first + 2]
    with pytest.raises(
        DataError, match=r"^the caller's iterator ended after 2 micro-batches on this rank, but the run needs more$"
    ):
        next(batches)


def test_samples_may_have_positions_and_documents_where_the_run_resets_them() -> None:
    documents = np.arange(EXTERNAL_LENGTH) // 5
    sample = made_sample(position_ids=np.arange(EXTERNAL_LENGTH) % 5, document_ids=documents)
    batch = next(read_external(iter([[sample, sample]]), resets=True))
    assert batch.position_ids is not None
    assert batch.position_ids[1].tolist() == (np.arange(EXTERNAL_LENGTH) % 5).tolist()
    assert batch.document_ids is not None
    assert batch.document_ids[1].tolist() == documents.tolist()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (made_sample(VOCABULARY - EXTERNAL_LENGTH + 1), "it contains token id 90, but the vocabulary has 90 ids"),
        (made_sample(-1), "it contains token id -1, but the vocabulary has 90 ids"),
        (made_sample(loss_mask=np.full(EXTERNAL_LENGTH, 0.25)), "the loss mask contains values other than 0 and 1"),
        (made_sample(labels=None, loss_mask=None), "it has no labels, loss_mask$"),
        (made_sample(tokens=np.arange(17)), r"its tokens have shape \(17,\), not \(16,\)$"),
        (
            made_sample(position_ids=np.arange(1, 17)),
            ("its position_ids are not 0, 1, ...; other values require --reset-posi"),
        ),
        (
            made_sample(document_ids=np.zeros(EXTERNAL_LENGTH, int)),
            "it has document_ids, which require --reset-attention-mask$",
        ),
    ],
)
def test_samples_are_named_by_their_place(wrong: GPTSample, reason: str) -> None:
    batches = read_external(iter([[made_sample(), made_sample()], [made_sample(), wrong]]))
    next(batches)
    with pytest.raises(DataError, match=f"^sample 1 of the caller's micro-batch 1: {reason}"):
        next(batches)


def test_documents_that_the_run_attends_inside_must_be_there() -> None:
    with pytest.raises(DataError, match=r"^sample 0 of the caller's micro-batch 0: it has no document_ids$"):
        next(read_external(iter([[made_sample(), made_sample()]]), resets=True))


def test_micro_batches_of_another_size_are_refused() -> None:
    reason = "^the caller's micro-batch 0 has 1 samples, but --micro-batch-size is 2$"
    with pytest.raises(DataError, match=reason):
        next(read_external(iter([[made_sample()]])))


def test_errors_of_the_callers_program_are_named_in_one_line() -> None:
    def make() -> Iterator[list[GPTSample]]:
        yield [made_sample(), made_sample()]
        raise KeyError("no such shard")

    batches = read_external(make())
    next(batches)
    reason = "^the caller's micro-batch 1: reading it failed with KeyError: 'no such shard' .*, line "
    with pytest.raises(DataError, match=reason):
        next(batches)
