"""The bubble over real messages between sleeping stages is the one that the schedules' papers promise."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.pipeline_bubble import CASES, Case, measure

RECORDED = Path(__file__).parents[4] / "benchmarks" / "results" / "pipeline_bubble_cpu.json"
TWO_POINTS = 0.02


def check(case: Case, bubble: float, bubble_of_1f1b: float) -> None:
    if case.schedule == "zero-bubble":
        assert bubble <= 0.45 * bubble_of_1f1b
    else:
        assert bubble == pytest.approx(case.formula, abs=TWO_POINTS)


@pytest.mark.long
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_measured_bubbles_are_those_of_the_formulas(pp: int) -> None:
    bubbles = {case: min(measure(case, unit_s=0.1, repeats=3)) for case in CASES if case.pp == pp}
    for case, bubble in bubbles.items():
        check(case, bubble, bubbles[Case("1f1b", pp, 2 * pp)])


def test_the_committed_measurements_are_those_of_the_formulas() -> None:
    rows = json.loads(RECORDED.read_text())["rows"]
    bubbles = {Case(**{key: row[key] for key in asdict(CASES[0])}): row["smallest"] for row in rows}
    assert tuple(bubbles) == CASES
    for case, bubble in bubbles.items():
        check(case, bubble, bubbles[Case("1f1b", case.pp, 2 * case.pp)])
