"""Pack a rank's part of a micro-batch into one contiguous buffer, and read it back as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import GPTSample
from megatron.core.errors import DataError
from megatron.core.ops import DropoutSamples

_TORCH_DTYPES = {np.dtype(np.uint8): torch.uint8, np.dtype(np.uint16): torch.uint16, np.dtype(np.int32): torch.int32}
_WIDE_DTYPES = {"loss_mask": torch.float32, "padding_mask": torch.bool}
_NUM_TOKENS_BYTES = 8


@dataclass(frozen=True)
class Batch:
    """One rank's part of a micro-batch. A field is None if the rank's pipeline stage does not need it.

    ``s/cp`` is the number of positions of each sequence that the rank holds under context parallelism.

    Attributes:
        tokens: int64 ``[b, s/cp]``, the input.
        labels: int64 ``[b, s/cp]``, the next token of each position.
        loss_mask: float32 ``[b, s/cp]``, 1 for positions that contribute to the loss, else 0.
        position_ids: int64 ``[b, s/cp]``.
        document_ids: int64 ``[b, s]`` of the whole sequences, or None if attention crosses document boundaries.
            Positions with different ids must not attend to each other.
        num_tokens: int64 ``[]``, positions of the whole micro-batch with loss mask 1, over all context-parallel ranks.
        dropout_samples: sample identities for dropout and random routing. None if the model uses neither.
        data_sets: int64 ``[b]``, the index in the blend of each sample's data set. None if it was not requested.
        padding_mask: bool ``[b, s]`` of the whole sequences, True for padding positions. None if nothing depends on
            it. A token with loss mask 0 is not padding.
    """

    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    document_ids: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    dropout_samples: DropoutSamples | None = None
    data_sets: torch.Tensor | None = None
    padding_mask: torch.Tensor | None = None


@dataclass(frozen=True)
class BatchContents:
    """Fields of a batch that a rank needs. ``labels`` includes the loss mask and the number of tokens.

    Without ``position_ids`` the positions are 0, 1, …, which need not be read. ``data_sets`` is needed to log the loss
    of each data set of a blend separately.
    """

    tokens: bool = True
    labels: bool = True
    position_ids: bool = False
    document_ids: bool = False
    padding_mask: bool = False
    data_sets: bool = False


@dataclass(frozen=True)
class _Field:
    """Dtype, shape and byte offset of one array in the buffer."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, int]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.dtype.itemsize * self.shape[0] * self.shape[1]


class BatchLayout:
    """Layout of a rank's part of a micro-batch in one buffer of ``num_bytes`` bytes, so that one transfer moves it.

    Integers use the smallest dtype that holds them: ``vocab_size`` bounds the token ids, unless it is None. A mask
    takes one byte per position. ``parts`` are the slices of a sequence that the rank holds, in the rank's order. None
    means the whole sequence.
    """

    def __init__(
        self,
        contents: BatchContents,
        micro_batch_size: int,
        sequence_length: int,
        vocab_size: int | None,
        parts: Sequence[slice] | None = None,
    ) -> None:
        self.contents = contents
        self.micro_batch_size = micro_batch_size
        self.sequence_length = sequence_length
        self._parts = (slice(0, sequence_length),) if parts is None else tuple(parts)
        self.num_positions = sum(part.stop - part.start for part in self._parts)
        token, place = _smallest_dtype(vocab_size), _smallest_dtype(sequence_length)
        wanted = (
            ("tokens", contents.tokens, token, self.num_positions),
            ("labels", contents.labels, token, self.num_positions),
            ("position_ids", contents.position_ids, place, self.num_positions),
            ("document_ids", contents.document_ids, place, sequence_length),
            ("data_sets", contents.data_sets, np.dtype(np.uint16), 1),
            ("padding_mask", contents.padding_mask, np.dtype(np.uint8), sequence_length),
            ("loss_mask", contents.labels, np.dtype(np.uint8), self.num_positions),
        )
        fields = []
        end = _NUM_TOKENS_BYTES if contents.labels else 0
        # The widest dtype comes first, so that every field is aligned to its item size.
        for name, _, dtype, length in sorted((w for w in wanted if w[1]), key=lambda w: -w[2].itemsize):
            fields.append(_Field(name, dtype, (micro_batch_size, length), end))
            end = fields[-1].end
        self._fields = tuple(fields)
        self.num_bytes = end

    def writer(self, memory: NDArray[np.uint8]) -> BatchWriter:
        """Return a writer that packs the samples of a micro-batch into ``num_bytes`` bytes of memory."""
        arrays = {
            field.name: memory[field.offset : field.end].view(field.dtype).reshape(field.shape)
            for field in self._fields
        }
        count = memory[:_NUM_TOKENS_BYTES].view(np.int64) if self.contents.labels else np.zeros(1, np.int64)
        return BatchWriter(arrays, count, self._parts, self.sequence_length)

    def unpack(self, memory: torch.Tensor, position_ids: torch.Tensor | None = None) -> Batch:
        """Unpack the buffer into tensors of the full dtypes; use ``position_ids`` if the buffer holds none."""
        tensors: dict[str, Any] = {}
        for field in self._fields:
            small = memory[field.offset : field.end].view(_TORCH_DTYPES[field.dtype]).view(field.shape)
            wide = small.to(_WIDE_DTYPES.get(field.name, torch.int64))
            tensors[field.name] = wide.squeeze(1) if field.name == "data_sets" else wide
        if self.contents.labels:
            tensors["num_tokens"] = memory[:_NUM_TOKENS_BYTES].view(torch.int64)[0]
        if position_ids is not None:
            tensors.setdefault("position_ids", position_ids)
        return Batch(**tensors)


class BatchWriter:
    """Writer of samples to the rows of a micro-batch; see `BatchLayout.writer`."""

    def __init__(
        self, arrays: dict[str, NDArray[Any]], num_tokens: NDArray[np.int64], parts: Sequence[slice], length: int
    ) -> None:
        self._data_sets = arrays.pop("data_sets", None)
        self._arrays = arrays
        self._num_tokens = num_tokens
        self._num_tokens[0] = 0
        self._parts = parts
        self._length = length

    def write(self, row: int, sample: GPTSample) -> None:
        """Write a sample to a row that has not been written yet.

        Raises:
            DataError: a mask has values other than 0 and 1, or a position or document id is out of range.
        """
        for name, row_of in self._arrays.items():
            if name == "loss_mask":
                counts = self._mask(sample["loss_mask"], "loss")
                self._num_tokens[0] += np.count_nonzero(counts)
                self._cut(counts, row_of[row])
            elif name == "document_ids":
                row_of[row] = self._in_range(sample["document_ids"], "document")
            elif name == "padding_mask":
                row_of[row] = self._mask(sample["padding_mask"], "padding") if "padding_mask" in sample else 0
            elif name == "position_ids":
                self._cut(self._in_range(sample["position_ids"], "position"), row_of[row])
            else:
                self._cut(sample["tokens"] if name == "tokens" else sample["labels"], row_of[row])

    def write_data_sets(self, numbers: NDArray[np.int64]) -> None:
        """Write the index in the blend of each row's data set, if the layout includes it.

        Shapes: ``numbers: [b]``.
        """
        if self._data_sets is not None:
            self._data_sets[:, 0] = numbers

    def _cut(self, whole: NDArray[Any], out: NDArray[Any]) -> None:
        start = 0
        for part in self._parts:
            length = part.stop - part.start
            out[start : start + length] = whole[part]
            start += length

    def _mask(self, mask: NDArray[Any], what: str) -> NDArray[np.bool_]:
        is_set: NDArray[np.bool_] = mask != 0
        if not np.array_equal(mask, is_set):
            raise DataError(f"the {what} mask contains values other than 0 and 1")
        return is_set

    def _in_range(self, values: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        smallest, largest = int(values.min()), int(values.max())
        if not 0 <= smallest <= largest < self._length:
            wrong = smallest if smallest < 0 else largest
            raise DataError(f"{what} {wrong} is out of range for a sequence of {self._length} tokens")
        return values


def _smallest_dtype(count: int | None) -> np.dtype[Any]:
    """Return the smallest dtype that holds the integers below ``count``."""
    return np.dtype(np.uint16 if count is not None and count <= 1 << 16 else np.int32)
