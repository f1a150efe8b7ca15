"""URLs as arguments of commands: taken where a checkpoint is read, and refused in one line everywhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.cli import convert, diff_checkpoints, inspect_checkpoint
from megatron.cli.doctor import doctor
from tests.harness.object_faults import empty_memory_store


@pytest.mark.parametrize(
    ("command", "words", "line"),
    [
        (inspect_checkpoint.main, "s3:///x", "argument DIR: s3:///x names no bucket; write s3://BUCKET/FOLDER"),
        (inspect_checkpoint.main, "memory://x", "memory://x is not a folder; name one that holds a checkpoint"),
        (diff_checkpoints.main, "memory://x ftp://host/x", "argument B: ftp:// is not a store that can be used"),
        (diff_checkpoints.main, "memory://x memory://y", "memory://x is not a folder"),
        (convert.main, "--load-dir memory://x --save-dir y", "memory://x is not a folder"),
        (convert.main, "--load-dir s3://id:hunter2@b/x --save-dir y", "s3://*** holds a credential or a port"),
        (convert.main, "--load-dir x --save-dir memory://y", "argument --save-dir: no URL can be used here"),
        (convert.main, "--load-dir x --save-dir y --base-model memory://z", "--base-model: no URL can be used here"),
        (doctor.main, "--save memory://x", "argument --save: no URL can be used here; give a folder"),
    ],
)
def test_a_url_that_a_command_cannot_use_is_refused_in_a_line(
    command: Callable[[list[str]], int], words: str, line: str, capsys
) -> None:
    with empty_memory_store():
        try:
            status = command(words.split())
        except SystemExit as end:
            status = int(end.code or 0)
    said = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert len(said) == 1
    assert line in said[0]
    assert "hunter2" not in said[0]
