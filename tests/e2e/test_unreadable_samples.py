"""A sample that cannot be read ends a run of one process; see ``test_torchrun.py`` for several."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.toy_run import DATA, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training


@pytest.mark.parametrize("num_workers", ["0", "3"])
def test_one_process(num_workers: str, tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--num-workers", num_workers), faults=Faults(unreadable_sample=9))
    assert run.statuses == (2,)
    assert run.errors == (f"error: sample 9 from {DATA}: [Errno 5] Input/output error\n",)
    assert [line["iteration"] for line in run.iterations()] == [1, 2]
