"""Data of a training or an evaluation, given as files, texts, tokens or a data set, as flags of the command line."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.config import DataConfig, RunConfig
from megatron.core.datasets import (
    DatasetSplits,
    ExternalSamples,
    GPTSample,
    IndexedDatasetBuilder,
    SampleDataset,
    bin_path,
    idx_path,
    optimal_dtype,
)
from megatron.core.errors import ConfigurationError, DataError
from megatron.core.tokenizers import Tokenizer
from megatron.training import IGNORED_LABEL, DatasetsProvider, SampleTargets, provide_datasets

SOURCES = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "train_data",
    "valid_data",
    "test_data",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
)
"""Fields that name data, which data in Python replaces."""
_ACCEPTED = (
    "a prefix of token files (.bin and .idx) or a folder with one, a file of text or jsonl, a list of texts, a NumPy "
    "array or torch tensor of tokens (one document, or a document per row), a list of these, or a data set with "
    "__len__ and __getitem__"
)
_LONGEST_NAME = 200
"""Characters of missing data that a message shows: it may be a whole text."""


@dataclass(frozen=True, eq=False)
class DataFlags:
    """Flags that name the data, and the function that provides the data sets."""

    values: Mapping[str, Any] = field(default_factory=dict)
    provider: DatasetsProvider = provide_datasets


def flags_of_data(data: object, tokenizer: Tokenizer, options: DataConfig, caller: str) -> DataFlags:
    """Return the flags for data in Python. Texts and tokens are written to ``data_cache_path`` as token files first.

    Without this folder, the files are in a temporary folder, which is removed when the process ends.

    Raises:
        ConfigurationError: the data is none of the accepted kinds.
        InputError: a file cannot be read, or a text cannot be encoded.
    """
    if isinstance(data, str | os.PathLike):
        return _flags_of_path(Path(data), options, caller)
    if isinstance(data, np.ndarray | torch.Tensor | list | tuple):
        if options.sft:
            raise ConfigurationError(
                f"{caller}: texts and tokens are no conversations, which sft needs; pass a .jsonl file of "
                "conversations, token files of megatron preprocess --sft, or a data set whose items have a loss_mask"
            )
        documents = (
            _documents_of_list(data, tokenizer, caller)
            if isinstance(data, list | tuple)
            else _documents_of_array(data, caller)
        )
        return _write(documents, tokenizer, options.data_cache_path)
    if isinstance(data, ExternalSamples):
        return DataFlags({"dataloader_type": "external"}, _provider_of(data))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return DataFlags({"dataloader_type": "cyclic"}, _provider_of(Samples(data)))
    raise ConfigurationError(f"{caller}: data has the type {type(data).__name__}; pass {_ACCEPTED}")


def _flags_of_path(path: Path, options: DataConfig, caller: str) -> DataFlags:
    # These functions of os.path also answer for a text that is too long for the name of a file.
    if os.path.isfile(path) and path.suffix not in (".bin", ".idx"):
        # Conversations are read from their file as they are, and text is tokenized first.
        return DataFlags({"data_path" if options.sft else "train_data": [str(path)]})
    prefix = str(path.with_suffix("")) if path.suffix in (".bin", ".idx") else str(path)
    if os.path.isdir(path):
        found = sorted(each.with_suffix("") for each in path.glob("*.idx"))
        if len(found) != 1:
            names = ", ".join(each.name for each in found) or "none"
            raise ConfigurationError(
                f"{caller}: the folder {path} must contain one data set, but has {names}; pass a prefix"
            )
        prefix = str(found[0])
    elif "://" not in str(path) and not os.path.isfile(idx_path(prefix)):
        name = str(path)
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
        raise ConfigurationError(f"{caller}: there is no data {shown}; pass {_ACCEPTED}")
    return DataFlags({"data_path": [prefix]})


def _documents_of_array(data: NDArray[Any] | torch.Tensor, caller: str) -> list[NDArray[Any]]:
    tokens = data.detach().cpu().numpy() if isinstance(data, torch.Tensor) else data
    if tokens.ndim not in (1, 2) or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigurationError(
            f"{caller}: the tokens have the shape {list(tokens.shape)} and the dtype {tokens.dtype}; pass integers of "
            "the shape [tokens], or [documents, tokens]"
        )
    return list(tokens) if tokens.ndim == 2 else [tokens]


def _documents_of_list(data: Sequence[Any], tokenizer: Tokenizer, caller: str) -> list[NDArray[Any]]:
    """Return the tokens of each document; texts get an end-of-document token."""
    if data and all(isinstance(item, str) for item in data):
        end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
        return [np.asarray([*tokens, *end]) for tokens in tokenizer.tokenize_batch(list(data))]
    if data and all(isinstance(item, int | np.integer) for item in data):
        return [np.asarray(data)]
    if data and all(isinstance(item, np.ndarray | torch.Tensor | list | tuple) for item in data):
        arrays = [item if isinstance(item, torch.Tensor) else np.asarray(item) for item in data]
        return [document for array in arrays for document in _documents_of_array(array, caller)]
    kinds = ", ".join(sorted({type(item).__name__ for item in data})) or "nothing"
    raise ConfigurationError(f"{caller}: the list of data contains {kinds}; pass {_ACCEPTED}")


def _write(documents: Sequence[NDArray[Any]], tokenizer: Tokenizer, folder: str | None) -> DataFlags:
    """Write documents as token files, whose name depends on their content, unless the files exist."""
    digest = hashlib.blake2b(digest_size=8)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + np.ascontiguousarray(document, np.int64).tobytes())
    target = _temporary_folder() if folder is None else Path(folder)
    prefix = str(target / f"tokens-{digest.hexdigest()}")
    if not (idx_path(prefix).is_file() and bin_path(prefix).is_file()):
        # Ranks of a node may write the same files at the same time: each is renamed to its name when it is complete.
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"the tokens cannot be written to {target}: {error.strerror}") from error
        with IndexedDatasetBuilder(prefix, optimal_dtype(tokenizer.vocab_size)) as builder:
            for document in documents:
                builder.add_document(document)
            builder.finalize()
    return DataFlags({"data_path": [prefix]})


@functools.cache
def _temporary_folder() -> Path:
    """Return the folder of this process for token files."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of a caller's data set: tokens ``[sequence_length + 1]``, or a dict of a sample's arrays.

    The label -100 is excluded from the loss.

    Raises:
        DataError: a sample is neither.
    """

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def source_of(self, index: int) -> str:
        """Return the name of the data set in messages."""
        return f"sample {index} of {type(self.dataset).__name__}"

    def __getitem__(self, index: int) -> GPTSample:
        found = self.dataset[index]
        if isinstance(found, Mapping):
            sample = {name: np.asarray(value) for name, value in found.items()}
            if not {"tokens", "labels"} <= sample.keys():
                raise DataError(f"{self.source_of(index)} has the keys {', '.join(sample)}; it needs tokens and labels")
        else:
            text = np.asarray(found)
            if text.ndim != 1 or not np.issubdtype(text.dtype, np.integer):
                raise DataError(
                    f"{self.source_of(index)} has the shape {list(text.shape)} and the dtype {text.dtype}; return "
                    "seq_length + 1 tokens, or a dict with tokens and labels"
                )
            sample = {"tokens": text[:-1], "labels": text[1:]}
        length = len(sample["tokens"])
        sample.setdefault("loss_mask", np.ones(length, np.float32))
        is_ignored = sample["labels"] == IGNORED_LABEL
        if is_ignored.any():
            sample["labels"] = np.where(is_ignored, 0, sample["labels"])
            sample["loss_mask"] = np.where(is_ignored, 0, sample["loss_mask"]).astype(np.float32)
        sample.setdefault("position_ids", np.arange(length, dtype=np.int64))
        return sample  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class _Provided:
    """Builder of data sets that exist already."""

    dataset: SampleDataset | ExternalSamples
    options: DataConfig

    def check(self) -> None:
        """Check the first sample of the data set.

        Raises:
            DataError: it has the wrong length, or lacks its documents, or there is none.
        """
        if not isinstance(self.dataset, Samples):
            return
        if not len(self.dataset):
            raise DataError("the data set has no samples; pass one with at least one sample")
        sample, length = self.dataset[0], self.options.seq_length
        found = len(sample["tokens"])
        if found != length:
            raise DataError(
                f"{self.dataset.source_of(0)} has {found} tokens with a label, but seq_length is {length}; return "
                f"{length + 1} tokens, or a dict with {length} tokens and {length} labels"
            )
        if self.options.reset_attention_mask and "document_ids" not in sample:
            raise DataError(
                f"{self.dataset.source_of(0)} has no document_ids, which reset_attention_mask needs; return the number "
                "of each token's document, or turn reset_attention_mask off (with sft: sft_packing=False)"
            )

    def build(self) -> DatasetSplits:
        """Return the data set as training data."""
        return DatasetSplits(self.dataset, None, None)


def _provider_of(dataset: SampleDataset | ExternalSamples) -> DatasetsProvider:
    def provide(
        config: RunConfig, tokenizer: Tokenizer, targets: SampleTargets, report: Callable[[str], None]
    ) -> _Provided:
        return _Provided(dataset, config.data)

    return provide
