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

# SLURM's commands on one machine: a job runs until it has ended, each of its machines is a process.
SLURM = {
    "sbatch": """#!/bin/bash
set -e
nodes=
while [[ "$1" == --* ]]; do
    if [[ "$1" == --nodes=* ]]; then nodes=${1#--nodes=}; fi
    shift
done
asked() { sed -n "s/^#SBATCH --$1=//p" "$script"; }
script=$1
shift
export SLURM_NNODES=${nodes:-$(asked nodes)} SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=machines
output=$(asked output)
bash "$script" "$@" > "${output/\\%j/$SLURM_JOB_ID}" 2>&1
""",
    "scontrol": "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n",
    "srun": """#!/bin/bash
[[ "$1" == --kill-on-bad-exit=1 ]] && shift
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & ranks+=($!); done
for rank in "${ranks[@]}"; do wait "$rank" || exit $?; done
""",
}


def run_tutorial(name: str, folder: Path) -> CommandResult:
    """Run the blocks of a page in a folder that looks like the repository's root."""
    blocks = re.findall(r"```bash\n(.*?)```", (TUTORIALS / f"{name}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for part in ("examples", "docs", "tools", "pretrain_gpt.py"):
        (folder / part).symlink_to(REPOSITORY / part)
    tools = commands(folder / "bin")
    for name, text in SLURM.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
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


@pytest.mark.long
def test_a_job_of_two_machines_resumes_and_goes_on_with_one(tmp_path: Path) -> None:
    run_tutorial("several_machines_with_slurm", tmp_path)
    lines = [
        line["iteration"] for line in read_metrics(tmp_path / "tutorial/slurm/metrics.jsonl") if "split" not in line
    ]
    assert lines == list(range(1, 13))
    starts = (tmp_path / "tutorial/slurm/run_record/starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["world_size"] for line in starts] == [2, 2, 1]
    logs = sorted((tmp_path / "tutorial").glob("job-*.log"), key=lambda path: path.stat().st_mtime)
    assert [sorted(set(re.findall(r" iteration +(\d+)/", log.read_text())), key=int) for log in logs] == [
        ["1", "2", "3", "4"],
        ["5", "6", "7", "8"],
        ["9", "10", "11", "12"],
    ]


@pytest.mark.long
def test_the_slow_rank_and_the_line_where_it_hangs_are_found(tmp_path: Path) -> None:
    done = run_tutorial("slow_or_hung", tmp_path)
    stragglers = [line for line in done.stdout.splitlines() if line.startswith(" stragglers |")]
    assert " rank 1 takes " in stragglers[-1]
    assert " most at forward (" in stragglers[-1]
    assert "forward-compute" in done.stdout
    assert "rank1.iterations5-6.pt.trace.json" in done.stdout
    assert done.stdout.count("rank 1 |") == 2
    (hang,) = [line for line in done.stdout.splitlines() if line.startswith("HANG: rank ")]
    assert hang.startswith("HANG: rank 1 on ")
    assert "the run ended with status 1" in done.stdout
    assert re.search(r"^\d+:.*faulty\.py", done.stdout, re.MULTILINE)
    assert (tmp_path / "tutorial/hang.svg").read_text().startswith("<svg")
