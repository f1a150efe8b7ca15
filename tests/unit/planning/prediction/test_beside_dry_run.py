"""The peak of memory that the closed forms give, beside that of a dry run on a pretended H100."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from benchmarks.gpu_dry_run.run import COMMON, GPT2_345M, LLAMA_8B
from megatron.dry_run.pretended_cuda import find_compiler
from megatron.dry_run.vocabulary import with_known_vocabulary
from megatron.planning.plan import Plan
from megatron.planning.prediction.implementations import OURS
from megatron.planning.prediction.stage_memory import stage_memory
from megatron.training.config.arguments import resolve_arguments
from tests.harness.dry_runs import DryRunCase, run_dry_runs

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this"),
]

LLAMA_70B = (
    *(*LLAMA_8B, "--num-layers", "80", "--hidden-size", "8192", "--num-attention-heads", "64"),
    *("--ffn-hidden-size", "28672"),
)
AGAIN = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "layernorm")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "3")


def sizes(tp: int, pp: int, cp: int = 1) -> tuple[str, ...]:
    flags = ("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp))
    more = ("--sequence-parallel",) if tp > 1 else ()
    return (*flags, "--context-parallel-size", str(cp), *more)


def cases() -> Iterator[DryRunCase]:
    """Yield 34 ranks: of the whole 345M model, and of eight layers of the 8B and four a stage of the 70B model."""
    for tp, pp, more in itertools.product((1, 2), (1, 2), ((), FULL)):
        flags = (*GPT2_345M, *COMMON, *sizes(tp, pp), "--global-batch-size", str(8 * pp), *more)
        for stage in range(pp):
            yield DryRunCase(f"345M {tp} {pp} {more} {stage}", flags, tp * pp, stage * tp)
    for tp, pp, cp, more in (
        *((2, 1, 1, more) for more in ((), AGAIN, FULL, BLOCK)),
        *((tp, 1, 1, ()) for tp in (1, 4)),
        (2, 1, 2, ()),
        *((1, 2, 1, more) for more in ((), AGAIN)),
        (1, 4, 1, ()),
        (2, 2, 1, ("--num-layers-per-virtual-pipeline-stage", "2")),
    ):
        flags = (*LLAMA_8B, *COMMON, *sizes(tp, pp, cp), "--num-layers", "8", *more)
        for stage in (0, pp - 1)[: min(pp, 2)]:
            rank = stage * 8 // pp
            batch = ("--global-batch-size", str(4 * 8 // (tp * pp * cp)))
            yield DryRunCase(f"8B {tp} {pp} {cp} {more} {stage}", (*flags, *batch), 8, rank)
    for tp, pp, layers, more in ((8, 1, "4", ()), (8, 2, "8", ()), (4, 2, "8", AGAIN), (8, 1, "4", FULL)):
        flags = (*LLAMA_70B, *COMMON, *sizes(tp, pp), "--num-layers", layers, *more, "--global-batch-size", "8")
        for stage in range(pp):
            yield DryRunCase(f"70B {tp} {pp} {more} {stage}", flags, 16, stage * 16 // pp)


def test_peaks_are_within_three_hundredths(tmp_path_factory: pytest.TempPathFactory) -> None:
    several = list(cases())
    assert len(several) >= 30
    results = run_dry_runs(several, tmp_path_factory.getbasetemp() / "pretended-cuda")
    assert {name: result.error for name, result in results.items() if result.error} == {}
    ratios = {case.name: peak_of(case) / results[case.name].report["peak_bytes"] for case in several}
    assert {name: ratio for name, ratio in ratios.items() if not 0.97 < ratio < 1.03} == {}


def peak_of(case: DryRunCase) -> int:
    config = with_known_vocabulary(resolve_arguments(case.flags, case.world_size, needs_files=False).config)
    plan = Plan.of(config)
    return stage_memory(plan, plan.parallel_sizes.place(case.rank)["pp"], OURS).total
