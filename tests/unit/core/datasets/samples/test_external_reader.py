"""Reading micro-batches that the caller makes: what is refused, and how it is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from megatron.core.datasets.batch import Batch, BatchContents, BatchLayout
from megatron.core.datasets.gpt_dataset import GPTSample
from megatron.core.datasets.micro_batch_reader import ExternalReader
from megatron.core.errors import DataError

LENGTH, VOCABULARY = 16, 90


def made_sample(first: int = 0, **others: object) -> GPTSample:
    sample = {
        "tokens": np.arange(first, first + LENGTH),
        "labels": np.zeros(LENGTH, np.int64),
        "loss_mask": np.ones(LENGTH, np.float32),
        "position_ids": np.arange(LENGTH),
    }
    return {name: value for name, value in (sample | others).items() if value is not None}  # type: ignore[return-value]


def read(microbatches: Iterator[Sequence[GPTSample]], resets: bool = False) -> Iterator[Batch]:
    layout = BatchLayout(BatchContents(position_ids=resets, document_ids=resets), 2, LENGTH, VOCABULARY)
    reader = ExternalReader(microbatches, layout, VOCABULARY, reset_position_ids=resets, reset_attention_mask=resets)
    while True:
        memory = torch.full((layout.num_bytes,), 173, dtype=torch.uint8)
        reader.read(memory.numpy())
        yield layout.unpack(memory)


def test_micro_batches_come_in_the_callers_order_and_the_run_says_where_they_end() -> None:
    batches = read(iter([[made_sample(3), made_sample(5)], [made_sample(7), made_sample(9, position_ids=None)]]))
    for first in (3, 7):
        tokens = next(batches).tokens
        assert tokens is not None
        assert tokens[:, 0].tolist() == [first, first + 2]
    with pytest.raises(DataError, match=r"^the caller makes 2 micro-batches for this rank, and the run reads more$"):
        next(batches)


def test_samples_may_have_positions_and_documents_where_the_run_resets_them() -> None:
    documents = np.arange(LENGTH) // 5
    sample = made_sample(position_ids=np.arange(LENGTH) % 5, document_ids=documents)
    batch = next(read(iter([[sample, sample]]), resets=True))
    assert batch.position_ids is not None
    assert batch.position_ids[1].tolist() == (np.arange(LENGTH) % 5).tolist()
    assert batch.document_ids is not None
    assert batch.document_ids[1].tolist() == documents.tolist()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (made_sample(VOCABULARY - LENGTH + 1), "it holds token id 90, but the vocabulary has 90 ids"),
        (made_sample(-1), "it holds token id -1, but the vocabulary has 90 ids"),
        (made_sample(loss_mask=np.full(LENGTH, 0.25)), "the loss mask has other values than 0 and 1"),
        (made_sample(labels=None, loss_mask=None), "it has no labels, loss_mask$"),
        (made_sample(tokens=np.arange(17)), r"its tokens have the shape \(17,\), not \(16,\)$"),
        (made_sample(position_ids=np.arange(1, 17)), "its position_ids are not 0, 1, ...; others need --reset-posi"),
        (made_sample(document_ids=np.zeros(LENGTH, int)), "it has document_ids, which need --reset-attention-mask$"),
    ],
)
def test_samples_are_named_by_their_place(wrong: GPTSample, reason: str) -> None:
    batches = read(iter([[made_sample(), made_sample()], [made_sample(), wrong]]))
    next(batches)
    with pytest.raises(DataError, match=f"^sample 1 of micro-batch 1 that the caller makes: {reason}"):
        next(batches)


def test_documents_that_the_run_attends_inside_must_be_there() -> None:
    with pytest.raises(DataError, match=r"^sample 0 of micro-batch 0 that the caller makes: it has no document_ids$"):
        next(read(iter([[made_sample(), made_sample()]]), resets=True))


def test_micro_batches_of_another_size_are_refused() -> None:
    reason = "^micro-batch 0 that the caller makes has 1 samples; --micro-batch-size is 2$"
    with pytest.raises(DataError, match=reason):
        next(read(iter([[made_sample()]])))


def test_errors_of_the_callers_program_are_named_in_one_line() -> None:
    def make() -> Iterator[list[GPTSample]]:
        yield [made_sample(), made_sample()]
        raise KeyError("no such shard")

    batches = read(make())
    next(batches)
    reason = "^micro-batch 1 that the caller makes: reading it failed with KeyError: 'no such shard' .*, line "
    with pytest.raises(DataError, match=reason):
        next(batches)
