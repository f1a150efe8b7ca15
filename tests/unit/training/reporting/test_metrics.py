"""Metrics files that a run finds, and what are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.core.errors import ConfigurationError
from megatron.training.reporting.metrics import set_superseded_lines_aside


def test_a_file_that_is_no_text_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=re.escape(f"--metrics-jsonl {path} holds no text; give the name of")):
        set_superseded_lines_aside(path, 0)
    assert path.read_bytes() == b"\xff\xfe\x00"


def test_a_device_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(Path, "read_text", lambda path, **_: read.append(path) or "")
    set_superseded_lines_aside(Path("/dev/zero"), 0)
    assert not read
