"""Write the ``.bin``/``.idx`` pair that holds a tokenized data set."""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.indexed.index_writer import cut, replace_tokens, write_index
from megatron.core.datasets.indexed.indexed_dataset import DTYPE_CODES, idx_path
from megatron.core.errors import DataError


class IndexedDatasetBuilder:
    """Collect documents and publish them as a data set that `IndexedDataset` and Megatron read.

    Both files grow under temporary names beside the final ones and take their names in `finalize`, ``.idx`` last, so
    that a killed writer never leaves something that looks like a data set. As a context manager, it removes its
    temporary files where `finalize` was not reached.

    Raises:
        DataError: the dtype has no code in the file format, or the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type[np.generic] | str, modes: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPE_CODES.values():
            raise DataError(
                f"dtype {self.dtype} cannot be stored in {self.prefix}; choose one of "
                f"{', '.join(str(known) for known in DTYPE_CODES.values())}"
            )
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._modes = array("b") if modes else None
        suffix = f"tmp-{secrets.token_hex(6)}"
        self._temporary_bin = Path(f"{self.prefix}.bin.{suffix}")
        self._temporary_idx = Path(f"{self.prefix}.idx.{suffix}")
        try:
            self._file = open(self._temporary_bin, "xb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"data set {self.prefix} cannot be written: {error}") from error

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    @property
    def num_documents(self) -> int:
        """Count the documents added so far."""
        return len(self._document_indices) - 1

    def add_document(
        self,
        tokens: NDArray[Any] | Sequence[int],
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] = (),
    ) -> None:
        """Append one document that consists of sequences of ``lengths`` tokens (of one sequence without them).

        Raises:
            DataError: the lengths do not sum to the tokens, or a token does not fit the dtype.
        """
        values = np.asarray(tokens)
        lengths = [len(values)] if lengths is None else lengths
        if sum(lengths) != len(values) or min(lengths, default=0) < 0:
            raise DataError(f"{self.prefix}: sequence lengths sum to {sum(lengths)}, the document has {len(values)}")
        if self._modes is not None and len(modes) != len(lengths):
            raise DataError(f"{self.prefix}: {len(modes)} modes for {len(lengths)} sequences")
        self._file.write(self._to_dtype(values).tobytes())
        self._lengths.extend(lengths)
        self._document_indices.append(len(self._lengths))
        if self._modes is not None:
            self._modes.extend(modes)

    def _to_dtype(self, values: NDArray[Any]) -> NDArray[Any]:
        if len(values) and self.dtype.kind in "iu" and values.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            low, high = int(values.min()), int(values.max())
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self.prefix}: token {high if high > limits.max else low} does not fit {self.dtype.name} "
                    f"({limits.min} to {limits.max}); give the tokenizer's true vocabulary size"
                )
        return values.astype(self.dtype, copy=False)

    def finalize(self) -> None:
        """Write the index and give both files their names.

        Raises:
            DataError: the files cannot be written (a full disk, for example).
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._write_index()
            replace_tokens(self.prefix, self._temporary_bin)
            os.replace(self._temporary_idx, idx_path(self.prefix))
        except OSError as error:
            raise DataError(f"data set {self.prefix} cannot be written: {error}") from error

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        counts = np.diff(np.frombuffer(self._document_indices, np.int64))
        modes = None if self._modes is None else partial(cut, np.frombuffer(self._modes, np.int8))
        write_index(self._temporary_idx, self.dtype, partial(cut, lengths), partial(cut, counts), modes)

    def discard(self) -> None:
        """Close and remove what was not published; does nothing after `finalize`."""
        self._file.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)
