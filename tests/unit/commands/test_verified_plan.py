"""--verify runs what was planned on a pretended GPU, says what differs, and takes nothing that it cannot run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli import planner_arguments
from megatron.cli.plan import main
from megatron.cli.planner_arguments import check_agreement, describe_verified, read_planned_run, verify_fitting_plan
from megatron.core.errors import ConfigurationError, InputError, MegatronError
from megatron.planner.gpu import H100
from megatron.planner.memory import StageMemory
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.planner.verified_stage import VerifiedStage
from megatron.verification.traffic import Volume

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"),
)
GIB = 2**30
PLANNED = StageMemory(
    parameters=7, weights=GIB, gradients=2 * GIB, optimizer=0, activations=3 * GIB, logits=0, buffers=0
)
VERIFIED = VerifiedStage(
    stage=1,
    rank=4,
    num_microbatches=64,
    num_run=8,
    planned=PLANNED,
    parameters=7,
    peak_bytes=6 * GIB,
    holders={"weights": GIB},
    num_communications=5,
    unlike=(),
)


@pytest.mark.full
@pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this")
def test_the_best_layout_is_run_dry_and_is_as_planned(tmp_path: Path) -> None:
    where = ("--gpus", "2", "--global-batch-size", "2", "--precision", "bf16", "--verify")
    command = [sys.executable, "tools/plan.py", *MODEL, *where, "--json", str(tmp_path / "plan.json")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "verified by a dry run on a simulated GPU:\nstage 0 (rank 0, 1 micro-batches): as planned" in (done.stdout)
    stages = json.loads((tmp_path / "plan.json").read_text())["verified"]
    assert stages
    assert [each["agrees"] for each in stages] == [True] * len(stages)
    assert all(each["num_communications"] > 0 for each in stages)


def test_another_program_is_not_verified(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*MODEL, "--gpus", "2", "--global-batch-size", "2", "--verify", "--implementation", "megatron-te")
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--implementation is megatron-te; use --implementation ours" in line


def test_each_difference_fails_and_is_named() -> None:
    check_agreement([VERIFIED])
    unlike = (("all_reduce over tp", Volume(1, 10), Volume(2, 20)),)
    for other, told in (
        (dataclasses.replace(VERIFIED, parameters=8), "8 parameters, planned were 7"),
        (dataclasses.replace(VERIFIED, peak_bytes=7 * GIB), "peak 7168 MiB, planned 6144 (-14.29 %)"),
        (dataclasses.replace(VERIFIED, unlike=unlike), "all_reduce over tp: 2 times, 20 bytes; planned 1 times, 10"),
    ):
        with pytest.raises(MegatronError, match="not as planned on stage 1") as raised:
            check_agreement([VERIFIED, other])
        assert not isinstance(raised.value, InputError)
        text = "\n".join(describe_verified([other]))
        assert "stage 1 (rank 4, 8 of 64 micro-batches): NOT as planned" in text
        assert told in text


def test_a_plan_whose_dry_run_needs_more_memory_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*MODEL, "--global-batch-size", "2", "--micro-batch-size", "1", "--lr", "1e-4", "--mock-data")
    config = read_planned_run((*words, "--train-iters", "5"), 1).config
    large = dataclasses.replace(VERIFIED, peak_bytes=78 * GIB)
    monkeypatch.setattr(planner_arguments, "verify_plan", lambda config, gpu: [large])
    with pytest.raises(ConfigurationError, match="stage 1 needs 84198 of 81559 MiB in the dry run, planned were 10470"):
        verify_fitting_plan(config, H100)
