"""Faults are done to a run round after round, and what goes wrong by them is found."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from megatron.core.errors import CheckpointError
from megatron.verification.faults import campaign
from megatron.verification.faults.campaign import Campaign, Plan, Report
from megatron.verification.faults.injection import Fault
from megatron.verification.faults.launch import AttackedCommand
from tests.unit.verification.faults import pretended_training

KILL = Fault("kill", "any")
PATIENCE_S = 600.0
"""Longer than any start takes: a test waits for what happens, on a busy machine too."""


def attack(
    folder: Path, fault: Fault = KILL, wrong: str = "nothing", rounds: int = 2, tolerance: float = 0.0
) -> Report:
    plan = Plan((fault,), rounds, 5, 4, 1.0, 0.2, PATIENCE_S, tolerance)
    command = AttackedCommand((sys.executable, str(pretended_training.__file__), wrong))
    return Campaign(command, plan, folder, lambda line: None).run(None)


@pytest.fixture(autouse=True)
def _checkpoints_are_readable(monkeypatch) -> None:
    monkeypatch.setattr(campaign, "read_checkpoint", lambda folder: None)


def checks(report: Report) -> dict[str, bool]:
    return {check.name: check.held for check in report.checks}


def test_a_run_that_goes_on_after_each_kill_holds(tmp_path: Path) -> None:
    report = attack(tmp_path)
    assert report.held
    assert [item.status for item in report.rounds] == [-9, -9]
    assert [item.rank for item in report.rounds] == [0, 0]
    first, second = report.rounds
    assert first.resumed_at == 0
    assert 4 <= first.iteration < pretended_training.ITERATIONS
    assert second.resumed_at >= first.iteration
    assert checks(report) == {"losses": True, "checkpoints": True}
    assert report.to_json()["held"] is True
    assert "ok      losses: bitwise equal in all 30 iterations; the last loss is " in report.to_text()


def test_a_last_bit_that_differs_is_found(tmp_path: Path) -> None:
    report = attack(tmp_path, wrong="forgets", rounds=1)
    assert checks(report) == {"losses": False, "checkpoints": True}
    assert not report.held
    assert "FAILED  losses: iterations [" in report.to_text()


@pytest.mark.long
def test_a_tolerance_is_of_the_last_loss(tmp_path: Path) -> None:
    assert attack(tmp_path, wrong="forgets", rounds=1, tolerance=1e-6).held


def test_a_process_that_stays_is_found_and_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(campaign, "LEFT_AFTER_S", 0.5)
    with pytest.raises(campaign.LaunchError, match=r"processes \[\d+\] of .* were still running 0.5 s after its end"):
        attack(tmp_path, wrong="leaves", rounds=1)


def test_a_restart_that_fails_is_said_with_its_last_words(tmp_path: Path) -> None:
    report = attack(tmp_path, wrong="fails", rounds=1)
    assert checks(report) == {"starts": False, "losses": False, "checkpoints": True}
    (said,) = (check.detail for check in report.checks if check.name == "starts")
    assert said.startswith("the command ended with status 1; ")
    assert said.endswith("error: something is wrong")


def test_a_checkpoint_that_does_not_load_is_found(tmp_path: Path, monkeypatch) -> None:
    def read(folder: Path) -> None:
        raise CheckpointError(f"{folder} is damaged")

    monkeypatch.setattr(campaign, "read_checkpoint", read)
    assert checks(attack(tmp_path, rounds=1)) == {"losses": True, "checkpoints": False}


def test_a_damaged_checkpoint_that_is_loaded_is_found(tmp_path: Path) -> None:
    report = attack(tmp_path, Fault("corrupt", "checkpoint"), rounds=1)
    assert "the damaged checkpoint of iteration" in report.rounds[0].problem
    assert not report.held


def test_a_run_that_is_over_before_its_faults_did_not_hold(tmp_path: Path) -> None:
    report = attack(tmp_path, rounds=100)
    assert not report.held
    assert checks(report)["faults"] is False


@pytest.mark.long
def test_a_slow_run_goes_on(tmp_path: Path) -> None:
    report = attack(tmp_path, Fault("slow", "0", 3.0))
    assert report.held
    assert [item.status for item in report.rounds] == [None, None]


def test_a_run_that_does_not_end_by_a_fault_is_a_problem(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(campaign.Injection, "_begin", lambda *args: None)
    monkeypatch.setattr(campaign.Launch, "wait", lambda launch, patience_s: _impatient(launch, patience_s))
    report = attack(tmp_path, rounds=1)
    assert report.rounds[0].problem.startswith("the command did not end")


_wait = campaign.Launch.wait


def _impatient(launch: campaign.Launch, patience_s: float) -> int:
    return _wait(launch, patience_s if math.isinf(patience_s) else 0.2)
