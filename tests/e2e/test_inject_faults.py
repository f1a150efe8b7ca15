"""Faults that a command injects, and faults that are told apart and named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron.cli.chaos import main
from tests.harness.fault_trials import KINDS, LAYOUTS, FaultTrial
from tests.harness.training_run import REPOSITORY, CommandResult, run_command

TOOL = REPOSITORY / "tools" / "inject_faults.py"


def inject(folder: Path, flags: str, timeout_s: float = 300.0) -> CommandResult:
    return run_command([sys.executable, TOOL, "--folder", folder / "faults", *flags.split()], timeout_s=timeout_s)


@pytest.mark.parametrize(
    "faults", [["--corrupt checkpoint"], pytest.param(["--kill all", "--corrupt checkpoint"], marks=pytest.mark.long)]
)
def test_a_killed_run_and_a_damaged_checkpoint_cost_nothing(faults: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = f"{' '.join(faults)} --rounds {len(faults)} --at-iteration 12 --seed 5 --json {report}"
    result = inject(tmp_path, f"{flags} --processes 1 --train-iters 20").check()
    content = json.loads(report.read_text())
    assert content["held"] is True
    assert {item["fault"] for item in content["rounds"]} == set(faults)
    assert [item["status"] for item in content["rounds"]] == [-9] * len(faults)
    assert "ok      losses: bitwise equal in all 20 iterations; the last loss is " in result.stdout
    assert "ok      checkpoints: all are readable (iterations " in result.stdout


# Each of these needs torchrun, and two ranks that notice each other.
@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--kill any --kill all --kill launcher --rounds 6", id="kill"),
        pytest.param("--stop any --rounds 2", id="stop"),
        pytest.param("--partition any --rounds 3", id="partition"),
        pytest.param("--slow any:4 --fill-disk --rounds 4 --for-seconds 2", id="slow-and-full-disk"),
        pytest.param("--corrupt checkpoint --corrupt sample --rounds 4", id="corrupt-files"),
        pytest.param("--corrupt weight --corrupt gradient --rounds 4", id="corrupt-numbers"),
    ],
)
def test_faults_of_two_ranks_cost_nothing(flags: str, tmp_path: Path) -> None:
    inject(tmp_path, f"{flags} --every-seconds 1 --train-iters 400 --seed 3", timeout_s=900.0).check()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "error: no fault is selected; pass for example --kill any"),
        ("--kill nobody", "error: --kill nobody is not a rank; use a number, or any or all or launcher"),
        ("--slow 1", "error: --slow 1 is not RANK:FACTOR with a factor above 1 and of at most 1000, as in 1:3"),
        ("--kill any --rounds 0", "error: --rounds 0 is not greater than 0"),
        ("--kill any --every-seconds nan", "error: --every-seconds nan is not greater than 0"),
        (
            "--kill any --processes 3 -- true",
            "error: --processes configure the small run, but a command after -- replaces it",
        ),
        (
            "--corrupt weight -- true",
            "error: --corrupt weight and --corrupt gradient need a command that runs a Python",
        ),
        ("--corrupt sample -- true", "error: --corrupt sample needs a command with --data-path PREFIX"),
        (
            "--kill any -- no-such-command",
            "error: cannot start no-such-command: No such file or directory; change what follows --",
        ),
        ("--kill any --json no/such/file", "error: --json no/such/file: its folder does not exist"),
        ("--kill 2", "error: --kill 2: there is no rank 2 in this run; use one of: 0, 1"),
        ("--stop any --processes 1", "error: --stop any: no other rank waits for the only rank of this run"),
        ("--kill any --reference nothing", "error: --reference nothing is not a file"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(flags: str, reason: str, tmp_path: Path, capsys) -> None:
    status = main(["--folder", str(tmp_path / "faults"), *flags.split()])
    printed = capsys.readouterr().err.splitlines()
    assert status == 2
    assert printed[-1].startswith(reason)


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine").touch()
    assert main(["--folder", str(tmp_path), "--kill", "any"]) == 2
    assert capsys.readouterr().err == f"error: --folder {tmp_path} is not empty; use a new folder\n"


NUM_FAULTS = 40
LEAST_NAMED = 38


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("data", "one"), ("weights", "tp2"), ("transient device", "pp2"), ("persistent device", "dp2"), ("data", "dp2")],
)
def test_a_fault_is_named(kind: str, layout: str, tmp_path: Path) -> None:
    trial = FaultTrial.drawn(7, kind, layout)
    line = trial.happen(tmp_path)
    assert trial.is_named(line), (trial, line)


@pytest.mark.long
def test_of_forty_faults_nearly_all_are_named(tmp_path: Path) -> None:
    pairs = [(kind, layout) for kind in KINDS for layout in LAYOUTS]
    missed = []
    for number in range(NUM_FAULTS):
        trial = FaultTrial.drawn(100 + number, *pairs[number % len(pairs)])
        folder = tmp_path / str(number)
        folder.mkdir()
        line = trial.happen(folder)
        if not trial.is_named(line):
            missed.append((trial, line))
    print(f"{NUM_FAULTS - len(missed)} of {NUM_FAULTS} named rightly")
    report = "".join(f"\n{trial}: {line or 'nothing was found'}" for trial, line in missed)
    assert NUM_FAULTS - len(missed) >= LEAST_NAMED, report
