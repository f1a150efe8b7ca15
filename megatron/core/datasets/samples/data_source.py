"""One data set of a blend: how it is opened, how many samples it holds, and what makes them."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.datasets.conversations.conversation_file import ConversationFile
from megatron.core.datasets.indexed.indexed_dataset import IndexedDataset
from megatron.core.datasets.indices.index_builder import IndexBuilder, count_samples, plan_epochs
from megatron.core.datasets.indices.index_cache import IndexCache
from megatron.core.datasets.samples.conversation_dataset import (
    ConversationDataset,
    FileSamples,
    PackedConversations,
    count_epochs,
)
from megatron.core.datasets.samples.gpt_dataset import GPTDataset
from megatron.core.datasets.samples.gpt_dataset_config import GPTDatasetConfig


def open_data_set(prefix: str, config: GPTDatasetConfig, report: Callable[[str], None]) -> IndexedDataset:
    """Open what a data path names: token files, or conversations where the configuration asks for them.

    Raises:
        DataError: it cannot be opened.
    """
    if config.conversations is None:
        return IndexedDataset(prefix, config.mmap_bin_files)
    return config.conversations.open(prefix, config.index_folder(prefix), config.mmap_bin_files, report)


def make_samples(
    dataset: IndexedDataset,
    sequences: range,
    num_samples: int | None,
    split_name: str,
    config: GPTDatasetConfig,
    index_builder: IndexBuilder,
    cache: IndexCache,
) -> FileSamples:
    """Return the samples of some sequences: at least ``num_samples``, or those of one epoch."""
    if isinstance(dataset, ConversationFile):
        return ConversationDataset(dataset, sequences, num_samples, split_name, config, cache)
    return GPTDataset(dataset, sequences, num_samples, split_name, config, index_builder, cache)


def count_held(
    dataset: IndexedDataset,
    sequences: range,
    num_samples: int | None,
    config: GPTDatasetConfig,
    cache: IndexCache,
    *,
    drop_last: bool = True,
) -> int:
    """Return how many samples `make_samples` would give, without making them; those of an epoch with None."""
    if isinstance(dataset, ConversationFile):
        per_epoch = len(PackedConversations(dataset, sequences, config, cache))
        return per_epoch * count_epochs(per_epoch, num_samples)
    tokens = dataset.count_tokens(sequences)
    plan = plan_epochs(tokens, config.sequence_length, num_samples)
    return count_samples(tokens * plan.num_epochs, config.sequence_length, drop_last)
