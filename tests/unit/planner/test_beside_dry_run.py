"""The planned peak of memory is compared with the peak of a dry run on a simulated H100, with NVFP4 on a B200."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import pytest

from benchmarks.planner.beside_dry_run import SHARDED, TWO_CHUNKS, ZERO_BUBBLE, LayoutCase, layout_cases
from megatron.planner.implementations import NATIVE
from megatron.planner.memory import model_pieces, stage_memory
from megatron.planner.plan import Plan
from megatron.planner.simulation.fake_cuda import find_compiler
from tests.harness.dry_runs import DryRunCase, run_dry_runs

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this")


@pytest.mark.long
def test_operands_of_late_weight_gradients_and_pools_of_full_buckets_are_counted() -> None:
    wanted = {
        f"8B tp 2 pp 2 cp 1 of 8 {' '.join(word.removeprefix('--') for word in more)}"
        for more in (ZERO_BUBBLE, (*TWO_CHUNKS, *SHARDED))
    }
    several = [case for case in layout_cases() if case.name in wanted]
    assert len(several) == len(wanted)
    assert_close([LayoutCase(case.name, case.flags, case.world_size, case.stages[-1:]) for case in several])


@pytest.mark.long
def test_weights_and_activations_in_nvfp4_are_counted() -> None:
    several = [case for case in layout_cases() if "fp4-format" in case.name]
    assert len(several) == 2
    assert_close(several)


@pytest.mark.long
def test_experts_tokens_are_counted_where_they_are_sorted_and_sent() -> None:
    several = [case for case in layout_cases() if case.name.startswith("MoE tp 2") and "moe-layer-freq" in case.name]
    assert len(several) == 1
    assert_close(several)


@pytest.mark.long
def test_peaks_of_all_layouts_are_within_two_hundredths() -> None:
    several = list(layout_cases())
    assert len({case.name for case in several}) >= 60
    assert_close(several)


def assert_close(several: Iterable[LayoutCase]) -> None:
    runs = {f"{case.name}, stage {stage}": (case, stage) for case in several for stage in case.stages}
    cases = [
        DryRunCase(name, case.flags, case.world_size, stage * case.world_size // pipeline_size(case), case.gpu.name)
        for name, (case, stage) in runs.items()
    ]
    results = run_dry_runs(cases)
    assert {name: result.error for name, result in results.items() if result.error} == {}
    ratios = {name: planned(*run) / results[name].report["peak_bytes"] for name, run in runs.items()}
    assert far(ratios) == {}


def far(ratios: Mapping[str, float]) -> dict[str, float]:
    return {name: ratio for name, ratio in ratios.items() if not math.isclose(ratio, 1.0, rel_tol=0.02)}


def pipeline_size(case: LayoutCase) -> int:
    return case.config().parallel_sizes.pp


def planned(case: LayoutCase, stage: int) -> int:
    plan = Plan.of(case.config())
    return stage_memory(plan, stage, NATIVE, model_pieces(plan, NATIVE, case.gpu)).total
