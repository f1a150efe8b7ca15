"""Read micro-batches that the caller makes, and check each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.samples.batch import BatchLayout
from megatron.core.datasets.samples.gpt_dataset import GPTSample, token_range_error
from megatron.core.datasets.samples.micro_batch_reader import find_outside, named_error
from megatron.core.errors import DataError


class ExternalReader:
    """Take micro-batches from the caller one after the other, check them, and lay them out as a rank needs them.

    ``reset_position_ids`` and ``reset_attention_mask`` say whether the model is given positions and documents of the
    samples' own. Where it is not, samples that have such are refused: they would be trained on as something else.
    """

    def __init__(
        self,
        microbatches: Iterator[Sequence[GPTSample]],
        layout: BatchLayout,
        vocab_size: int,
        *,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
    ) -> None:
        self._microbatches = microbatches
        self._layout = layout
        self._vocab_size = vocab_size
        self._positions = None if reset_position_ids else np.arange(layout.sequence_length)
        self._has_documents = reset_attention_mask
        self._num_read = 0

    def read(self, memory: NDArray[np.uint8]) -> None:
        """Fill ``layout.num_bytes`` of memory with the next micro-batch.

        Raises:
            DataError: there is none, it has not as many samples as it should, or one of them cannot be trained on.
        """
        samples = self._next()
        writer = self._layout.writer(memory)
        for row, sample in enumerate(samples):
            try:
                self._check(sample)
                writer.write(row, sample)
            except Exception as error:
                name = f"sample {row} of micro-batch {self._num_read} that the caller makes"
                raise named_error(error, name) from error
        self._num_read += 1

    def _next(self) -> Sequence[GPTSample]:
        try:
            samples = next(self._microbatches, None)
        except Exception as error:
            raise named_error(error, f"micro-batch {self._num_read} that the caller makes") from error
        if samples is None:
            raise DataError(f"the caller makes {self._num_read} micro-batches for this rank, and the run reads more")
        if len(samples) != self._layout.micro_batch_size:
            raise DataError(
                f"micro-batch {self._num_read} that the caller makes has {len(samples)} samples; --micro-batch-size is "
                f"{self._layout.micro_batch_size}"
            )
        return samples

    def _check(self, sample: GPTSample) -> None:
        needed = {"tokens", "labels", "loss_mask"}
        needed |= {"position_ids"} if self._positions is None else set()
        needed |= {"document_ids"} if self._has_documents else set()
        if missing := sorted(needed - sample.keys()):
            raise DataError(f"it has no {', '.join(missing)}")
        shape = (self._layout.sequence_length,)
        for name in sorted(needed | (sample.keys() & {"padding_mask"})):
            array = np.asarray(sample[name])  # type: ignore[literal-required]
            if array.shape != shape:
                raise DataError(f"its {name} have the shape {array.shape}, not {shape}")
        if "document_ids" in sample and not self._has_documents:
            raise DataError("it has document_ids, which need --reset-attention-mask")
        positions = sample.get("position_ids")
        if self._positions is not None and positions is not None and not np.array_equal(positions, self._positions):
            raise DataError("its position_ids are not 0, 1, ...; others need --reset-position-ids")
        outside = find_outside(self._vocab_size, np.asarray(sample["tokens"]), np.asarray(sample["labels"]))
        if outside is not None:
            raise token_range_error("it", *outside, self._vocab_size)
