"""Micro-batches in memory: what is laid out, in which types, and what comes out again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.datasets.batch import Batch, BatchContents, BatchLayout
from megatron.core.datasets.gpt_dataset import GPTSample, MockGPTDataset
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.errors import DataError

LENGTH, ROWS = 24, 3
RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
EVERYTHING = BatchContents(position_ids=True, document_ids=True)


def make_samples(**options: object) -> list[GPTSample]:
    values = {"sequence_length": LENGTH, "mock": True, "vocab_size": 61, "eod_token_id": 60} | options
    dataset = MockGPTDataset(40, "train", GPTDatasetConfig(**values))  # type: ignore[arg-type]
    return [dataset[index] for index in (3, 1, 2)]


def pack(layout: BatchLayout, samples: list[GPTSample]) -> torch.Tensor:
    memory = torch.full((layout.num_bytes,), 173, dtype=torch.uint8)
    writer = layout.writer(memory.numpy())
    for row, sample in enumerate(samples):
        writer.write(row, sample)
    return memory


def assert_equals(tensor: torch.Tensor | None, samples: list[GPTSample], name: str, positions: list[int]) -> None:
    assert tensor is not None
    whole = np.stack([sample[name] for sample in samples])  # type: ignore[literal-required]
    assert tensor.tolist() == whole[:, positions].tolist()
    assert tensor.dtype == (torch.float32 if name == "loss_mask" else torch.int64)


@pytest.mark.parametrize("vocab_size", [61, 1 << 16, (1 << 16) + 1, None])
@pytest.mark.parametrize(
    "parts", [None, (slice(0, 6), slice(18, 24)), (slice(6, 12), slice(12, 18))], ids=["whole", "ends", "middle"]
)
def test_what_was_packed_comes_out(vocab_size: int | None, parts: tuple[slice, ...] | None) -> None:
    samples = make_samples(**RESETS)
    layout = BatchLayout(EVERYTHING, ROWS, LENGTH, vocab_size, parts)
    batch = layout.unpack(pack(layout, samples))
    held = list(range(LENGTH)) if parts is None else [i for part in parts for i in range(part.start, part.stop)]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert_equals(getattr(batch, name), samples, name, held)
    assert_equals(batch.document_ids, samples, "document_ids", list(range(LENGTH)))
    # Of the whole sequences, whatever part of them is held.
    assert batch.num_tokens is not None
    assert batch.num_tokens.item() == sum(int(sample["loss_mask"].sum()) for sample in samples)
    assert 0 < batch.num_tokens.item() < ROWS * LENGTH
    token = 2 if vocab_size is not None and vocab_size <= 1 << 16 else 4
    positions = ROWS * len(held)
    assert layout.num_bytes == 8 + positions * (2 * token + 2 + 1) + ROWS * LENGTH * 2


def test_padding_is_that_of_whole_sequences_and_a_sample_need_not_have_any() -> None:
    samples = make_samples()
    samples[1]["padding_mask"] = np.arange(LENGTH) >= 5
    layout = BatchLayout(BatchContents(padding_mask=True), ROWS, LENGTH, 61, (slice(0, 6), slice(18, 24)))
    batch = layout.unpack(pack(layout, samples))
    assert batch.padding_mask is not None
    assert batch.padding_mask.dtype == torch.bool
    assert batch.padding_mask.shape == (ROWS, LENGTH)
    assert batch.padding_mask.sum(dim=1).tolist() == [0, LENGTH - 5, 0]
    assert not batch.padding_mask[1, :5].any()
    samples[2]["padding_mask"] = np.full(LENGTH, 2)
    with pytest.raises(DataError, match="the padding mask contains values other than 0 and 1"):
        pack(layout, samples)


def test_the_largest_tokens_are_not_changed() -> None:
    for vocab_size in (1 << 16, 1 << 31):
        (sample, *_) = make_samples()
        sample["tokens"] = np.full(LENGTH, vocab_size - 1)
        layout = BatchLayout(BatchContents(), 1, LENGTH, vocab_size)
        tokens = layout.unpack(pack(layout, [sample])).tokens
        assert tokens is not None
        assert tokens.unique().tolist() == [vocab_size - 1]


@pytest.mark.parametrize(
    ("contents", "names", "num_bytes"),
    [
        (BatchContents(labels=False), {"tokens"}, 2 * 72),
        (BatchContents(tokens=False), {"labels", "loss_mask", "num_tokens"}, 8 + 3 * 72),
        (BatchContents(tokens=False, labels=False, document_ids=True), {"document_ids"}, 2 * 72),
        (BatchContents(tokens=False, labels=False, padding_mask=True), {"padding_mask"}, 72),
        (BatchContents(tokens=False, labels=False), set(), 0),
    ],
)
def test_a_stage_holds_what_it_uses(contents: BatchContents, names: set[str], num_bytes: int) -> None:
    layout = BatchLayout(contents, ROWS, LENGTH, 61)
    batch = layout.unpack(pack(layout, make_samples(**RESETS)))
    assert {name for name, value in vars(batch).items() if value is not None} == names
    assert layout.num_bytes == num_bytes


def test_positions_stand_in_where_none_were_packed() -> None:
    given = torch.arange(LENGTH).expand(ROWS, -1)
    for contents, expected in ((BatchContents(), given), (EVERYTHING, None)):
        layout = BatchLayout(contents, ROWS, LENGTH, 61)
        samples = make_samples(**RESETS)
        positions = layout.unpack(pack(layout, samples), given).position_ids
        if expected is None:
            assert_equals(positions, samples, "position_ids", list(range(LENGTH)))
        else:
            assert positions is expected


def test_a_batch_is_its_own_memory() -> None:
    samples = make_samples()
    layout = BatchLayout(BatchContents(), ROWS, LENGTH, 61)
    memory = pack(layout, samples)
    batch = layout.unpack(memory)
    assert batch.loss_mask is not None
    batch.loss_mask[0, 0] = 0.5
    assert samples[0]["loss_mask"][0] == 1.0
    assert layout.unpack(memory).loss_mask is not batch.loss_mask


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss_mask", 0.5, "the loss mask contains values other than 0 and 1"),
        ("loss_mask", 2.0, "the loss mask contains values other than 0 and 1"),
        ("position_ids", 24, "position 24 is out of range for a sequence of 24 tokens"),
        ("position_ids", -1, "position -1 is out of range for a sequence of 24 tokens"),
        ("document_ids", 24, "document 24 is out of range for a sequence of 24 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: float, message: str) -> None:
    samples = make_samples(**RESETS)
    changed = samples[1][name].copy()  # type: ignore[literal-required]
    changed[5] = value
    samples[1][name] = changed  # type: ignore[literal-required]
    with pytest.raises(DataError, match=message):
        pack(BatchLayout(EVERYTHING, ROWS, LENGTH, 61), samples)


def test_a_batch_has_nothing_unless_told() -> None:
    assert set(vars(Batch()).values()) == {None}


@pytest.mark.parametrize("vocab_size", [61, None])
@pytest.mark.parametrize("rows", [1, 3])
def test_any_mix_of_widths_is_laid_out_where_it_can_be_read(vocab_size: int | None, rows: int) -> None:
    contents = BatchContents(position_ids=True, document_ids=True, data_sets=True, padding_mask=True)
    layout = BatchLayout(contents, rows, LENGTH, vocab_size, (slice(3, 4), slice(5, 9)))
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    writer = layout.writer(memory.numpy())
    samples = make_samples(**RESETS)[:rows]
    for row, sample in enumerate(samples):
        writer.write(row, sample)
    writer.write_data_sets(np.array([5, 65535, 0][:rows]))
    batch = layout.unpack(memory)
    assert_equals(batch.tokens, samples, "tokens", [3, 5, 6, 7, 8])
    assert_equals(batch.document_ids, samples, "document_ids", list(range(LENGTH)))
    assert batch.data_sets is not None
    assert batch.data_sets.tolist() == [5, 65535, 0][:rows]


def test_data_sets_are_written_where_they_are_wanted_alone() -> None:
    layout = BatchLayout(BatchContents(), ROWS, LENGTH, 61)
    memory = pack(layout, make_samples())
    before = memory.clone()
    layout.writer(memory.numpy()).write_data_sets(np.array([1, 2, 3]))
    assert torch.equal(memory[8:], before[8:])
