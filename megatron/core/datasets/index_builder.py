"""Build the indices that turn documents into samples and data sets into a blend.

Every function is pure: the same arguments give the same arrays on every rank. `NumpyIndexBuilder` is the reference
implementation. `CompiledIndexBuilder` returns identical arrays faster. `select_index_builder` chooses between them, and
`CountedIndexBuilder` reports the progress of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import DataError

SampleIndex = NDArray[np.int32] | NDArray[np.int64]
BlendIndices = tuple[NDArray[np.int16], NDArray[np.int64]]

SEPARATE_FINAL_EPOCH_BELOW: Final = 0.80
"""Shuffle the last epoch separately if less than this share of it is requested, so that the rest stays unseen."""

_INT32_MAX: Final = int(np.iinfo(np.int32).max)
_UINT32_MAX: Final = int(np.iinfo(np.uint32).max)
_INT16_MAX: Final = int(np.iinfo(np.int16).max)


@dataclass(frozen=True)
class EpochPlan:
    """Number of epochs that the requested samples need, and how the epochs are shuffled."""

    num_epochs: int
    separate_final_epoch: bool
    num_shuffled_together: int | None
    """Samples of the epochs before a separate last epoch. None if all epochs are shuffled together."""


def plan_epochs(tokens_per_epoch: int, sequence_length: int, num_samples: int | None) -> EpochPlan:
    """Plan the epochs that yield ``num_samples`` samples (one epoch if it is None).

    Raises:
        DataError: samples are requested but there are no tokens.
    """
    if num_samples is None or num_samples <= 0:
        return EpochPlan(1, False, None)
    if tokens_per_epoch <= 0:
        raise DataError(f"{num_samples} samples are needed, but the documents contain no tokens")
    num_epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
    if num_epochs == 1:
        return EpochPlan(1, False, None)
    before_final = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
    samples_per_epoch = (tokens_per_epoch - 1) // sequence_length
    separate = num_samples - before_final < int(SEPARATE_FINAL_EPOCH_BELOW * samples_per_epoch)
    return EpochPlan(num_epochs, separate, before_final if separate else None)


def count_samples(num_tokens: int, sequence_length: int, drop_last_partial_sequence: bool = True) -> int:
    """Count the samples of ``sequence_length + 1`` tokens, overlapping by one, in ``num_tokens`` tokens."""
    steps = max(num_tokens - 1, 0)
    return steps // sequence_length if drop_last_partial_sequence else -(-steps // sequence_length)


def sample_index_dtype(num_documents: int) -> np.dtype[Any]:
    """Return the dtype of a sample index over a document index of ``num_documents`` entries.

    Token offsets always fit int32, as sequence lengths do. Positions fit unless there are more than 2**31 - 1.
    """
    return np.dtype(np.int32 if num_documents <= _INT32_MAX else np.int64)


def shuffle_index_dtype(num_samples: int) -> np.dtype[Any]:
    """Return the dtype of a shuffle index of ``num_samples`` entries."""
    return np.dtype(np.uint32 if num_samples < _UINT32_MAX - 1 else np.int64)


class IndexBuilder(Protocol):
    """Interface of builders of the index arrays of data sets and blends."""

    name: str

    def document_index(
        self,
        documents: NDArray[np.int32],
        num_epochs: int,
        random_state: np.random.RandomState,
        separate_final_epoch: bool = False,
    ) -> NDArray[np.int32]:
        """Repeat ``documents`` once per epoch and shuffle them, the last epoch optionally separately."""

    def sample_index(
        self,
        lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
    ) -> SampleIndex:
        """Compute the start of each sample: a position in ``document_index`` and a token offset in that document.

        Sample i reads from row i to row i + 1, both tokens included. A partial last sample (see `count_samples`) ends
        with the last token.

        Shapes: lengths ``[num_sequences]``, document_index ``[num_documents]`` -> ``[num_samples + 1, 2]``, int32
        if the values fit, else int64.
        """

    def shuffle_index(
        self, num_samples: int, total: int, random_state: np.random.RandomState
    ) -> NDArray[np.uint32] | NDArray[np.int64]:
        """Shuffle the first ``num_samples`` of ``total`` samples, and separately the rest."""

    def blending_indices(self, weights: NDArray[np.float64], size: int) -> BlendIndices:
        """Choose a data set and a sample of it for each of ``size`` blend entries.

        Entry i comes from the data set with the largest ``weight * max(i, 1) - samples taken``, ties to the lowest
        index, computed in float64 without fused operations. Weights are shares from 0 to 1.
        """

    def exhaustive_blending_indices(self, sizes: NDArray[np.int64]) -> BlendIndices:
        """Choose as `blending_indices` does, with sizes as weights, until every data set is exhausted."""


class NumpyIndexBuilder:
    """Index builder in NumPy."""

    name = "NumPy"

    def document_index(
        self,
        documents: NDArray[np.int32],
        num_epochs: int,
        random_state: np.random.RandomState,
        separate_final_epoch: bool = False,
    ) -> NDArray[np.int32]:
        return _document_index(self._shuffle, documents, num_epochs, random_state, separate_final_epoch)

    def sample_index(
        self,
        lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
    ) -> SampleIndex:
        document_lengths = lengths[document_index].astype(np.int64)
        ends = np.cumsum(document_lengths)
        num_tokens = int(ends[-1]) if len(ends) else 0
        if num_samples > count_samples(num_tokens, sequence_length, drop_last_partial_sequence=False):
            raise DataError(
                f"{num_samples} samples of {sequence_length} tokens need more than the available {num_tokens} tokens"
            )
        result = np.zeros((num_samples + 1, 2), sample_index_dtype(len(document_index)))
        if num_samples == 0:
            return result
        boundaries = np.arange(1, num_samples + 1, dtype=np.int64) * sequence_length
        places = np.searchsorted(ends, boundaries, side="right")
        if boundaries[-1] >= num_tokens:  # a partial last sample ends with the last token
            places[-1] = len(ends) - 1
            boundaries[-1] = num_tokens - 1
        result[1:, 0] = places
        result[1:, 1] = boundaries - (ends[places] - document_lengths[places])
        return result

    def shuffle_index(
        self, num_samples: int, total: int, random_state: np.random.RandomState
    ) -> NDArray[np.uint32] | NDArray[np.int64]:
        return _shuffle_index(self._shuffle, num_samples, total, random_state)

    def blending_indices(self, weights: NDArray[np.float64], size: int) -> BlendIndices:
        _check_blend(len(weights))
        _check_shares(weights)
        dataset_index = np.empty(size, np.int16)
        dataset_sample_index = np.empty(size, np.int64)
        taken = np.zeros(len(weights), np.float64)
        error = np.empty(len(weights), np.float64)
        # Each choice depends on all earlier ones, so only the search over the data sets is vectorized.
        for i in range(size):
            np.multiply(weights, max(i, 1), out=error)
            np.subtract(error, taken, out=error)
            best = error.argmax()
            dataset_index[i] = best
            dataset_sample_index[i] = taken[best]
            taken[best] += 1
        return dataset_index, dataset_sample_index

    def exhaustive_blending_indices(self, sizes: NDArray[np.int64]) -> BlendIndices:
        _check_blend(len(sizes))
        total = int(sizes.sum())
        dataset_index = np.empty(total, np.int16)
        dataset_sample_index = np.empty(total, np.int64)
        weights = sizes / np.float64(max(total, 1))
        taken = np.zeros(len(sizes), np.float64)
        error = np.empty(len(sizes), np.float64)
        spent = np.where(sizes > 0, 0.0, -np.inf)
        for i in range(total):
            np.multiply(weights, max(i, 1), out=error)
            np.subtract(error, taken, out=error)
            error += spent
            best = error.argmax()
            dataset_index[i] = best
            dataset_sample_index[i] = taken[best]
            taken[best] += 1
            if taken[best] == sizes[best]:
                spent[best] = -np.inf
        return dataset_index, dataset_sample_index

    @staticmethod
    def _shuffle(values: NDArray[Any], random_state: np.random.RandomState) -> None:
        random_state.shuffle(values)


class CompiledIndexBuilder:
    """Index builder in C++, which returns the same arrays as `NumpyIndexBuilder`."""

    name = "compiled"

    def __init__(self, extension: ModuleType) -> None:
        self._extension: Any = extension

    def document_index(
        self,
        documents: NDArray[np.int32],
        num_epochs: int,
        random_state: np.random.RandomState,
        separate_final_epoch: bool = False,
    ) -> NDArray[np.int32]:
        return _document_index(self._shuffle, documents, num_epochs, random_state, separate_final_epoch)

    def sample_index(
        self,
        lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
    ) -> SampleIndex:
        narrow = sample_index_dtype(len(document_index)) == np.dtype(np.int32)
        build = self._extension.sample_index_int32 if narrow else self._extension.sample_index_int64
        try:
            result: SampleIndex = build(
                np.ascontiguousarray(lengths),
                np.ascontiguousarray(document_index),
                sequence_length,
                num_samples,
            )
        except (ValueError, IndexError) as error:
            raise DataError(f"{num_samples} samples of {sequence_length} tokens cannot be indexed: {error}") from error
        return result

    def shuffle_index(
        self, num_samples: int, total: int, random_state: np.random.RandomState
    ) -> NDArray[np.uint32] | NDArray[np.int64]:
        return _shuffle_index(self._shuffle, num_samples, total, random_state)

    def blending_indices(self, weights: NDArray[np.float64], size: int) -> BlendIndices:
        _check_blend(len(weights))
        _check_shares(weights)
        result: BlendIndices = self._extension.blending_indices(np.ascontiguousarray(weights), size)
        return result

    def exhaustive_blending_indices(self, sizes: NDArray[np.int64]) -> BlendIndices:
        _check_blend(len(sizes))
        result: BlendIndices = self._extension.exhaustive_blending_indices(np.ascontiguousarray(sizes))
        return result

    def _shuffle(self, values: NDArray[Any], random_state: np.random.RandomState) -> None:
        functions = {"int32": self._extension.shuffle_int32, "uint32": self._extension.shuffle_uint32}
        shuffle = functions.get(values.dtype.name)
        if shuffle is None or len(values) > _UINT32_MAX:  # more values than 32-bit indices address
            random_state.shuffle(values)
            return
        state: Any = random_state.get_state(legacy=True)
        name, key, position, has_gauss, cached_gaussian = state
        key = np.array(key, np.uint32)
        position = shuffle(values, key, position)
        random_state.set_state((name, key, position, has_gauss, cached_gaussian))


def select_index_builder(report: Callable[[str], None]) -> IndexBuilder:
    """Return the compiled index builder if it can be loaded, else report that and return the NumPy one."""
    try:
        from megatron.core.datasets import _helpers
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        report(f"compiled index builder not found ({reason}); using the NumPy index builder: same indices, slower")
        return NumpyIndexBuilder()
    return CompiledIndexBuilder(_helpers)


_Shuffle = Callable[[NDArray[Any], np.random.RandomState], None]


def _document_index(
    shuffle: _Shuffle,
    documents: NDArray[np.int32],
    num_epochs: int,
    random_state: np.random.RandomState,
    separate_final_epoch: bool,
) -> NDArray[np.int32]:
    if separate_final_epoch and num_epochs > 1:
        first = _document_index(shuffle, documents, num_epochs - 1, random_state, False)
        last = _document_index(shuffle, documents, 1, random_state, False)
        return np.concatenate((first, last))
    index = np.tile(documents, num_epochs)
    shuffle(index, random_state)
    return index


def _shuffle_index(
    shuffle: _Shuffle, num_samples: int, total: int, random_state: np.random.RandomState
) -> NDArray[np.uint32] | NDArray[np.int64]:
    index: NDArray[Any] = np.arange(total, dtype=shuffle_index_dtype(total))
    shuffle(index[:num_samples], random_state)
    if num_samples < total:
        shuffle(index[num_samples:], random_state)
    return index


def _check_blend(num_datasets: int) -> None:
    if not 1 <= num_datasets <= _INT16_MAX:
        raise DataError(
            f"a blend of {num_datasets} data sets cannot be indexed; at most {_INT16_MAX} are supported: merge some"
        )


def _check_shares(weights: NDArray[np.float64]) -> None:
    wrong = np.flatnonzero(~((weights >= 0.0) & (weights <= 1.0)))
    if len(wrong):
        raise DataError(
            f"data set {int(wrong[0])} of a blend has the weight {weights[wrong[0]]}; use a weight from 0 to 1"
        )


Told = Callable[[str, int, int], None]
"""Callback that takes the name of a split, its indexed samples so far, and its total samples."""


def ignore_index_progress(split: str, done: int, total: int) -> None:
    """Report no progress."""


class CountedIndexBuilder:
    """Wrapper of an index builder that reports the progress of a split.

    Building the sample index counts as half of the work, the shuffle as the other half. An index from the cache counts
    as done at once. Without a call of `begin`, nothing is reported.
    """

    def __init__(self, builder: IndexBuilder, told: Told) -> None:
        self.name = builder.name
        self._builder = builder
        self._told = told
        self._split, self._total = "", 0
        self._done = self._share = 0

    def begin(self, split: str, num_samples: int) -> None:
        """Start a split that takes ``num_samples`` samples from its data sets."""
        self._split, self._total, self._done, self._share = split, num_samples, 0, 0
        self._tell(0)

    def next_data_set(self, num_samples: int) -> None:
        """Count the previous data set as done, and start the next, from which ``num_samples`` samples are taken."""
        self._done, self._share = self._done + self._share, num_samples
        self._tell(0)

    def end(self) -> None:
        """Report the whole split as done."""
        self._tell(self._total)
        self._total = 0

    def document_index(
        self,
        documents: NDArray[np.int32],
        num_epochs: int,
        random_state: np.random.RandomState,
        separate_final_epoch: bool = False,
    ) -> NDArray[np.int32]:
        """Build the index; see `IndexBuilder`."""
        return self._builder.document_index(documents, num_epochs, random_state, separate_final_epoch)

    def sample_index(
        self,
        lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
    ) -> SampleIndex:
        """Build the index and report half of the data set as done; see `IndexBuilder`."""
        built = self._builder.sample_index(lengths, document_index, sequence_length, num_samples)
        self._tell(self._share // 2)
        return built

    def shuffle_index(
        self, num_samples: int, total: int, random_state: np.random.RandomState
    ) -> NDArray[np.uint32] | NDArray[np.int64]:
        """Build the index; see `IndexBuilder`."""
        return self._builder.shuffle_index(num_samples, total, random_state)

    def blending_indices(self, weights: NDArray[np.float64], size: int) -> BlendIndices:
        """Build the indices; see `IndexBuilder`."""
        return self._builder.blending_indices(weights, size)

    def exhaustive_blending_indices(self, sizes: NDArray[np.int64]) -> BlendIndices:
        """Build the indices; see `IndexBuilder`."""
        return self._builder.exhaustive_blending_indices(sizes)

    def _tell(self, more: int) -> None:
        if self._total > 0:
            self._told(self._split, min(self._done + more, self._total), self._total)
