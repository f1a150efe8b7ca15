"""The tutorials: every command block of a page is run, in the order of the page."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.e2e.test_examples import commands
from tests.harness.training_run import REPOSITORY, CommandResult, read_metrics, run_command

TUTORIALS = REPOSITORY / "docs" / "tutorials"


def run_tutorial(name: str, folder: Path) -> CommandResult:
    """Run the blocks of a page in a folder that looks like the repository's root."""
    blocks = re.findall(r"```bash\n(.*?)```", (TUTORIALS / f"{name}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for part in ("examples", "docs", "pretrain_gpt.py"):
        (folder / part).symlink_to(REPOSITORY / part)
    tools = commands(folder / "bin")
    script = folder / "blocks.sh"
    script.write_text("set -eo pipefail\n" + "\n".join(blocks), encoding="utf-8")
    environment = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    environment |= {"MEGATRON_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    return run_command(["bash", script], env=environment, timeout_s=500, cwd=folder).check()


@pytest.mark.long
def test_the_first_model_learns_resumes_and_writes(tmp_path: Path) -> None:
    done = run_tutorial("first_model", tmp_path)
    lines = [line for line in read_metrics(tmp_path / "tutorial/model/metrics.jsonl") if "split" not in line]
    assert [line["iteration"] for line in lines] == list(range(1, 61))
    assert lines[0]["lm_loss"] == pytest.approx(8.3, abs=0.3)
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"] - 1
    assert "Return the number of" in done.stdout[-2000:]


@pytest.mark.long
def test_a_megatron_script_is_read_run_and_its_checkpoint_converted(tmp_path: Path) -> None:
    done = run_tutorial("from_a_megatron_script", tmp_path)
    assert "--tensor-model-parallel-size 2" in done.stdout
    assert "iteration        6/       6" in done.stdout
    assert (tmp_path / "tutorial/for_megatron/latest_checkpointed_iteration.txt").is_file()


@pytest.mark.long
def test_a_hugging_face_model_is_trained_on_and_given_back(tmp_path: Path) -> None:
    done = run_tutorial("continue_a_hugging_face_model", tmp_path)
    losses = [line["lm_loss"] for line in read_metrics(tmp_path / "tutorial/continued/metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.3
    before, after = (
        json.loads((tmp_path / "tutorial" / name / "config.json").read_text()) for name in ("llama", "given_back")
    )
    assert after["architectures"] == before["architectures"]
    assert done.stdout.splitlines()[-1].startswith("The rooms")
