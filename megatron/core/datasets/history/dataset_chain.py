"""Continue data sets: segments of one data set in sequence, and a blend that begins in mid-run."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from megatron.core.datasets.samples.conversation_dataset import FileSamples
from megatron.core.datasets.samples.gpt_dataset import GPTSample, SampleDataset
from megatron.core.errors import DataError


class SegmentChain:
    """Give the samples of one data set, segment after segment, those before ``offset`` left out."""

    def __init__(self, segments: Sequence[FileSamples], offset: int = 0) -> None:
        self.segments = tuple(segments)
        self.offset = offset
        self.starts = list(itertools.accumulate((len(segment) for segment in self.segments), initial=0))

    def __len__(self) -> int:
        return max(self.starts[-1] - self.offset, 0)

    def place(self, index: int) -> tuple[int, int]:
        """Return the segment of a sample and its number there.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        segment = bisect.bisect_right(self.starts, self.offset + index) - 1
        return segment, self.offset + index - self.starts[segment]

    def __getitem__(self, index: int) -> GPTSample:
        segment, sample = self.place(index)
        return self.segments[segment][sample]

    def source_of(self, index: int) -> str:
        """Name the data set; ``index`` does not matter here."""
        return self.segments[0].source_of(0)


class LaterPhase:
    """Number the samples of ``dataset`` from ``start`` on: those before belong to the blends that a run had before.

    ``length`` leaves out what follows that many samples in all.
    """

    def __init__(self, dataset: SampleDataset, start: int, length: int | None = None) -> None:
        self.dataset = dataset
        self.start = start
        self._length = start + len(dataset) if length is None else length

    def __len__(self) -> int:
        return self._length

    def place(self, index: int) -> int:
        """Return the number that a sample has in ``dataset``.

        Raises:
            IndexError: there is no such sample.
            DataError: it was read before this blend.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        if index < self.start:
            raise DataError(f"sample {index} was read before the data changed after {self.start} samples")
        return index - self.start

    def __getitem__(self, index: int) -> GPTSample:
        return self.dataset[self.place(index)]

    def source_of(self, index: int) -> str:
        """Name the data set that a sample comes from."""
        return self.dataset.source_of(self.place(index))
