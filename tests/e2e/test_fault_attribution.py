"""Faults of data, weights and devices are told apart and named; only the trials know what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.fault_trials import KINDS, LAYOUTS, FaultTrial

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
