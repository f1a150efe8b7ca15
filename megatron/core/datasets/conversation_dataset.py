"""Data set for supervised fine-tuning (SFT): pack whole conversations into samples, with a loss on answers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.conversation_file import ConversationFile
from megatron.core.datasets.gpt_dataset import DataUsage, GPTDataset, GPTSample, fingerprint_lengths
from megatron.core.datasets.gpt_dataset_config import GPTDatasetConfig
from megatron.core.datasets.index_builder import shuffle_index_dtype
from megatron.core.datasets.index_cache import IndexArrays, IndexCache
from megatron.core.errors import DataError


def pack_conversations(
    lengths: NDArray[np.int32], room: int, random_state: np.random.RandomState, *, together: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the conversations in the order of their samples, and the start of each sample in that order.

    ``together`` packs by best-fit decreasing: in order of length, each conversation goes to the sample with the least
    free space that fits it. ``random_state`` orders conversations of equal length. Empty conversations are left out.

    Shapes: lengths ``[n]``, at most ``room`` each -> ``[m]``, ``[samples + 1]``; ``m = n`` if none is empty.
    """
    order = random_state.permutation(len(lengths))
    order = order[lengths[order] > 0]
    if not together:
        return order, np.arange(len(order) + 1)
    longest_first = order[np.argsort(-lengths[order], kind="stable")]
    samples: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(room + 1)]
    open_rooms = 0  # bit r is set if some sample has r free positions
    for conversation, length in zip(longest_first.tolist(), lengths[longest_first].tolist()):
        fitting = open_rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            sample = by_room[left].pop()
            if not by_room[left]:
                open_rooms ^= 1 << left
            samples[sample].append(conversation)
        else:
            left, sample = room, len(samples)
            samples.append([conversation])
        left -= length
        if left:
            if not by_room[left]:
                open_rooms |= 1 << left
            by_room[left].append(sample)
    return _flatten(samples)


def _flatten(samples: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    starts = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return np.array([conversation for sample in samples for conversation in sample], np.int64), starts


class PackedConversations:
    """Assignment of conversations to the samples of one epoch, stored in the index cache.

    Raises:
        DataError: the conversations hold no tokens.
    """

    def __init__(
        self, conversations: ConversationFile, sequences: range, config: GPTDatasetConfig, cache: IndexCache
    ) -> None:
        assert config.conversations is not None
        self.room = config.sequence_length + 1
        self.longest = min(self.room, (config.conversations.longest or config.sequence_length) + 1)
        together = config.conversations.packs
        self.lengths = conversations.sequence_lengths[sequences.start : sequences.stop]

        def build() -> dict[str, NDArray[Any]]:
            conversations.verify_structure()
            random_state = np.random.RandomState(config.random_seed)
            cut = np.minimum(self.lengths, self.longest)
            order, starts = pack_conversations(cut, self.room, random_state, together=together)
            return {"conversation_index": order + sequences.start, "sample_index": starts}

        def find_damage(arrays: Mapping[str, NDArray[Any]]) -> str | None:
            order, starts = arrays["conversation_index"], arrays["sample_index"]
            is_whole = order.dtype == starts.dtype == np.int64 and order.ndim == starts.ndim == 1 and len(starts) > 0
            if is_whole and starts[0] == 0 and starts[-1] == len(order) == np.count_nonzero(self.lengths):
                return None
            return "it does not contain these conversations"

        self.arrays: IndexArrays = cache.load_or_build(
            "ConversationDataset",
            ("conversation_index", "sample_index"),
            {
                "dataset_lengths_blake2b": fingerprint_lengths(conversations, cache),
                "first_sequence": sequences.start,
                "end_sequence": sequences.stop,
                "random_seed": config.random_seed,
                "room": self.room,
                "longest": self.longest,
                "together": together,
            },
            build,
            find_damage,
        )
        if not len(self):
            raise DataError(f"{conversations.prefix} contains no tokens; write it again")

    def __len__(self) -> int:
        return len(self.arrays["sample_index"]) - 1

    def describe(self) -> str:
        """Describe how full the samples are, and how many conversations are truncated."""
        tokens = int(np.minimum(self.lengths, self.longest).sum(dtype=np.int64))
        line = f"{len(self.lengths)} conversations in {len(self)} samples, {tokens / (len(self) * self.room):.1%} full"
        num_cut = np.count_nonzero(self.lengths > self.longest)
        if num_cut:
            line += f"; {num_cut} conversations are longer than {self.longest} tokens and are truncated"
        return line


class ConversationDataset:
    """Samples of ``sequence_length`` positions that hold whole conversations, followed by padding.

    A conversation is truncated if it is longer than a sample or than ``longest``. It is in one sample per epoch.
    The loss covers positions whose label belongs to an answer of the same conversation. If the configuration requests
    it, position ids restart with each conversation, and each conversation is a document, as is the padding.
    Every epoch has the same samples in a different order.

    Raises:
        DataError: the conversations hold no tokens, or their index is damaged.
    """

    def __init__(
        self,
        conversations: ConversationFile,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        config: GPTDatasetConfig,
        cache: IndexCache,
    ) -> None:
        self.indexed_dataset = conversations
        self.sequences = sequences
        self.config = config
        self.packed = PackedConversations(conversations, sequences, config, cache)
        num_epochs = count_epochs(len(self.packed), num_samples)
        name = f"{split_name} data {conversations.prefix}"
        self.usage = DataUsage(name, num_samples, len(self.packed), num_epochs)
        random_state = np.random.RandomState(config.random_seed)
        dtype = shuffle_index_dtype(num_epochs * len(self.packed))
        epochs = [
            random_state.permutation(len(self.packed)).astype(dtype) + epoch * len(self.packed)
            for epoch in range(num_epochs)
        ]
        self.shuffle_index: NDArray[Any] = np.concatenate(epochs)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def source_of(self, index: int) -> str:
        """Return the name of the data set; ``index`` is ignored."""
        return self.indexed_dataset.prefix

    def parts_of(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yield sequence, start token and end token of each conversation of an unshuffled sample."""
        arrays = self.packed.arrays
        sample = row % len(self.packed)
        begin, end = arrays["sample_index"][sample : sample + 2].tolist()
        for sequence in arrays["conversation_index"][begin:end].tolist():
            yield sequence, 0, min(self.indexed_dataset.sequence_lengths.item(sequence), self.packed.longest)

    def __getitem__(self, index: int) -> GPTSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        room = self.packed.room
        filler = 0 if self.config.eod_token_id is None else self.config.eod_token_id
        text = np.full(room, filler, np.int64)
        counts = np.zeros(room, np.float32)
        documents = np.zeros(room, np.int64)
        positions = np.arange(room)
        filled = 0
        for number, (sequence, _, length) in enumerate(self.parts_of(self.shuffle_index.item(index))):
            place = slice(filled, filled + length)
            if place.stop > room:
                raise DataError(
                    f"sample {index} of {self.indexed_dataset.prefix} is out of range: the {self.packed.arrays.source} "
                    "is damaged; delete it, and the next run rebuilds it"
                )
            text[place] = self.indexed_dataset.get(sequence, 0, length)
            counts[place] = self.indexed_dataset.get_mask(sequence, 0, length) != 0
            counts[filled] = 0.0  # the token before it belongs to another conversation
            documents[filled:] = number
            positions[filled:] = np.arange(room - filled)
            filled = place.stop
        documents[filled:] += 1
        positions[filled:] = np.arange(room - filled)
        return self._sample(filled, text, counts, documents, positions)

    def _sample(
        self,
        num_tokens: int,
        text: NDArray[np.int64],
        counts: NDArray[np.float32],
        documents: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> GPTSample:
        config, tokens, loss_mask = self.config, text[:-1], counts[1:]
        if config.eod_mask_loss:
            loss_mask = np.where(tokens == config.eod_token_id, np.float32(0.0), loss_mask)
        sample: GPTSample = {
            "tokens": tokens,
            "labels": text[1:],
            "loss_mask": loss_mask,
            "position_ids": positions[:-1] if config.reset_position_ids else np.arange(len(tokens)),
            "padding_mask": np.arange(len(tokens)) >= num_tokens,
        }
        if config.reset_attention_mask:
            sample["document_ids"] = documents[:-1]
        return sample


FileSamples = GPTDataset | ConversationDataset
"""Shuffled samples that are read from token files."""


def count_epochs(samples_per_epoch: int, num_samples: int | None) -> int:
    """Return the number of epochs that yield ``num_samples`` samples; 1 if it is None."""
    return 1 if num_samples is None else max(1, -(-num_samples // samples_per_epoch))
