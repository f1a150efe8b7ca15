"""Read micro-batches from data sets or from the caller, check each sample, and prefetch in threads."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.batch import BatchLayout
from megatron.core.datasets.data_samplers import PADDING_ID
from megatron.core.datasets.gpt_dataset import GPTSample, SampleDataset, token_range_error
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


Job = TypeVar("Job")
Result = TypeVar("Result")

_JOBS_AHEAD = 4
_JOBS_AHEAD_PER_THREAD = 2
_LAST_JOBS_S = 3.0


class ReadAhead(Generic[Job, Result]):
    """Give ``do(job)`` for each of the jobs, in their order, from ``num_threads`` threads that work ahead.

    Jobs are taken from their iterator by the caller of ``next`` only, the first ones when it is first called. An error
    is raised where its result is due, and nothing follows it. Threads wait for work only, never for room: they are
    gone when this is closed or forgotten, and an interpreter that ends lets them finish what they have begun. With 0
    threads the caller does the work, when a result is due.
    """

    def __init__(self, do: Callable[[Job], Result], jobs: Iterator[Job], num_threads: int) -> None:
        self._do = do
        self._jobs = jobs
        self._executor = ThreadPoolExecutor(num_threads, "batch reader") if num_threads else None
        self._depth = max(_JOBS_AHEAD, _JOBS_AHEAD_PER_THREAD * num_threads)
        self._begun: deque[Future[Result]] = deque()
        self._is_closed = False

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        if self._is_closed:
            raise StopIteration
        try:
            return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> Result:
        if self._executor is None:
            return self._do(next(self._jobs))
        self._begin_jobs(self._executor)
        if not self._begun:
            raise StopIteration
        result = self._begun.popleft().result()
        self._begin_jobs(self._executor)
        return result

    def _begin_jobs(self, executor: ThreadPoolExecutor) -> None:
        while len(self._begun) < self._depth:
            try:
                job = next(self._jobs)
            except StopIteration:
                return
            self._begun.append(executor.submit(self._do, job))

    def close(self) -> None:
        """Give up what is not begun and wait a little for what is; nothing more is given out.

        A thread that is stuck, in storage that does not answer or in a data set that waits for more, is left behind.
        """
        self._is_closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            stuck = wait([job for job in self._begun if not job.cancelled()], _LAST_JOBS_S).not_done
            self._begun.clear()
            if not stuck:
                self._executor.shutdown(wait=True)
