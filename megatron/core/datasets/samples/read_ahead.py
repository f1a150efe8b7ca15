"""Run jobs ahead of time in threads and return their results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

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
