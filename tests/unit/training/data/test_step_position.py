"""Steps found from checkpoints: what is read of them, and damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.errors import CheckpointError
from megatron.training.step_position import read_saved_run


def test_an_index_that_lacks_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"format_version": 1, "tensors": {}}')
    with pytest.raises(CheckpointError, match="does not record the run that wrote it"):
        read_saved_run(tmp_path)
