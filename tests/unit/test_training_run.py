"""The helper with which end-to-end tests run commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.training_run import run_command, run_training

SCRIPT = """
import json, os, sys
print(*(os.environ.get(name) for name in ("OMP_NUM_THREADS", "EXTRA", "RANK")))
print("to stderr", file=sys.stderr)
with open(sys.argv[sys.argv.index("--metrics-jsonl") + 1], "w") as file:
    for line in (
        {"iteration": 1, "lm_loss": 3.5},
        {"iteration": 2, "lm_loss": 2.5},
        {"iteration": 2, "split": "validation", "lm_loss": 2.75},
    ):
        print(json.dumps(line), file=file)
sys.exit(3)
"""


def test_output_status_and_metrics_of_a_run_are_read_back(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "5")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = run_training(["--metrics-jsonl", "metrics.jsonl"], script=str(script), cwd=tmp_path, env={"EXTRA": "7"})
    assert result.returncode == 3
    assert result.stdout == "1 7 None\n"
    assert result.stderr == "to stderr\n"
    assert result.losses() == [3.5, 2.5]
    assert result.evaluations("validation") == [{"iteration": 2, "split": "validation", "lm_loss": 2.75}]
    with pytest.raises(AssertionError, match="exit status 3 from"):
        result.check()


def test_run_without_metrics_has_none(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    assert run_training(["--save", "nowhere"], script=str(script), cwd=tmp_path).check().metrics == ()


def test_command_past_its_limit_fails_with_what_it_printed() -> None:
    program = "import time; print('so far', flush=True); time.sleep(600)"
    with pytest.raises(AssertionError, match=r"ran past 1\.5 s[^$]*so far"):
        run_command([sys.executable, "-c", program], timeout_s=1.5)
