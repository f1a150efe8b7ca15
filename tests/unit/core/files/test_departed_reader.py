"""Standard output whose reader has left."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

import pytest

from megatron.core.broken_pipe import STATUS, has_lost_reader, reader_may_leave
from tests.harness.recorded_calls import record_opened


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
