"""What share of a GPU's peak whole models are predicted to reach, as docs/gpu_dry_run.md says."""

from __future__ import annotations

import pytest

from benchmarks.gpu_dry_run.run import CASES, COMMON
from megatron.planner.simulation.fake_cuda import find_compiler
from tests.harness.dry_runs import DryRunCase, run_dry_runs

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.long
@pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this")
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("GPT-2 345M without dropout, batch 128", 0.45),
        ("8B, TP 1 · DP 8", 0.57),
        ("8B, TP 2 + SP · DP 4, communication beside products and the update", 0.57),
    ],
)
def test_a_model_reaches_the_share_of_the_peak_that_is_said(name: str, least: float) -> None:
    case = BY_NAME[name]
    result = run_dry_runs([DryRunCase(name, (*case.flags, *COMMON), case.world_size)])[name]
    assert result.error == ""
    assert result.report["mfu"] >= least
    assert len(result.report["waits"]) <= 5
