"""Every layout and feature on a pretended H100: devices, host waits, and budgets of kernels and memory."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gpu_dry_run.run import COMMON, GPT2_345M, LLAMA_8B
from megatron.dry_run.pretended_cuda import find_compiler
from tests.harness.dry_runs import DryRunCase, DryRunResult, run_dry_runs
from tests.unit.dry_run.layouts import layouts

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this")

Wait = tuple[str, str, str]
PASSES = ("begin", "batch", "forward", "backward", "reduction")

ALLOWED: dict[Wait, tuple[int, str]] = {
    ("optimizer", "megatron/core/optimizer/clip_grads.py", "value read"): (
        1,
        "the host decides by the gradient norm whether to update, and how far to clip",
    ),
    ("optimizer", "megatron/core/optimizer/inner_optimizer.py", "copy from cpu to cuda"): (
        1,
        "the clip factor goes back to the device; avoidable",
    ),
    ("end", "megatron/training/training_step.py", "copy from cpu to cuda"): (
        2,
        "the host's reasons to exit go to the device; avoidable",
    ),
    ("end", "megatron/training/training_step.py", "value read"): (
        1,
        "the loss is logged and the ranks' exit agreed on",
    ),
    ("end", "megatron/core/optimizer/optimizer.py", "value read"): (1, "--log-params-norm is logged"),
}
"""Waits of one step by phase, file and kind: how many at most, and why."""

FORWARD_WAITS: dict[str, str] = {
    "megatron/core/transformer/rotary_pos_embedding.py": "rotary frequencies are made on the CPU in each forward pass",
    "megatron/core/models/gpt/gpt_embedding.py": "the factor of --scale-embeddings is a CPU tensor in each pass",
    "megatron/core/context_parallel/ring_attention.py": "the seed of attention dropout is read from the device",
}
"""Files that make the host wait in a forward pass today, and should not."""

BUDGETS: dict[str, tuple[DryRunCase, int, float]] = {
    "345M": (DryRunCase("345M", (*GPT2_345M, *COMMON, "--global-batch-size", "8")), 1182, 15.15),
    "8B": (
        DryRunCase(
            "8B",
            (
                *LLAMA_8B,
                *COMMON,
                "--global-batch-size",
                "4",
                "--tensor-model-parallel-size",
                "2",
                "--sequence-parallel",
            ),
            8,
        ),
        2679,
        58.49,
    ),
}
"""Models of their whole size, with the operations of a step of one micro-batch and the GiB of its peak."""

CASES = {case.name: case for case in layouts()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DryRunResult]:
    """Run every case once, all in one process."""
    budgeted = [case for case, _, _ in BUDGETS.values()]
    return run_dry_runs([*CASES.values(), *budgeted], tmp_path_factory.mktemp("pretended-cuda"))


def waits_of(result: DryRunResult) -> Counter[Wait]:
    return Counter(
        (wait["phase"], wait["where"].partition(":")[0], wait["what"]) for wait in result.report.get("waits", ())
    )


def files_that_wait(case: DryRunCase) -> list[str]:
    """Return the files of ``FORWARD_WAITS`` that a case runs into."""
    is_rotary = "rope" in case.flags
    is_scaled = "--scale-embeddings" in case.flags
    has_seed = "cp2-p2p" in case.name and "--attention-dropout 0.1" in case.name
    return [file for file, applies in zip(FORWARD_WAITS, (is_rotary, is_scaled, has_seed)) if applies]


def with_known_waits(case: DryRunCase) -> object:
    files = files_that_wait(case)
    reason = "; ".join(f"{file}: {FORWARD_WAITS[file]}" for file in files)
    return pytest.param(case.name, marks=[pytest.mark.xfail(reason=reason, strict=True)] if files else [])


def test_there_are_many_layouts() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_no_tensor_is_on_another_device(results: dict[str, DryRunResult], name: str) -> None:
    assert results[name].error == ""
    assert results[name].report["operations"] > 100


@pytest.mark.parametrize("name", [with_known_waits(case) for case in CASES.values()])
def test_the_host_never_waits_in_the_passes(results: dict[str, DryRunResult], name: str) -> None:
    assert [wait for wait in waits_of(results[name]) if wait[0] in PASSES] == []


@pytest.mark.parametrize("name", CASES)
def test_the_rest_of_a_step_waits_only_where_it_must(results: dict[str, DryRunResult], name: str) -> None:
    known = {(phase, file) for phase in ("forward",) for file in files_that_wait(CASES[name])}
    seen = {wait: count for wait, count in waits_of(results[name]).items() if wait[:2] not in known}
    assert {wait: count for wait, count in seen.items() if count > ALLOWED.get(wait, (0, ""))[0]} == {}


def test_every_allowed_wait_still_happens(results: dict[str, DryRunResult]) -> None:
    seen = Counter[Wait]()
    for name in CASES:
        seen |= waits_of(results[name])
    assert {wait: seen[wait] for wait in ALLOWED} == {wait: count for wait, (count, _) in ALLOWED.items()}


@pytest.mark.parametrize("name", BUDGETS)
def test_kernels_and_memory_do_not_grow(results: dict[str, DryRunResult], name: str) -> None:
    _, operations, peak_gib = BUDGETS[name]
    report = results[name].report
    assert report["operations"] <= operations
    assert report["peak_bytes"] / 2**30 <= peak_gib


def test_memory_and_parameters_of_345m(results: dict[str, DryRunResult]) -> None:
    report = results["345M"].report
    parameters = report["parameters"]
    assert parameters == 354_871_296
    # Weights of 16 bits, gradients of 32, and main weights and two moments of 32; buffers are padded a little.
    for holder, width in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        assert report["peak_holders"][holder] == pytest.approx(width * parameters, rel=0.01)
    # The logits themselves at least, and at most with two copies of them in float32.
    assert 2 * 8192 * 50304 <= report["peak_holders"]["logits"] <= 10 * 8192 * 50304
