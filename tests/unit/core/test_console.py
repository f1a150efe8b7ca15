"""The terminal: lines of several processes, progress bars, and a reader of the output that has left."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.progress import ByteProgress
from megatron.cli import clean_dataset, inspect_dataset, merge_datasets
from megatron.core.broken_pipe import STATUS, has_lost_reader, reader_may_leave
from megatron.core.console import CLEAR_LINE, ProgressBar, format_bar, print_line, waiting
from megatron.data.leader import Progress
from tests.harness.recorded_calls import record_opened
from tests.unit.cli.test_merge_datasets import write_parts


class Terminal(io.RawIOBase):
    """Keep what each write brings."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.writes.append(bytes(data))
        return len(data)


def test_a_line_is_one_write_where_output_is_not_buffered() -> None:
    terminal = Terminal()
    # What PYTHONUNBUFFERED makes of standard output.
    stream = io.TextIOWrapper(terminal, encoding="utf-8", write_through=True)  # type: ignore[type-var]
    print_line("first", stream)
    print_line("second", stream)
    assert terminal.writes == [b"first\n", b"second\n"]


class BarTerminal(io.StringIO):
    """Keep what a terminal is sent."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_that_is_taken_away_and_not_drawn_too_often() -> None:
    terminal, times = BarTerminal(), iter((10.0, 10.05, 10.2, 10.25, 10.3))
    bar = ProgressBar(terminal, lambda: next(times))
    for done in (1, 2, 3):
        bar.show("scoring", done, 4, "texts")
    assert terminal.getvalue() == "".join(f"{CLEAR_LINE}scoring {format_bar(done, 4)} texts\r" for done in (1, 3))
    bar.clear()
    bar.tell("something else")
    assert terminal.getvalue().endswith(f"texts\r{CLEAR_LINE}{CLEAR_LINE}something else\r")


def test_elsewhere_there_is_nothing() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    bar.show("scoring", 1, 4)
    bar.clear()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_conversion_has_a_bar_in_place_of_its_lines(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = BarTerminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    lines: list[str] = []
    progress = ByteProgress("writing", 4 * 10**9, lines.append, itertools.count(0.0, 3.0).__next__)
    for _ in range(4):
        progress.add(10**9)
    progress.finish()
    assert (len(lines), bool(stream.getvalue())) == ((1, True) if is_terminal else (5, False))
    assert lines[-1].startswith("  writing: 4.00 GB in ")


@pytest.mark.parametrize("total", [400, None])
def test_preprocessing_has_a_bar_between_its_lines(total: int | None, monkeypatch, capsys) -> None:
    terminal = BarTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(total, 1000, itertools.count(0.0, 2.0).__next__)
    progress.add(999, 50, 100)
    assert capsys.readouterr().out == ""
    drawn = terminal.getvalue()
    assert ("  25%" in drawn) == (total is not None)
    assert "999 documents (" in drawn
    progress.add(1, 50, 100)
    assert capsys.readouterr().out.startswith("Processed 1000 documents (")
    progress.finish()
    assert terminal.getvalue().endswith(CLEAR_LINE)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_waiting_is_shown_while_it_lasts(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = BarTerminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("megatron.core.console._WAITING_REDRAW_S", 0.001)
    drawn = threading.Event()
    write = stream.write

    def note(text: str) -> int:
        drawn.set()
        return write(text)

    monkeypatch.setattr(stream, "write", note)
    with waiting("loading the model"):
        assert not is_terminal or drawn.wait(20.0)
    text = stream.getvalue()
    assert (text.startswith(f"{CLEAR_LINE}loading the model 0s\r") and text.endswith(CLEAR_LINE)) == is_terminal
    assert bool(text) == is_terminal


def test_waiting_draws_a_bar_of_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = BarTerminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("megatron.core.console._WAITING_REDRAW_S", 0.001)
    with waiting("loading the model") as told:
        told(1, 4)
        deadline = time.monotonic() + 20
        while f"loading the model {format_bar(1, 4)} " not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.002)
    with waiting("loading the model", is_on=False) as told:
        told(1, 4)
    assert stream.getvalue().endswith(CLEAR_LINE)


def test_cleaning_has_a_bar_of_the_bytes_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = BarTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("megatron.core.console._REDRAW_S", 0.0)
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = b"".join(b'{"text": "number %d of many"}\n' % number for number in range(40))
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    flags = ["--input", str(folder), "--output", str(tmp_path / "out.jsonl"), "--workers", "1"]
    assert clean_dataset.main(flags) == 0
    shares = [int(share) for share in re.findall(r"cleaning \[=* *\] +(\d+)% \d+ documents read", terminal.getvalue())]
    assert shares == sorted(shares)
    assert len(set(shares)) > 10
    assert (shares[0] < 5, shares[-1]) == (True, 100)


def shares_of(drawn: str, what: str) -> list[int]:
    return [int(share) for share in re.findall(rf"{what} \[=* *\] +(\d+)%", drawn)]


def test_merging_and_verifying_data_have_a_bar_of_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Each data set is one block of the bar, and a damaged one is read to its end too."""
    terminal = BarTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("megatron.core.console._REDRAW_S", 0.0)
    prefixes = write_parts(tmp_path / "parts", modes=False)
    assert merge_datasets.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "all")]) == 0
    merging = shares_of(terminal.getvalue(), "merging")
    # Two of the four have no tokens.
    assert merging == [33, 100]
    assert f"Added {prefixes[-1]}: 20 documents so far\n" in capsys.readouterr().out
    for words, what in (
        (["--verify"], "verifying"),
        (["--write-checksums"], "reading"),
        ([], "reading"),
    ):
        terminal.truncate(0)
        assert inspect_dataset.main([str(tmp_path / "all"), *words]) == 0
        assert shares_of(terminal.getvalue(), f"{what} all")[-1] == 100
        assert terminal.getvalue().endswith(CLEAR_LINE)
    size = (tmp_path / "all.bin").stat().st_size
    (tmp_path / "all.bin").write_bytes(b"\xff" * size)
    terminal.truncate(0)
    assert inspect_dataset.main([str(tmp_path / "all"), "--verify"]) != 0
    assert shares_of(terminal.getvalue(), "verifying all")[-1] == 100


def test_cutting_documents_has_a_bar_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = BarTerminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("megatron.core.console._REDRAW_S", 0.0)
    (tmp_path / "shards").mkdir()
    for number in range(4):
        np.tile(np.array([5, 6, 0], "<u2"), 10).tofile(tmp_path / "shards" / f"{number}.bin")
    words = ["--input", str(tmp_path / "shards"), "--output-prefix", str(tmp_path / "all"), "--eod-id", "0"]
    assert merge_datasets.main(words) == 0
    assert shares_of(terminal.getvalue(), "cutting") == [25, 50, 75, 100]
    assert shares_of(terminal.getvalue(), "computing checksums")[-1] == 100


@contextlib.contextmanager
def output_to_a_pipe() -> Iterator[int]:
    """Let standard output be a pipe, and give its end for reading."""
    reader, writer = os.pipe()
    with open(writer, "w") as output, contextlib.redirect_stdout(output):
        yield reader


def test_a_program_ends_without_a_word_when_the_reader_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = record_opened(monkeypatch)
    with output_to_a_pipe() as reader:
        assert not has_lost_reader()
        os.close(reader)
        with pytest.raises(SystemExit) as caught, reader_may_leave():
            print("unread")
        sys.stdout.flush()
    assert caught.value.code == STATUS == 141
    (nowhere,) = opened
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(nowhere)


def test_another_broken_pipe_is_an_error() -> None:
    with output_to_a_pipe() as reader:
        with pytest.raises(BrokenPipeError), reader_may_leave():
            raise BrokenPipeError
        os.close(reader)


def test_output_that_is_no_file_has_not_lost_its_reader() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert not has_lost_reader()
        with pytest.raises(BrokenPipeError), reader_may_leave():
            raise BrokenPipeError
