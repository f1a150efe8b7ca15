"""fp8 on a simulated GPU: its kernels, its bytes, and what it is predicted to gain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.gpu_dry_run.run import COMMON, FP8, LLAMA_8B
from megatron.cli import gpu_dry_run
from megatron.config.resolution import BF16, PREDICTED_MS
from megatron.planner.gpu import A100, B200, H100, H200
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.planner.simulation.recorder import Gemm, Operation
from megatron.planner.simulation.roofline import operation_seconds
from tests.harness.dry_runs import DryRunCase, run_dry_runs

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this"
)
LAYERS, MICROBATCHES = 2, 2
EIGHT_BILLION = (*LLAMA_8B, *COMMON, "--global-batch-size", "32")
SHORT = ("--num-layers", str(LAYERS), "--global-batch-size")
HALVED = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
WHOLE = (DryRunCase("bf16", EIGHT_BILLION, 8), DryRunCase("fp8", (*EIGHT_BILLION, *FP8), 8, num_steps=2))
EXPERTS = (
    *("--num-layers", "1", "--hidden-size", "256", "--num-attention-heads", "4", "--ffn-hidden-size", "512"),
    *("--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "1", "--global-batch-size", "1"),
    *("--num-experts", "6", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "256", "--disable-bias-linear"),
    *("--bf16", "--fp8-format", "hybrid", "--vocab-size", "256", "--tokenizer-type", "NullTokenizer", "--mock-data"),
    *("--lr", "1e-4", "--train-iters", "2", "--fp8-recipe"),
)
CASES = (
    DryRunCase("fp8", (*EIGHT_BILLION, *FP8, *SHORT, "16"), 8, num_steps=2),
    DryRunCase("bf16 halved", (*EIGHT_BILLION, *HALVED, *SHORT, "8"), 8, num_steps=2),
    DryRunCase("fp8 halved", (*EIGHT_BILLION, *HALVED, *FP8, "--fp8-param-gather", *SHORT, "8"), 8, num_steps=2),
)


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    return reports_of(CASES)


def reports_of(cases: Sequence[DryRunCase]) -> dict[str, dict[str, Any]]:
    results = run_dry_runs(cases)
    assert [result.error for result in results.values()] == [""] * len(cases)
    return {name: result.report for name, result in results.items()}


def scaled_product(rows: int, inner: int, columns: int) -> Operation:
    num_bytes = rows * inner + inner * columns + 2 * rows * columns
    shapes = ((rows, inner), (inner, columns), (1, 1), (1, 1))
    gemm = Gemm(1, rows, inner, columns)
    return Operation("", "_scaled_mm", "", shapes, 1, num_bytes, gemm.flops, gemm)


def test_large_products_take_about_half_as_long_as_in_16_bits() -> None:
    fp8 = scaled_product(8192, 4096, 14336)
    half = Operation("", "mm", "", fp8.shapes[:2], 2, fp8.num_bytes, fp8.flops, fp8.gemm)
    for gpu in (H100, H200, B200):
        assert 1.8 < operation_seconds(half, gpu) / operation_seconds(fp8, gpu) < 2.0
    assert A100.float8_flops == 0


@pytest.mark.long
@needs_compiler
def test_an_8b_model_is_predicted_to_gain_by_three_tenths() -> None:
    reports = reports_of(WHOLE)
    gain = reports["bf16"]["predicted_ms"] / reports["fp8"]["predicted_ms"]
    print(f"predicted gain {gain:.3f}")
    assert gain >= 1.3
    assert reports["fp8"]["peak_bytes"] < reports["bf16"]["peak_bytes"]


@pytest.mark.full
@needs_compiler
def test_the_layers_products_are_scaled_ones_and_every_operand_is_cast_once(reports: dict[str, dict[str, Any]]) -> None:
    operations = reports["fp8"]["by_operation"]
    linear_layers = 4 * LAYERS * MICROBATCHES
    assert operations["_scaled_mm"] == 3 * linear_layers
    assert operations["fp8_cast.cast_program"] == 4 * linear_layers
    # The output layer stays: forward, input gradient, weight gradient.
    assert sum(operations.get(name, 0) for name in ("mm", "addmm")) == 3 * MICROBATCHES


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(("recipe", "gpu"), [("blockwise", "h100-80gb"), ("mxfp8", "b200")])
def test_experts_products_are_scaled_ones_whatever_their_number_of_rows(recipe: str, gpu: str) -> None:
    """Six experts share 256 rows: 42 or 43 are no whole number of blocks, of 128 or of 32."""
    operations = reports_of([DryRunCase("experts", (*EXPERTS, recipe), gpu=gpu)])["experts"]["by_operation"]
    # Three products of each of two matrices of an expert, and of the attention's two; of each kind one is tried.
    tried = operations["_scaled_mm"] + operations.get("_scaled_mm_v2", 0) - 3 * (2 * 6 + 2)
    assert 0 <= tried <= 3
    # The router and the output layer.
    assert operations["mm"] == 3 + 3


@pytest.mark.full
@needs_compiler
def test_what_travels_is_half_as_large(reports: dict[str, dict[str, Any]]) -> None:
    def gathered(name: str, phase: str, axes: str) -> int:
        return sum(
            each["bytes"]
            for each in reports[name]["collectives"]
            if each["operation"] == "all_gather" and each["phase"] == phase and axes in str(each["axes"])
        )

    layers_of_inputs = gathered("fp8 halved", "forward", "tp") / gathered("bf16 halved", "forward", "tp")
    # The output layer's input stays as it is.
    assert 0.5 < layers_of_inputs < 0.7
    # Inputs once more and gradients, eight in two layers; the output layer's input and the embedding's gradient stay.
    again = gathered("fp8 halved", "backward", "tp") / gathered("bf16 halved", "backward", "tp")
    assert again == pytest.approx((8 / 2 + 2) / (8 + 2))
    parameters = gathered("fp8 halved", "end", "dp") / gathered("bf16 halved", "end", "dp")
    assert 0.5 < parameters < 1.0


def test_a_gpu_without_such_products_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*EIGHT_BILLION, *FP8, "--world-size", "8", "--gpu", "a100-80gb"]
    assert gpu_dry_run.main(flags) == 2
    answer = capsys.readouterr().err
    assert re.search(r"--gpu a100-80gb has no products in fp8; use one of b200, b300, h100, ", answer)
    assert len(answer.splitlines()) == 1


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(("gpu", "name"), [("H100", "h100-80gb"), ("B200", "b200")])
def test_the_table_of_recipes_is_what_a_dry_run_predicts(gpu: str, name: str) -> None:
    flags = {recipe: ("--fp8-format", "hybrid", "--fp8-recipe", recipe) for recipe in PREDICTED_MS[gpu]} | {BF16: ()}
    four_layers = (*EIGHT_BILLION, "--num-layers", "4", "--global-batch-size", "16")
    cases = [DryRunCase(recipe, (*four_layers, *more), 8, gpu=name, num_steps=2) for recipe, more in flags.items()]
    predicted = {recipe: report["predicted_ms"] for recipe, report in reports_of(cases).items()}
    assert predicted == pytest.approx(PREDICTED_MS[gpu], rel=0.01)
