"""Examine documents in several processes, in order and with a bounded number under way."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Final

from megatron.core.errors import MegatronError
from megatron.corpus.cleaning.sources import Document
from megatron.corpus.cleaning.text_filters import Finding, TextExaminer, TextRules, examine_batch

BATCH_CHARACTERS: Final = 1 << 19
BATCH_DOCUMENTS: Final = 1024


Item = tuple[Document, Finding | None]
"""A document, and what is known about it already; None where its text is to be examined."""


def examine_all(items: Iterator[Item], rules: TextRules, workers: int) -> Iterator[tuple[Document, Finding]]:
    """Yield each document with what was found, in the order of the input.

    Raises:
        InputError: a rule cannot be applied, here or to one of the texts.
        MegatronError: a worker died.
    """
    examiner = TextExaminer(rules)  # also with workers, so that what is missing is said once and at once
    batches = _gather(items)
    if workers == 1:
        for batch in batches:
            yield from _join(batch, examine_batch(examiner, _texts(batch)))
        return
    # Not forked: the tokenizer's and NumPy's threads do not survive a fork.
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (rules,)
    )
    under_way: deque[tuple[list[Item], concurrent.futures.Future[list[Finding]]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch, executor.submit(_examine_in_worker, _texts(batch))))
            if len(under_way) > 2 * workers:
                done, future = under_way.popleft()
                yield from _join(done, future.result())
        while under_way:
            done, future = under_way.popleft()
            yield from _join(done, future.result())
    except BrokenProcessPool as error:
        raise MegatronError("a worker died, for lack of memory perhaps; give fewer --workers and run again") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _gather(items: Iterator[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    num_characters = 0
    for item in items:
        batch.append(item)
        num_characters += len(item[0].text)
        if num_characters >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _texts(batch: list[Item]) -> list[tuple[str, str]]:
    return [(document.place, document.text) for document, known in batch if known is None]


def _join(batch: list[Item], findings: list[Finding]) -> Iterator[tuple[Document, Finding]]:
    examined = iter(findings)
    for document, known in batch:
        yield document, next(examined) if known is None else known


class _WorkerState:
    """Hold the examiner of this process; a process pool has no other way to hand one to its calls."""

    examiner: TextExaminer


def _start_worker(rules: TextRules) -> None:
    _WorkerState.examiner = TextExaminer(rules)


def _examine_in_worker(texts: list[tuple[str, str]]) -> list[Finding]:
    return examine_batch(_WorkerState.examiner, texts)
