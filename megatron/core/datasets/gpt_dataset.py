"""GPT data set: split shuffled documents into samples of equal length, or generate mock samples."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.datasets.index_builder import (
    IndexBuilder,
    count_samples,
    plan_epochs,
    sample_index_dtype,
    shuffle_index_dtype,
)
from megatron.core.datasets.index_cache import IndexCache, find_damage
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.errors import DataError


class GPTSample(TypedDict, total=False):
    """One training sample; all arrays have shape ``[sequence_length]``.

    ``document_ids`` (0, 1, … from the start of the sample) is present only with ``reset_attention_mask``.
    ``padding_mask`` is True for positions that hold no token of the data. It may be absent if there is no padding.
    A token that is masked out of the loss is not padding.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    padding_mask: NDArray[np.bool_]


class SampleDataset(Protocol):
    """Indexable data set of samples. ``source_of`` names the origin of a sample for messages."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> GPTSample: ...

    def source_of(self, index: int) -> str: ...


@runtime_checkable
class ExternalSamples(Protocol):
    """Source of micro-batches in an order that the caller defines.

    For a bitwise resume at any parallelism, the order must be a function of ``consumed_samples``, and each
    data-parallel rank must return its part of it. The first rank of each tensor-parallel group reads, if its pipeline
    stage needs samples. It prefetches a few micro-batches more than the run trains on. Loss masks and padding masks
    hold 0 and 1 only. A sample without padding needs no padding mask. Position ids other than 0, 1, … need
    ``--reset-position-ids``, and ``document_ids`` need ``--reset-attention-mask``.
    """

    def read_microbatches(
        self, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
    ) -> Iterator[Sequence[GPTSample]]:
        """Yield the micro-batches of one data-parallel rank after ``consumed_samples`` samples over all ranks."""
        ...


@dataclass(frozen=True)
class DataUsage:
    """Number of epochs of a data set that the requested samples take."""

    name: str
    num_samples: int | None
    """Requested samples; None requests one epoch."""
    samples_per_epoch: int
    num_epochs: int

    def describe(self) -> str:
        """Return one line with the samples needed, the samples available, and the number of epochs."""
        epochs = "1 epoch" if self.num_epochs == 1 else f"{self.num_epochs} epochs"
        needed = self.samples_per_epoch if self.num_samples is None else self.num_samples
        if not self.samples_per_epoch:
            return f"{self.name}: less than one sample, repeated: need {needed} samples, reading {epochs}"
        return f"{self.name}: need {needed} samples, have {self.samples_per_epoch} in one epoch, reading {epochs}"


class GPTDataset:
    """Samples of ``sequence_length + 1`` tokens, overlapping by one, from shuffled documents.

    ``sequences`` are the sequences of ``indexed_dataset`` in the split ``split_name``. ``num_samples`` determines the
    number of epochs (None: one). The data set has the samples of whole epochs, at least ``num_samples``.

    Raises:
        DataError: samples are requested but there are no tokens, or the index of the data set is damaged.
    """

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        config: GPTDatasetConfig,
        index_builder: IndexBuilder,
        cache: IndexCache,
    ) -> None:
        self.indexed_dataset = indexed_dataset
        self.sequences = sequences
        self.split_name = split_name
        self.config = config
        self._length = config.sequence_length
        self._drop_last = split_name != "valid" or config.drop_last_partial_validation_sequence
        tokens_per_epoch = indexed_dataset.count_tokens(sequences)
        self._plan = plan_epochs(tokens_per_epoch, self._length, num_samples)
        self._num_samples = count_samples(tokens_per_epoch * self._plan.num_epochs, self._length, self._drop_last)
        self.usage = DataUsage(
            f"{split_name} data {indexed_dataset.prefix}",
            num_samples,
            count_samples(tokens_per_epoch, self._length, self._drop_last),
            self._plan.num_epochs,
        )
        self._computed_s: dict[str, float] = {}
        self._indices = cache.load_or_build(
            f"GPTDataset-{split_name}",
            ("document_index", "sample_index", "shuffle_index"),
            self._describe_index(fingerprint_lengths(indexed_dataset, cache)),
            lambda: self._build_index(index_builder),
            self._find_damage,
        )
        self._positions = np.arange(self._length, dtype=np.int64)
        self._all_ones = np.ones(self._length, np.float32)
        self._positions.flags.writeable = self._all_ones.flags.writeable = False

    def _describe_index(self, lengths_fingerprint: str) -> dict[str, Any]:
        """Return everything that the index arrays depend on, and nothing else.

        The arrays depend neither on the tokens, nor on the location of the files, nor on options that are applied to a
        sample after it was read.
        """
        return {
            "dataset_name": Path(self.indexed_dataset.prefix).name,
            "dataset_num_sequences": len(self.indexed_dataset),
            "dataset_lengths_blake2b": lengths_fingerprint,
            "first_sequence": self.sequences.start,
            "end_sequence": self.sequences.stop,
            "random_seed": self.config.random_seed,
            "sequence_length": self._length,
            "num_epochs": self._plan.num_epochs,
            "separate_final_epoch": self._plan.separate_final_epoch,
            "num_shuffled_together": self._plan.num_shuffled_together,
            "drop_last_partial_sequence": self._drop_last,
        }

    def _build_index(self, builder: IndexBuilder) -> dict[str, NDArray[Any]]:
        self.indexed_dataset.verify_structure()
        random_state = np.random.RandomState(self.config.random_seed)
        documents = np.arange(self.sequences.start, self.sequences.stop, dtype=np.int32)
        plan = self._plan
        moments = [time.perf_counter()]
        document_index = builder.document_index(documents, plan.num_epochs, random_state, plan.separate_final_epoch)
        moments.append(time.perf_counter())
        sample_index = builder.sample_index(
            self.indexed_dataset.sequence_lengths, document_index, self._length, self._num_samples
        )
        moments.append(time.perf_counter())
        shuffle_index = builder.shuffle_index(self.num_shuffled_together, self._num_samples, random_state)
        moments.append(time.perf_counter())
        arrays = {
            "document_index": document_index,
            "sample_index": sample_index,
            "shuffle_index": shuffle_index,
        }
        self._computed_s = {name: end - begin for name, begin, end in zip(arrays, moments, moments[1:])}
        return arrays

    def _find_damage(self, arrays: Mapping[str, NDArray[Any]]) -> str | None:
        num_documents = len(self.sequences) * self._plan.num_epochs
        return find_damage(
            arrays,
            {
                "document_index": ((num_documents,), np.dtype(np.int32)),
                "sample_index": ((self._num_samples + 1, 2), sample_index_dtype(num_documents)),
                "shuffle_index": ((self._num_samples,), shuffle_index_dtype(self._num_samples)),
            },
        )

    @property
    def document_index(self) -> NDArray[np.int32]:
        """Sequence numbers in reading order, epoch after epoch."""
        return self._indices["document_index"]

    @property
    def sample_index(self) -> NDArray[Any]:
        """Start of each sample: a position in `document_index` and a token offset; ``[len + 1, 2]``."""
        return self._indices["sample_index"]

    @property
    def shuffle_index(self) -> NDArray[Any]:
        """Unshuffled sample of each index, ``[len]``."""
        return self._indices["shuffle_index"]

    @property
    def num_shuffled_together(self) -> int:
        """Number of samples before those of a last epoch that is shuffled separately, or all samples."""
        together = self._plan.num_shuffled_together
        return self._num_samples if together is None else together

    @property
    def built_s(self) -> Mapping[str, float]:
        """Seconds that building and writing each array took; empty if the index was found in the cache."""
        return {name: written_s + self._computed_s[name] for name, written_s in self._indices.written_s.items()}

    @property
    def opened_s(self) -> float:
        """Seconds that opening the files of the index took."""
        return self._indices.opened_s

    @property
    def index_files(self) -> Mapping[str, Path]:
        """Files of these three arrays by name; empty for an index in memory."""
        return self._indices.files

    def __len__(self) -> int:
        return self._num_samples

    def source_of(self, index: int) -> str:
        """Return the name of the data set; ``index`` is ignored."""
        return self.indexed_dataset.prefix

    def parts_of(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield sequence, start token and end token of each piece of an unshuffled sample's text."""
        (first, offset), (last, end) = (tuple(map(int, place)) for place in self.sample_index[row : row + 2])
        for place in range(first, last + 1):
            sequence = int(self.document_index[place])
            begin = offset if place == first else 0
            stop = end + 1 if place == last else int(self.indexed_dataset.sequence_lengths[sequence])
            if stop > begin:
                yield sequence, begin, stop

    def __getitem__(self, index: int) -> GPTSample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        text = np.empty(self._length + 1, np.int64)
        num_tokens = self._read_text(index, text)
        text[num_tokens:] = 0
        if self.config.fill_in_the_middle is not None:
            num_tokens = self.config.fill_in_the_middle.apply(text, num_tokens, self.config.random_seed, index)
        return make_sample(text, num_tokens, self.config, self._positions, self._all_ones)

    def _read_text(self, index: int, text: NDArray[np.int64]) -> int:
        """Copy the tokens of a sample into ``text`` and return their number."""
        arrays = self._indices.arrays
        documents, samples = arrays["document_index"], arrays["sample_index"]
        row = arrays["shuffle_index"].item(index)
        if not 0 <= row < self._num_samples:
            raise self._damaged_index(index)
        first, offset = samples.item(row, 0), samples.item(row, 1)
        last, end = samples.item(row + 1, 0), samples.item(row + 1, 1) + 1
        if not 0 <= first <= last < len(documents):
            raise self._damaged_index(index)
        filled = 0
        for place in range(first, last + 1):
            begin = offset if place == first else 0
            piece = self.indexed_dataset.get(documents.item(place), begin, end - begin if place == last else None)
            stop = filled + len(piece)
            if stop > len(text):
                raise self._damaged_index(index)
            text[filled:stop] = piece
            filled = stop
        if filled < len(text) and (self._drop_last or row + 1 < self._num_samples):
            raise self._damaged_index(index)
        return filled

    def _damaged_index(self, index: int) -> DataError:
        return DataError(
            f"sample {index} of {self.indexed_dataset.prefix} is out of range: the {self._indices.source} is damaged; "
            "delete it, and the next run rebuilds it"
        )


def fingerprint_lengths(indexed_dataset: IndexedDataset, cache: IndexCache) -> str:
    """Hash the sequence lengths. The hash of an unchanged file comes from the cache."""
    identity = indexed_dataset.index_identity
    if identity is None:
        return indexed_dataset.lengths_fingerprint
    return cache.remember("IndexedDataset-lengths", identity, lambda: indexed_dataset.lengths_fingerprint)


def token_range_error(source: str, smallest: int, largest: int, vocab_size: int) -> DataError:
    """Return the error for token ids outside the vocabulary."""
    return DataError(
        f"{source} contains token id {smallest if smallest < 0 else largest}, but the vocabulary has {vocab_size} ids "
        f"(0 to {vocab_size - 1}); use the tokenizer that the data was written with (--tokenizer-type, --vocab-file, "
        "--tokenizer-model, --vocab-size), or preprocess the text again"
    )


def make_sample(
    text: NDArray[np.int64],
    num_tokens: int,
    config: GPTDatasetConfig,
    positions: NDArray[np.int64],
    all_ones: NDArray[np.float32],
) -> GPTSample:
    """Turn ``sequence_length + 1`` tokens, of which ``num_tokens`` are not padding, into a sample.

    ``positions`` (0, 1, …) and ``all_ones`` are shared by all samples with default values, and are never modified.
    """
    tokens = text[:-1]
    sample: GPTSample = {
        "tokens": tokens,
        "labels": text[1:],
        "loss_mask": all_ones,
        "position_ids": positions,
    }
    by_document = config.eod_mask_loss or config.reset_position_ids or config.reset_attention_mask
    if num_tokens < len(tokens):
        sample["padding_mask"] = np.arange(len(tokens)) >= num_tokens
    is_eod = tokens == config.eod_token_id if by_document and config.eod_token_id is not None else None
    if num_tokens < len(text) or (config.eod_mask_loss and is_eod is not None):
        loss_mask = all_ones.copy()
        loss_mask[max(num_tokens - 1, 0) :] = 0.0
        if config.eod_mask_loss and is_eod is not None:
            loss_mask[is_eod] = 0.0
        sample["loss_mask"] = loss_mask
    if is_eod is not None and (config.reset_position_ids or config.reset_attention_mask):
        # An end-of-document token belongs to the document before it.
        starts = np.zeros(len(tokens), np.int64)
        starts[1:] = is_eod[:-1]
        if config.reset_attention_mask:
            sample["document_ids"] = np.cumsum(starts)
        if config.reset_position_ids:
            sample["position_ids"] = positions - np.maximum.accumulate(positions * starts)
    return sample


class MockGPTDataset:
    """Synthetic samples that a model can learn: every token always has the same successor.

    The sequences follow one cycle through part of the vocabulary. If the tokenizer has an end-of-document token, it
    ends documents of a length that depends on the sample. A sample is a function of (seed, split, index).
    """

    MAX_CYCLE = 1024

    def __init__(self, num_samples: int | None, split_name: str, config: GPTDatasetConfig) -> None:
        self.config = config
        self.split_name = split_name
        self._num_samples = 1024 if num_samples is None else num_samples
        vocab_size = self.MAX_CYCLE if config.vocab_size is None else config.vocab_size
        words = np.arange(min(vocab_size, self.MAX_CYCLE), dtype=np.int64)
        self._cycle = np.random.RandomState(config.random_seed).permutation(words[words != config.eod_token_id])
        if len(self._cycle) == 0:
            raise DataError(f"a vocabulary of {vocab_size} ids has no tokens for mock data; use --vocab-size 2 or more")
        self.usage = DataUsage(f"{split_name} data (mock)", num_samples, self._num_samples, 1)

    def __len__(self) -> int:
        return self._num_samples

    def source_of(self, index: int) -> str:
        """Return the name of the source; ``index`` is ignored."""
        return "mock data"

    def __getitem__(self, index: int) -> GPTSample:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        key = f"{self.config.random_seed}/{self.split_name}/{index}".encode()
        start = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
        steps = np.arange(self.config.sequence_length + 1, dtype=np.int64)
        text = self._cycle[(start + steps) % len(self._cycle)]
        if self.config.eod_token_id is not None:
            document_length = 16 + start % 49
            text[(steps + 1) % document_length == 0] = self.config.eod_token_id
        return make_sample(text, len(text), self.config, steps[:-1], np.ones(len(text) - 1, np.float32))
