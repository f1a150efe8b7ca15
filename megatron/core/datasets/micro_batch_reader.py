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
    """Reader that loads the samples of a micro-batch, checks their token ids, and packs them into a rank's layout.

    `PADDING_ID` yields a padding sample with loss mask 0. Several threads may read at the same time if the data set is
    thread-safe, as the data sets of this package are. ``data_sets_of`` returns the index in the blend of each sample's
    data set, which is packed too.
    """

    dataset: SampleDataset
    layout: BatchLayout
    vocab_size: int
    data_sets_of: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None

    def read(self, sample_ids: Sequence[int], memory: NDArray[np.uint8]) -> None:
        """Fill ``layout.num_bytes`` of memory.

        Raises:
            DataError: a sample cannot be read, or has a token id outside the vocabulary; the message names the sample
                and its source.
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
        except Exception:  # noqa: BLE001 the source may be what is damaged; report the first error
            return f"sample {sample_id}"


def find_outside(vocab_size: int, *tokens: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return the smallest and the largest token if one of them is outside the vocabulary, else None."""
    smallest = min(int(array.min()) for array in tokens)
    largest = max(int(array.max()) for array in tokens)
    return None if 0 <= smallest <= largest < vocab_size else (smallest, largest)


def named_error(error: Exception, name: str) -> DataError:
    """Return a one-line error that names the sample."""
    said = " ".join(str(error).split())
    if isinstance(error, MegatronError | OSError):
        return DataError(f"{name}: {said}")
    # A bug rather than bad data: the source line replaces a traceback.
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}, line {place.lineno}"
    return DataError(f"{name}: reading it failed with {type(error).__name__}: {said} ({where})")


class ExternalReader:
    """Reader that takes micro-batches from the caller, checks them, and packs them into a rank's layout.

    ``reset_position_ids`` and ``reset_attention_mask`` tell whether the model uses the position ids and document ids of
    the samples. Without them, samples with such ids are rejected, because the model would ignore the ids.
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
            DataError: there is no next micro-batch, its number of samples is wrong, or one of the samples is invalid.
        """
        samples = self._next()
        writer = self._layout.writer(memory)
        for row, sample in enumerate(samples):
            try:
                self._check(sample)
                writer.write(row, sample)
            except Exception as error:
                name = f"sample {row} of the caller's micro-batch {self._num_read}"
                raise named_error(error, name) from error
        self._num_read += 1

    def _next(self) -> Sequence[GPTSample]:
        try:
            samples = next(self._microbatches, None)
        except Exception as error:
            raise named_error(error, f"the caller's micro-batch {self._num_read}") from error
        if samples is None:
            raise DataError(
                f"the caller's iterator ended after {self._num_read} micro-batches on this rank, but the run needs more"
            )
        if len(samples) != self._layout.micro_batch_size:
            raise DataError(
                f"the caller's micro-batch {self._num_read} has {len(samples)} samples, but --micro-batch-size is "
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
                raise DataError(f"its {name} have shape {array.shape}, not {shape}")
        if "document_ids" in sample and not self._has_documents:
            raise DataError("it has document_ids, which require --reset-attention-mask")
        positions = sample.get("position_ids")
        if self._positions is not None and positions is not None and not np.array_equal(positions, self._positions):
            raise DataError("its position_ids are not 0, 1, ...; other values require --reset-position-ids")
        outside = find_outside(self._vocab_size, np.asarray(sample["tokens"]), np.asarray(sample["labels"]))
        if outside is not None:
            raise token_range_error("it", *outside, self._vocab_size)


Job = TypeVar("Job")
Result = TypeVar("Result")

_JOBS_AHEAD = 4
_JOBS_AHEAD_PER_THREAD = 2
_LAST_JOBS_S = 3.0


class ReadAhead(Generic[Job, Result]):
    """Iterator over ``do(job)`` for each job, in order, computed ahead by ``num_threads`` threads.

    Only the caller of ``next`` takes jobs from their iterator, starting with the first call. An error is raised in the
    place of its result and ends the iteration. Threads block only on the job queue, never on a full output queue. They
    end when the iterator is closed or garbage-collected. At interpreter exit they finish the jobs that they have
    started. With 0 threads, the caller computes each result on demand.
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
        """Cancel the jobs that have not started, wait briefly for running ones, and end the iteration.

        A thread that hangs, for example in unresponsive storage, is abandoned.
        """
        self._is_closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            stuck = wait([job for job in self._begun if not job.cancelled()], _LAST_JOBS_S).not_done
            self._begun.clear()
            if not stuck:
                self._executor.shutdown(wait=True)
