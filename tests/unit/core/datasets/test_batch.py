"""Micro-batches: shapes, types, and the check of token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron.core.datasets.batch import Batch, MicroBatchReader, collate, keep
from megatron.core.datasets.blended_dataset_builder import BlendedDatasetBuilder
from megatron.core.datasets.data_samplers import MicroBatchSampler, SampleOrder
from megatron.core.datasets.gpt_dataset import SampleDataset
from megatron.core.datasets.gpt_dataset_config import Blend, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.datasets.mock_gpt_dataset import MockGPTDataset
from megatron.core.errors import DataError


def mock_dataset(**options: object) -> MockGPTDataset:
    values = {"sequence_length": 24, "mock": True, "vocab_size": 61, "eod_token_id": 60} | options
    return MockGPTDataset(40, "train", GPTDatasetConfig(**values))  # type: ignore[arg-type]


def text_dataset(tmp_path: Path) -> SampleDataset:
    prefixes = []
    for name, first in (("low", 1), ("high", 500)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            builder.add_document(np.arange(first, first + 200))
            builder.finalize()
        prefixes.append(str(tmp_path / name))
    config = GPTDatasetConfig(sequence_length=16, blend=Blend(tuple(prefixes), (1.0, 1.0)), split="1")
    train = BlendedDatasetBuilder(config, (20, 0, 0), lambda line: None).build().train
    assert train is not None
    return train


def test_collated_tensors() -> None:
    dataset = mock_dataset()
    samples = [dataset[i] for i in (3, 1, 2)]
    batch = collate(samples)
    for name in ("tokens", "labels", "position_ids"):
        tensor = getattr(batch, name)
        assert (tensor.dtype, tensor.shape) == (torch.int64, (3, 24))
        assert tensor.tolist() == [sample[name].tolist() for sample in samples]  # type: ignore[literal-required]
    assert (batch.loss_mask.dtype, batch.loss_mask.shape) == (torch.float32, (3, 24))
    assert batch.document_ids is None
    batch.loss_mask[0, 0] = 0.5  # a batch is its own memory, not the arrays that samples share
    assert dataset[3]["loss_mask"][0] == 1.0


def test_document_ids_follow_the_reset_of_the_mask() -> None:
    dataset = mock_dataset(reset_attention_mask=True)
    batch = collate([dataset[i] for i in range(5)])
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [dataset[i]["document_ids"].tolist() for i in range(5)]
    assert int(batch.document_ids.max()) > 0


@pytest.mark.parametrize("resets", [False, True])
def test_moving_keeps_the_values(resets: bool) -> None:
    batch = collate([mock_dataset(reset_attention_mask=resets)[i] for i in range(2)])
    moved = batch.to(torch.device("meta"))
    assert moved.tokens.device.type == "meta"
    assert (moved.document_ids is None) == (not resets)
    assert torch.equal(batch.to(torch.device("cpu")).labels, batch.labels)


def test_token_ids_beyond_the_vocabulary_name_their_data_set(tmp_path: Path) -> None:
    dataset = text_dataset(tmp_path)
    sources = [dataset.source_of(i) for i in range(20)]
    low, high = sources.index(str(tmp_path / "low")), sources.index(str(tmp_path / "high"))
    reader = MicroBatchReader(dataset, 300)
    assert reader[[low]].tokens.shape == (1, 16)
    largest = int(dataset[high]["labels"].max())
    with pytest.raises(DataError) as caught:
        reader[[low, high]]
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'high'} holds token id {largest}, but the vocabulary has 300 ids")
    assert "--tokenizer-type" in text
    assert "\n" not in text
    assert MicroBatchReader(dataset, None)[[low, high]].tokens.shape == (2, 16)


def test_the_last_label_is_checked_too(tmp_path: Path) -> None:
    dataset = text_dataset(tmp_path)
    sample = next(i for i in range(20) if dataset.source_of(i).endswith("low"))
    last_label = int(dataset[sample]["labels"][-1])
    assert MicroBatchReader(dataset, last_label + 1)[[sample]].labels.max() == last_label
    with pytest.raises(DataError, match=f"token id {last_label}"):
        MicroBatchReader(dataset, last_label)[[sample]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_loader_gives_the_batches_of_the_sampler(num_workers: int) -> None:
    reader = MicroBatchReader(mock_dataset(reset_attention_mask=True), 61)
    sampler = MicroBatchSampler(SampleOrder("single", len(reader)), 8, 3, 1, 2)
    loader: DataLoader[Batch] = DataLoader(
        reader,  # type: ignore[arg-type]
        batch_size=None,
        sampler=sampler,  # type: ignore[arg-type]
        collate_fn=keep,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    batches = list(loader)
    assert len(batches) == 5
    for batch, sample_ids in zip(batches, sampler, strict=True):
        assert torch.equal(batch.tokens, reader[sample_ids].tokens)
        assert batch.document_ids is not None
