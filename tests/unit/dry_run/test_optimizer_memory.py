"""Offloaded and narrow optimizer state on a pretended H100: memory, copies, waits, and what the policy auto chooses."""

from __future__ import annotations

import pytest

from benchmarks.gpu_dry_run.run import COMMON, LLAMA_8B
from megatron.config.arguments import resolve_arguments
from megatron.planner.explanation import with_known_vocabulary
from megatron.planner.gpu import find_gpu
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.training.theoretical_memory_usage import activation_bytes
from tests.harness.dry_runs import DryRunCase, DryRunResult, run_dry_runs

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this"),
]

GIB = 2**30
SMALL = (*LLAMA_8B, *COMMON, "--global-batch-size", "1", "--num-layers", "2")
LARGE = (*LLAMA_8B, *COMMON, "--global-batch-size", "1", "--num-layers", "14", "--micro-batch-size", "1")
"""Fourteen layers of an 8B model with all their state are more than a GPU holds."""
AUTO = ("--optimizer", "hybridadam", "--optimizer-offload-policy", "auto")
CASES = (
    DryRunCase("plain", SMALL, num_steps=2),
    DryRunCase("half", (*SMALL, "--optimizer", "hybridadam", "--overlap-cpu-optimizer-d2h-h2d"), num_steps=2),
    DryRunCase("room", (*SMALL, *AUTO)),
    DryRunCase("large", LARGE),
    DryRunCase("large auto", (*LARGE, *AUTO)),
    DryRunCase(
        "narrow",
        (*SMALL, *("--use-precision-aware-optimizer", "--main-params-dtype", "fp16", "--exp-avg-dtype", "bf16")),
    ),
)


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    """Run every case once, all in one process."""
    results: dict[str, DryRunResult] = run_dry_runs(CASES)
    assert {name: result.error for name, result in results.items() if result.error} == {}
    return {name: result.report for name, result in results.items()}


def copied(report: dict, direction: str) -> dict[str, int]:
    """Return the bytes that the optimizer copied in a direction by file."""
    return {
        copy["where"].partition(":")[0]: copy["bytes"]
        for copy in report["host_copies"]
        if copy["phase"] == "optimizer" and copy["direction"] == direction
    }


def test_half_of_the_state_leaves_the_device_and_its_bytes_cross(reports: dict[str, dict]) -> None:
    plain, half = reports["plain"], reports["half"]
    parameters = plain["parameters"]
    on_host = -(-parameters // 256) * 128
    assert plain["peak_holders"]["optimizer"] == pytest.approx(12 * parameters, rel=1e-5)
    assert half["peak_holders"]["optimizer"] == pytest.approx(12 * (parameters - on_host), rel=1e-5)
    assert plain["peak_bytes"] - half["peak_bytes"] == pytest.approx(12 * on_host, rel=1e-5)
    file = "megatron/core/optimizer/cpu_offloading.py"
    # The first gradients come while the device updates its own part, and parameters go while gradients come.
    for copy in half["host_copies"]:
        if copy["where"].startswith(file):
            assert copy["predicted_ms"] >= copy["bytes"] / 64e9 * 1e3
            assert 0 < copy["hidden_ms"] < copy["predicted_ms"]
    assert copied(half, "to the host") == {file: 4 * on_host}
    assert copied(half, "to the device") == {file: 2 * on_host}
    assert copied(plain, "to the host") == copied(plain, "to the device") == {}


def test_the_host_waits_for_the_norm_and_for_copies_only(reports: dict[str, dict]) -> None:
    waits = [(wait["phase"], wait["what"]) for wait in reports["half"]["waits"] if wait["phase"] == "optimizer"]
    assert waits[0] == ("optimizer", "value read")
    assert set(waits[1:]) == {("optimizer", "copies")}
    assert [wait for wait in reports["plain"]["waits"] if wait["phase"] == "optimizer"] == []


def test_auto_fills_the_device_up_to_its_margin(reports: dict[str, dict]) -> None:
    memory = find_gpu("h100-80gb").memory_bytes
    assert not reports["large"]["fits"]
    assert reports["room"]["peak_holders"]["optimizer"] == reports["plain"]["peak_holders"]["optimizer"]
    chosen = reports["large auto"]
    assert 0.8 * memory < chosen["peak_bytes"] <= memory - 2 * GIB
    assert 0 < chosen["peak_holders"]["optimizer"] < reports["large"]["peak_holders"]["optimizer"]


def test_narrow_state_takes_fewer_bytes(reports: dict[str, dict]) -> None:
    assert reports["narrow"]["peak_holders"]["optimizer"] == pytest.approx(8 * reports["plain"]["parameters"], rel=1e-5)


@pytest.mark.parametrize(("name", "flags"), [("plain", SMALL), ("large", LARGE)])
def test_the_estimate_of_activations_is_no_less_and_not_much_more(
    reports: dict[str, dict], name: str, flags: tuple[str, ...]
) -> None:
    holders = reports[name]["peak_holders"]
    seen = holders["activations"] + holders["logits"] + holders["buffers"]
    estimate = activation_bytes(with_known_vocabulary(resolve_arguments(flags, 1).config), 0)
    # Logits in float32 are what torch's own operations keep; Triton's program does without.
    logits = 8192 * 128256 * 8
    assert seen <= estimate <= 1.1 * seen + logits
