"""Read the samples of a micro-batch, and name the one that cannot be read."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.samples.batch import BatchLayout
from megatron.core.datasets.samples.data_samplers import PADDING_ID
from megatron.core.datasets.samples.gpt_dataset import GPTSample, SampleDataset, token_range_error
from megatron.core.errors import DataError, MegatronError


@dataclass(frozen=True)
class MicroBatchReader:
    """Read the samples of a micro-batch into memory, check their token ids, and lay them out as a rank needs them.

    `PADDING_ID` gives a sample that is padding, whose loss mask is 0. Any number of threads may read at a time where
    the data set allows it; ours do. ``data_sets_of`` returns the place in a blend of each sample's data set, which is
    laid out too.
    """

    dataset: SampleDataset
    layout: BatchLayout
    vocab_size: int
    data_sets_of: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None

    def read(self, sample_ids: Sequence[int], memory: NDArray[np.uint8]) -> None:
        """Fill ``layout.num_bytes`` of memory.

        Raises:
            DataError: a sample cannot be read, or has a token id that is not in the vocabulary; the message names the
                sample and where it comes from.
        """
        writer = self.layout.writer(memory)
        for row, sample_id in enumerate(sample_ids):
            try:
                sample = self._sample(sample_id)
                outside = find_outside(self.vocab_size, sample["tokens"], sample["labels"])
                if outside is not None:
                    raise token_range_error(self._source_of(sample_id), *outside, self.vocab_size)
                writer.write(row, sample)
            except Exception as error:
                raise named_error(error, self._describe(sample_id)) from error
        if self.data_sets_of is not None:
            writer.write_data_sets(self.data_sets_of(np.array(sample_ids, np.int64)))

    def _sample(self, sample_id: int) -> GPTSample:
        if sample_id != PADDING_ID:
            return self.dataset[sample_id]
        sample = self.dataset[0]
        sample["loss_mask"] = np.zeros_like(sample["loss_mask"])
        sample["padding_mask"] = np.ones(len(sample["tokens"]), np.bool_)
        return sample

    def _source_of(self, sample_id: int) -> str:
        return self.dataset.source_of(0 if sample_id == PADDING_ID else sample_id)

    def _describe(self, sample_id: int) -> str:
        try:
            return f"sample {sample_id} from {self._source_of(sample_id)}"
        except Exception:  # noqa: BLE001 what would say so is what is damaged; the first error is the one to report
            return f"sample {sample_id}"


def find_outside(vocab_size: int, *tokens: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return the smallest and the largest token where the vocabulary does not have both."""
    smallest = min(int(array.min()) for array in tokens)
    largest = max(int(array.max()) for array in tokens)
    return None if 0 <= smallest <= largest < vocab_size else (smallest, largest)


def named_error(error: Exception, name: str) -> DataError:
    """Return an error of a sample in one line that says which sample it was."""
    said = " ".join(str(error).split())
    if isinstance(error, MegatronError | OSError):
        return DataError(f"{name}: {said}")
    # A fault in a program rather than in the data: its place stands in for a traceback.
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}, line {place.lineno}"
    return DataError(f"{name}: reading it failed with {type(error).__name__}: {said} ({where})")
