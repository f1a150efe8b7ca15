"""Put samples together to the tensors of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.datasets.data_samplers import PADDING_ID
from megatron.core.datasets.gpt_dataset import GPTSample, SampleDataset, token_range_error


@dataclass(frozen=True)
class Batch:
    """The tensors of one micro-batch, all ``[b, s]``.

    Attributes:
        tokens: int64, the input.
        labels: int64, the token that follows each.
        loss_mask: float32, 0 where a position does not count.
        position_ids: int64.
        document_ids: int64, or None where a sample is attended to as a whole. Positions with different ids must not
            attend to each other.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on another device."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return Batch(
            tokens=move(self.tokens),
            labels=move(self.labels),
            loss_mask=move(self.loss_mask),
            position_ids=move(self.position_ids),
            document_ids=None if self.document_ids is None else move(self.document_ids),
        )


def collate(samples: Sequence[GPTSample]) -> Batch:
    """Stack samples to a batch.

    Shapes: b samples of ``[s]`` -> ``[b, s]``.
    """
    with_documents = "document_ids" in samples[0]
    return Batch(
        tokens=_stack([sample["tokens"] for sample in samples]),
        labels=_stack([sample["labels"] for sample in samples]),
        loss_mask=_stack([sample["loss_mask"] for sample in samples]),
        position_ids=_stack([sample["position_ids"] for sample in samples]),
        document_ids=_stack([sample["document_ids"] for sample in samples]) if with_documents else None,
    )


def _stack(arrays: Sequence[NDArray[np.int64]] | Sequence[NDArray[np.float32]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


@dataclass(frozen=True)
class MicroBatchReader:
    """Map the sample ids of a micro-batch to its batch, and check the token ids on the way.

    `PADDING_ID` gives a sample whose loss mask is 0.

    It has the shape of a map-style data set whose keys are lists, so that a ``torch.utils.data.DataLoader`` can run it
    in workers: ``DataLoader(reader, batch_size=None, sampler=MicroBatchSampler(…), collate_fn=keep)``, where ``keep``
    returns its argument.

    Raises:
        DataError: a token id is not in the vocabulary.
    """

    dataset: SampleDataset
    vocab_size: int | None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample_ids: Sequence[int]) -> Batch:
        samples = [self.dataset[sample_id] if sample_id != PADDING_ID else self._padding() for sample_id in sample_ids]
        if self.vocab_size is not None:
            for sample_id, sample in zip(sample_ids, samples, strict=True):
                self._check_vocabulary(max(sample_id, 0), sample, self.vocab_size)
        return collate(samples)

    def _padding(self) -> GPTSample:
        sample = self.dataset[0]
        sample["loss_mask"] = np.zeros_like(sample["loss_mask"])
        return sample

    def _check_vocabulary(self, sample_id: int, sample: GPTSample, vocab_size: int) -> None:
        # Labels are the tokens one further on: the first token and the labels are the whole sample.
        first, labels = int(sample["tokens"][0]), sample["labels"]
        smallest, largest = min(first, int(labels.min())), max(first, int(labels.max()))
        if smallest < 0 or largest >= vocab_size:
            raise token_range_error(self.dataset.source_of(sample_id), smallest, largest, vocab_size)


def keep(batch: Batch) -> Batch:
    """Return the batch as it is: the ``collate_fn`` of a `DataLoader` over a `MicroBatchReader`."""
    return batch
