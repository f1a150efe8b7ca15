"""A rank that is slow at one part of its iterations is named in the log and the metrics, and since when."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.toy_run import toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training


@pytest.mark.full
def test_a_slow_rank_is_named_with_its_part_and_since_when(tmp_path: Path) -> None:
    flags = "--train-iters 12 --log-interval 3 --log-straggler --straggler-minmax-count 2 --eval-interval 100"
    faults = Faults(rank=1, slow_from=7, slow_s=0.3)
    run = fork_training(toy_args(tmp_path, flags), 2, faults).check()
    lines = [line for line in run.stdout.splitlines() if line.startswith(" stragglers |")]
    assert [re.search(r"iterations (\d+) to (\d+)", line).groups() for line in lines] == [  # type: ignore[union-attr]
        ("1", "3"),
        ("4", "6"),
        ("7", "9"),
        ("10", "12"),
    ]
    for line in lines[2:]:
        assert " rank 1 takes " in line
        assert " most at forward (" in line
        assert re.search(r"slowest: 1 \([\d.]+ ms\), 0 \([\d.]+ ms\) \| fastest: 0 ", line), line
    told = [line["stragglers"] for line in run.iterations() if "stragglers" in line]
    assert len(told) == 4
    assert [item["slow_rank"] for item in told[2:]] == [1, 1]
    # Waiting for the slow rank is the other one's communication, not its own time.
    milliseconds = told[3]["milliseconds"]
    assert milliseconds["forward"][1] > milliseconds["forward"][0]
    assert milliseconds["communication"][0] > milliseconds["communication"][1]
    assert told[3]["since_iteration"] in (1, 4, 7)


@pytest.mark.long
def test_without_the_flag_nothing_is_gathered(tmp_path: Path) -> None:
    run = fork_training(toy_args(tmp_path, "--train-iters 4"), 2).check()
    assert " stragglers |" not in run.stdout
    assert not any("stragglers" in line for line in run.iterations())
