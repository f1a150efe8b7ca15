"""Clean a corpus in one pass: read, filter, deduplicate, write."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from megatron.core.console import ProgressBar
from megatron.core.errors import DataError
from megatron.corpus.cleaning.duplicate_index import DuplicateIndex, KeptDocument
from megatron.corpus.cleaning.output_file import OutputFile
from megatron.corpus.cleaning.shingles import shingles, similarity
from megatron.corpus.cleaning.sources import STDIN, Document, DocumentReader, no_source, walk_sources
from megatron.corpus.cleaning.tally import BLACKLISTED_URL, EXACT_DUPLICATE, NEAR_DUPLICATE, Tally
from megatron.corpus.cleaning.text_filters import NO_TEXT, OTHER_LANGUAGE, TOO_SHORT, Finding, TextRules
from megatron.corpus.cleaning.url_blacklist import UrlBlacklist
from megatron.corpus.cleaning.workers import Item, examine_all

MAX_REPORTED: Final = 20


@dataclass(frozen=True)
class CleaningPlan:
    """Describe a cleaning: the input, the rules and the outputs.

    Attributes:
        dropped_output: where to list the documents that were dropped, and why.
        stop_on_error: whether a document that cannot be read ends the work.
        log_interval: documents between two reports.
    """

    inputs: Sequence[str]
    input_format: str
    output: Path
    dropped_output: Path | None
    text_key: str
    url_key: str
    encoding: str
    max_document_bytes: int
    blacklist: UrlBlacklist | None
    rules: TextRules
    stop_on_error: bool
    workers: int
    log_interval: int


class _Drop(NamedTuple):
    reason: str
    detail: str


class Cleaner:
    """Do what a plan says; the output is a function of the input and the plan alone.

    One document of each batch under way is in memory; what was kept is on disk.
    """

    def __init__(self, plan: CleaningPlan, report: Callable[[str], None]) -> None:
        self._plan = plan
        self._report = report
        self._bar = ProgressBar()
        self._tally = Tally()
        reasons = {
            BLACKLISTED_URL: plan.blacklist is not None,
            NO_TEXT: True,
            TOO_SHORT: plan.rules.min_tokens > 0,
            OTHER_LANGUAGE: bool(plan.rules.languages),
            EXACT_DUPLICATE: plan.rules.exact_duplicates,
            NEAR_DUPLICATE: plan.rules.similarity is not None,
        }
        for reason, applies in reasons.items():
            if applies:
                self._tally.dropped[reason] = self._tally.dropped_bytes[reason] = 0

    def run(self) -> Tally:
        """Write the output and, where asked for, the list of what was dropped; nothing is left behind by a failure.

        Raises:
            InputError: the input cannot be used, or the output not be written.
        """
        plan = self._plan
        with ExitStack() as stack:
            self._output = stack.enter_context(OutputFile(plan.output))
            self._list = None
            if plan.dropped_output is not None:
                self._list = stack.enter_context(OutputFile(plan.dropped_output))
            self._index = None
            if plan.rules.exact_duplicates:
                path = plan.output.with_name(f"{self._output.temporary_name}.duplicates")
                self._index = stack.enter_context(DuplicateIndex(path))
            try:
                self._process()
            except sqlite3.Error as error:
                raise DataError(f"the index of duplicates beside {plan.output} cannot be written: {error}") from error
            if self._list is not None:
                self._list.publish()
            self._output.publish()
        return self._tally

    def _process(self) -> None:
        start_time = time.monotonic()
        total_bytes = self._total_bytes() if self._bar.is_on else None
        next_report = self._plan.log_interval
        for document, finding in examine_all(self._read(), self._plan.rules, self._plan.workers):
            self._decide(document, finding)
            if self._bar.is_on:
                self._draw(document.source_bytes, total_bytes)
            if self._tally.documents >= next_report:
                self._bar.clear()
                next_report = (self._tally.documents // self._plan.log_interval + 1) * self._plan.log_interval
                rate = self._tally.text_bytes / 1e6 / max(time.monotonic() - start_time, 1e-9)
                done = f"{self._tally.documents} documents read, {self._tally.kept} kept"
                self._report(f"{done}, {rate:.2f} MB/s")
        self._bar.clear()

    def _total_bytes(self) -> int | None:
        """Return the size of the input on disk, None where it is not known."""
        if STDIN in self._plan.inputs:
            return None
        sources = walk_sources(self._plan.inputs, self._plan.input_format, lambda path: None)
        return sum(os.path.getsize(source.path) for source in sources)

    def _draw(self, done_bytes: int, total_bytes: int | None) -> None:
        counts = f"{self._tally.documents} documents read, {self._tally.kept} kept"
        if total_bytes is None:
            self._bar.tell(f"cleaning: {counts}")
        else:
            self._bar.show("cleaning", done_bytes, total_bytes, counts)

    def _read(self) -> Iterator[Item]:
        """Read all documents and decide on their URLs."""
        plan = self._plan
        reader = DocumentReader(
            text_key=plan.text_key,
            url_key=plan.url_key,
            encoding=plan.encoding,
            max_document_bytes=plan.max_document_bytes,
            allow_surrogates=plan.rules.fix_encoding,
            on_bad_document=self._refuse_or_skip,
        )
        for source in walk_sources(plan.inputs, plan.input_format, self._count_unknown):
            self._tally.files += 1
            for document in reader.read(source):
                self._tally.documents += 1
                self._tally.text_bytes += len(document.text.encode("utf-8", "surrogatepass"))
                yield document, self._judge_url(document)

        if not self._tally.files:
            raise no_source(plan.inputs)

    def _count_unknown(self, path: str) -> None:
        own = [file.temporary_name for file in (self._output, self._list) if file is not None]
        self._tally.unknown_files += os.path.basename(path) not in own

    def _judge_url(self, document: Document) -> Finding | None:
        if self._plan.blacklist is None:
            return None
        if document.url is None:
            self._tally.without_url += 1
            return None
        entry = self._plan.blacklist.entry_for(document.url)
        return None if entry is None else Finding(document.text, BLACKLISTED_URL, f"{document.url} ({entry})")

    def _refuse_or_skip(self, message: str) -> None:
        if self._plan.stop_on_error:
            raise DataError(f"{message} (or leave such documents out with --on-error skip)")
        self._tally.bad += 1
        if self._tally.bad <= MAX_REPORTED:
            print(f"skipped {message}", file=sys.stderr)
        if self._tally.bad == MAX_REPORTED:
            print("further documents that cannot be read are only counted", file=sys.stderr)

    def _decide(self, document: Document, finding: Finding) -> None:
        drop = _Drop(finding.reason, finding.detail) if finding.reason is not None else self._find_original(finding)
        if drop is not None:
            self._drop(document, drop)
            return
        line = document.to_line(finding.text, self._plan.text_key)
        begin = self._output.write(line)
        if self._index is not None:
            kept = KeptDocument(begin, len(line), document.place)
            self._index.keep(kept, finding.digest, finding.keys)
        self._tally.kept += 1
        self._tally.output_bytes += len(line)
        self._tally.repaired += finding.text != document.text

    def _find_original(self, finding: Finding) -> _Drop | None:
        """Compare with what was kept before."""
        if self._index is None:
            return None
        original = self._index.find_digest(finding.digest)
        if original is not None:
            return _Drop(EXACT_DUPLICATE, f"of {original.place}")
        threshold, num_words = self._plan.rules.similarity, self._plan.rules.shingle_words
        if threshold is None:
            return None
        candidates = self._index.find_candidates(finding.keys)
        own = shingles(finding.text, num_words) if candidates else None
        for candidate in candidates:
            assert own is not None
            text = json.loads(self._output.read(candidate.begin, candidate.num_bytes))[self._plan.text_key]
            found = similarity(own, shingles(text, num_words))
            if found >= threshold:
                return _Drop(NEAR_DUPLICATE, f"of {candidate.place}, similarity {found:.3f}")
        return None

    def _drop(self, document: Document, drop: _Drop) -> None:
        self._tally.dropped[drop.reason] += 1
        self._tally.dropped_bytes[drop.reason] += len(document.text.encode("utf-8", "surrogatepass"))
        if self._list is not None:
            entry = {"document": document.place, "reason": drop.reason, "detail": drop.detail}
            self._list.write(json.dumps(entry).encode("ascii") + b"\n")
