"""The script that takes GPT-2 345M from its first step to its first words, with a model of seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness.training_run import REPOSITORY, run_command

SCRIPT = REPOSITORY / "benchmarks" / "real_345m" / "run.py"


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read under /proc")
def test_the_whole_life_of_a_toy_is_run_and_reported(tmp_path: Path) -> None:
    words = ("--toy", "--seq-length", "64", "--folder", tmp_path / "run", "--output", tmp_path / "result")
    run_command([sys.executable, SCRIPT, *words], timeout_s=600.0).check()
    result = json.loads((tmp_path / "result.json").read_text())
    first, second, converted, generated = result["phases"]
    for phase in (first, second):
        assert sorted(phase["peak_mib"]) == [f"rank {rank}" for rank in range(4)]
        assert min(phase["peak_mib"].values()) > 50
        assert phase["figures"]["checkpoint_files"] == 4
    assert second["figures"]["loss"] < first["figures"]["loss"]
    assert converted["figures"]["checkpoint_files"] == 1
    assert len(generated["figures"]["text"].split()) == 6 + 20
    assert (tmp_path / "result.md").read_text().count("\n| ") == 5
