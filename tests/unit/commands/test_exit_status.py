"""A command whose reader has gone ends as other programs do; a pipe that breaks elsewhere is an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from megatron.cli.arguments import exit_status_of
from tests.harness.training_run import REPOSITORY

PRINTED = (
    "--model-preset gpt2-345m --global-batch-size 8 --micro-batch-size 8 --train-iters 1 --mock-data --print-config"
)

COMMAND = """
import sys
from megatron.cli.arguments import exit_status_of

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


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "words",
    ["--help", "--print-completion bash", "verify --list", "train --help", f"train {PRINTED}"],
)
def test_what_a_command_is_asked_for_may_be_read_in_part(words: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "megatron", *words.split()]
    ended = subprocess.run(command, cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert ended.stderr == b""
    assert ended.returncode == 128 + signal.SIGPIPE
