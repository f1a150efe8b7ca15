"""A command whose reader has gone ends as other programs do; a pipe that breaks elsewhere is an error."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from megatron.commands.arguments.command_line import exit_status_of
from tests.harness.training_run import REPOSITORY

COMMAND = """
import sys
from megatron.commands.arguments.command_line import exit_status_of

def work():
    sys.stdin.read()
    for number in range({lines}):
        print(number)

sys.exit(exit_status_of(work))
"""


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "at once"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_command_whose_reader_has_gone_ends_without_a_word(lines: int, options: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, *options, "-c", COMMAND.format(lines=lines)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 128 + signal.SIGPIPE


def test_another_pipe_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    assert exit_status_of(work) == 1
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe\n"
