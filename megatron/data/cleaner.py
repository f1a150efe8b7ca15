"""Clean a corpus in one pass that reads, filters, deduplicates, counts and writes documents."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from megatron.core.console import ProgressBar
from megatron.core.errors import DataError
from megatron.data.deduplication import DuplicateIndex, KeptDocument, shingles, similarity
from megatron.data.document_reader import Document, DocumentReader, no_source, walk_sources
from megatron.data.input_files import STDIN
from megatron.data.text_filters import (
    NO_TEXT,
    OTHER_LANGUAGE,
    TOO_SHORT,
    Finding,
    Item,
    TextRules,
    UrlBlacklist,
    examine_all,
)

BLACKLISTED_URL: Final = "URL on the blacklist"
EXACT_DUPLICATE: Final = "exact duplicate"
NEAR_DUPLICATE: Final = "near duplicate"


@dataclass
class Tally:
    """Counts of documents, bytes of UTF-8 text, and bytes of output lines."""

    files: int = 0
    unknown_files: int = 0
    documents: int = 0
    text_bytes: int = 0
    bad: int = 0
    repaired: int = 0
    without_url: int = 0
    kept: int = 0
    output_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_bytes: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return the counts as report lines. Dropped documents are listed by reason, in the order of the filters."""
        total = max(self.documents, 1)
        lines = [f"Read {self.documents} documents ({self.text_bytes / 1e6:.2f} MB of text) of {self.files} files"]
        lines += [
            f"  dropped {count} ({100 * count / total:.2f} %, {self.dropped_bytes[reason] / 1e6:.2f} MB): {reason}"
            for reason, count in self.dropped.items()
            if count
        ]
        if self.bad:
            lines.append(f"  skipped {self.bad} that could not be read")
        if self.repaired:
            lines.append(f"  repaired the encoding of {self.repaired}")
        if self.without_url:
            lines.append(f"  {self.without_url} had no URL, and no blacklist applied to them")
        if self.unknown_files:
            lines.append(
                f"  skipped {self.unknown_files} files of other kinds; pass a pattern such as 'DIR/*' to include them"
            )
        lines.append(
            f"Kept {self.kept} documents ({100 * self.kept / total:.2f} %, {self.output_bytes / 1e6:.2f} MB of jsonl)"
        )
        return lines

    def write(self, path: Path) -> None:
        """Write the counts as JSON.

        Raises:
            DataError: the file cannot be written.
        """
        content = {
            "files": self.files,
            "unknown_files": self.unknown_files,
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "unreadable": self.bad,
            "repaired": self.repaired,
            "without_url": self.without_url,
            "dropped": dict(self.dropped),
            "dropped_bytes": dict(self.dropped_bytes),
            "kept": self.kept,
            "output_bytes": self.output_bytes,
        }
        try:
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="ascii")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error


class OutputFile:
    """Output file with a temporary name. `publish` renames it; leaving the context without `publish` removes it.

    Raises:
        DataError: the file cannot be written, for example because the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
        self._position = self._flushed = 0
        try:
            self._file = open(self._temporary, "xb+", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error

    @property
    def temporary_name(self) -> str:
        return self._temporary.name

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:
            if kind is None:  # otherwise the original error is already propagating
                raise
        finally:
            self._temporary.unlink(missing_ok=True)

    def write(self, line: bytes) -> int:
        """Append a line and return its start offset."""
        begin = self._position
        try:
            self._file.write(line)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error}") from error
        self._position += len(line)
        return begin

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Return bytes that were written at an offset."""
        try:
            if begin + num_bytes > self._flushed:
                self._file.flush()
                self._flushed = self._position
            return os.pread(self._file.fileno(), num_bytes, begin)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error}") from error

    def publish(self) -> None:
        """Sync the file and rename it to its final name."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error}") from error


MAX_REPORTED: Final = 20


@dataclass(frozen=True)
class CleaningPlan:
    """Configuration of a cleaning run: the input, the rules and the outputs.

    Attributes:
        dropped_output: file that lists the dropped documents and the reasons.
        stop_on_error: whether an unreadable document ends the work.
        log_interval: documents between two progress reports.
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
    """Cleaner that executes a plan. The output is a function of the input and the plan only.

    Only the documents of batches in flight are in memory. Kept documents are on disk.
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
        """Write the output and, if configured, the list of dropped documents. A failure leaves no files.

        Raises:
            InputError: the input cannot be used, or the output cannot be written.
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
                raise DataError(f"the index of duplicates next to {plan.output} cannot be written: {error}") from error
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
        """Return the size of the input on disk, None if it is unknown."""
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
        """Yield all documents, with the result of the URL blacklist."""
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
            raise DataError(f"{message} (or skip such documents with --on-error skip)")
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
        """Find an exact or near duplicate among the kept documents."""
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
