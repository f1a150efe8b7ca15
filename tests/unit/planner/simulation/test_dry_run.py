"""Dry runs on a simulated GPU: FLOPs against the closed form, fp8's kernels, and the start of sharded weights."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_dry_run.run import COMMON, FP8, LLAMA_8B
from megatron.cli import simulate
from megatron.config.arguments import resolve_arguments
from megatron.config.run_config import RunConfig
from megatron.planner.gpu import A100, B200, B300, H100, H200
from megatron.planner.plan import DEEPEP_AS_ALLTOALL
from megatron.planner.simulation.dry_run import ModelFlops, check_flops, count_flops, needed_flops
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.planner.simulation.recorder import Gemm, Operation
from megatron.planner.simulation.roofline import operation_seconds
from tests.harness.dry_runs import DryRunCase, run_dry_runs

MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "96"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--train-iters", "2", "--lr", "1e-4", "--mock-data", "--vocab-size", "1000", "--tokenizer-type", "NullTokenizer"),
)
EXPERTS = (
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48", "--disable-bias-linear"),
    *("--moe-token-dispatcher-type", "alltoall"),
)


def config_of(*flags: str, world_size: int = 1) -> RunConfig:
    return resolve_arguments((*MODEL, *flags), world_size, needs_files=False).config


def gemm(phase: str, name: str = "mm", *, is_recomputed: bool = False, is_uncounted: bool = False) -> Operation:
    sizes = Gemm(1, 10, 10, 5)
    operation = Operation(phase, name, "megatron/core/transformer/mlp.py:1", (), 2, 0, sizes.flops, sizes)
    return replace(operation, is_recomputed=is_recomputed, is_uncounted=is_uncounted)


def test_recomputed_and_optimizer_flops_are_none_of_the_models() -> None:
    scores = replace(gemm("forward", "bmm"), where="gradient of megatron/core/ops/dot_product_attention.py:61")
    counted = count_flops(
        [gemm("forward"), gemm("backward"), gemm("backward", is_recomputed=True), gemm("optimizer"), scores]
    )
    assert (counted.gemms, counted.attention, counted.recomputed, counted.optimizer) == (2000, 1000, 1000, 1000)
    assert counted.hardware == 5000
    assert counted.of_model(ModelFlops(2000, 600)) == 2600


def test_a_step_that_computes_less_than_its_model_is_an_internal_error() -> None:
    counted = count_flops([gemm("forward"), replace(gemm("forward", "mine::product", is_uncounted=True), flops=0.0)])
    check_flops(counted, ModelFlops(1000, 0))
    with pytest.raises(RuntimeError, match=r"counted 1000 FLOPs .* need 2000 .* unknown FLOPs: mine::product$"):
        check_flops(counted, ModelFlops(1900, 100))


def test_the_excess_of_attention_hides_no_missing_gemm() -> None:
    scores = replace(gemm("forward", "bmm"), where="megatron/core/ops/dot_product_attention.py:61")
    counted = count_flops([gemm("forward"), scores, scores])
    check_flops(counted, ModelFlops(1000, 1200))
    with pytest.raises(RuntimeError, match="counted 2200 FLOPs"):
        check_flops(counted, ModelFlops(1800, 1200))


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ((), 1),
        (("--pipeline-model-parallel-size", "2"), 4),
        (("--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"), 4),
        (("--context-parallel-size", "2", *EXPERTS), 4),
        (("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--pipeline-model-parallel-size", "4"), 4),
    ],
)
def test_the_stages_together_need_what_the_model_needs(flags: tuple[str, ...], world_size: int) -> None:
    config = config_of(*flags, world_size=world_size)
    pp = config.parallel_sizes.pp
    together = sum(needed_flops(config, stage).total for stage in range(pp)) * world_size / pp
    assert together == pytest.approx(3.0 * 8 * config.model.forward_flops_per_sequence(32))


def test_full_experts_and_documents_need_less() -> None:
    whole, dropping = (
        needed_flops(config_of(*EXPERTS, *more), 0) for more in ((), ("--moe-expert-capacity-factor", "0.5"))
    )
    # Half of two matrices of 64 x 48 for each of 2 experts and 4 layers, 8 sequences of 32 tokens.
    assert whole.gemms - dropping.gemms == 3 * 2 * 8 * 32 * 4 * 2 * (2 * 64 * 48) / 2
    packed, plain = (needed_flops(config_of(*more), 0) for more in (("--reset-attention-mask",), ()))
    assert packed.attention == plain.attention / 2
    assert packed.gemms == plain.gemms


def test_beside_adapters_weights_need_no_gradients() -> None:
    plain, adapted = (needed_flops(config_of(*more), 0) for more in ((), ("--lora-rank", "4")))
    assert adapted.gemms < 2 / 3 * plain.gemms


needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="a CPU build of torch needs a C++ compiler for this"
)
LAYERS, MICROBATCHES = 2, 2
EIGHT_BILLION = (*LLAMA_8B, *COMMON, "--global-batch-size", "32")
SHORT = ("--num-layers", str(LAYERS), "--global-batch-size")
HALVED = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
WHOLE = (DryRunCase("bf16", EIGHT_BILLION, 8), DryRunCase("fp8", (*EIGHT_BILLION, *FP8), 8, num_steps=2))
FLOAT8_EXPERTS = (
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


def test_large_products_in_nvfp4_take_about_half_as_long_as_in_fp8_on_a_b200_and_less_on_a_b300() -> None:
    fp8 = scaled_product(8192, 4096, 14336)
    fp4 = replace(fp8, itemsize=0.5, num_bytes=fp8.num_bytes - 8192 * 4096 // 2 - 4096 * 14336 // 2)
    ratios = [operation_seconds(fp4, gpu) / operation_seconds(fp8, gpu) for gpu in (B200, B300)]
    # A wave of tiles begins and ends as in FP8.
    assert 0.5 < ratios[0] < 0.56
    assert 1 / 3 < ratios[1] < 0.42
    assert B200.matmul_flops(0.5) / B200.float4_flops == B200.matmul_flops(2) / B200.half_flops
    assert [gpu.float4_flops for gpu in (A100, H100, H200)] == [0, 0, 0]
    assert H100.matmul_flops(0.5) == H100.matmul_flops(2)


@pytest.mark.long
@needs_compiler
def test_an_8b_model_is_predicted_to_gain_by_three_tenths() -> None:
    reports = reports_of(WHOLE)
    gain = reports["bf16"]["predicted_ms"] / reports["fp8"]["predicted_ms"]
    print(f"predicted gain {gain:.3f}")
    assert gain >= 1.3
    # Each weight and its transpose are kept in FP8 until the end of the step.
    kept = 2 * 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert reports["fp8"]["peak_bytes"] - kept < reports["bf16"]["peak_bytes"]


@pytest.mark.full
@needs_compiler
def test_the_layers_products_are_scaled_ones_and_every_operand_is_cast_once(reports: dict[str, dict[str, Any]]) -> None:
    operations = reports["fp8"]["by_operation"]
    linear_layers = 4 * LAYERS * MICROBATCHES
    assert operations["_scaled_mm"] == 3 * linear_layers
    # Weights are cast and transposed once per step, inputs and gradients once per micro-batch: the input of the second
    # linear layer and the output gradient of the first one as they are computed.
    num_activations = LAYERS * MICROBATCHES
    assert operations["fp8_gated_cast.gated_cast_program"] == num_activations
    assert operations["fp8_gated_cast.gated_gradient_cast_program"] == num_activations
    assert operations["fp8_cast.cast_program"] == 2 * linear_layers + 4 * LAYERS - 2 * num_activations
    assert "activation.gated_forward_program" not in operations
    # The output layer stays: forward, input gradient, weight gradient.
    assert sum(operations.get(name, 0) for name in ("mm", "addmm")) == 3 * MICROBATCHES


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(("recipe", "gpu"), [("blockwise", "h100-80gb"), ("mxfp8", "b200")])
def test_experts_products_are_scaled_ones_whatever_their_number_of_rows(recipe: str, gpu: str) -> None:
    """Six experts share 256 rows: 42 or 43 are no whole number of blocks, of 128 or of 32."""
    operations = reports_of([DryRunCase("experts", (*FLOAT8_EXPERTS, recipe), gpu=gpu)])["experts"]["by_operation"]
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
    assert simulate.main(flags) == 2
    answer = capsys.readouterr().err
    assert re.search(r"--gpu a100-80gb does not support FP8 GEMMs; use one of b200, b300, h100, ", answer)
    assert len(answer.splitlines()) == 1
    flags = [*EIGHT_BILLION, "--fp4-format", "e2m1", "--world-size", "8", "--gpu", "h200"]
    assert simulate.main(flags) == 2
    answer = capsys.readouterr().err
    assert answer == ("error: --gpu h200 does not support NVFP4 GEMMs; use one of b200, b300, or omit the FP4 flags\n")


MIN_GAIN = 1.15
"""A step of four layers also has the embedding, the loss and the update, which are not in FP8."""


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize(
    ("gpu", "recipes"),
    [
        ("h100-80gb", ("delayed", "tensorwise", "rowwise", "blockwise")),
        ("b200", ("delayed", "tensorwise", "mxfp8", "nvfp4")),
    ],
)
def test_every_recipe_is_predicted_faster_than_bf16_on_the_gpu_that_it_is_for(
    gpu: str, recipes: tuple[str, ...]
) -> None:
    flags = {recipe: ("--fp8-format", "hybrid", "--fp8-recipe", recipe) for recipe in recipes} | {"bf16": ()}
    flags["nvfp4"] = ("--fp4-format", "e2m1")
    four_layers = (*EIGHT_BILLION, "--num-layers", "4", "--global-batch-size", "16")
    cases = [DryRunCase(recipe, (*four_layers, *more), 8, gpu=gpu, num_steps=2) for recipe, more in flags.items()]
    predicted = {recipe: report["predicted_ms"] for recipe, report in reports_of(cases).items()}
    gains = {recipe: predicted["bf16"] / predicted[recipe] for recipe in recipes}
    assert min(gains.values()) >= MIN_GAIN, gains
    assert gains.get("nvfp4", math.inf) > gains.get("mxfp8", 0)


@pytest.mark.full
@needs_compiler
def test_each_operand_in_nvfp4_is_read_twice_and_weights_once_per_step() -> None:
    flags = (*EIGHT_BILLION, *SHORT, "16", "--fp4-format", "e2m1")
    report = reports_of([DryRunCase("nvfp4", flags, 8, gpu="b200", num_steps=2)])["nvfp4"]
    linear_layers = 4 * LAYERS * MICROBATCHES
    operations = report["by_operation"]
    assert operations["_scaled_mm_v2"] == 3 * linear_layers
    casts = operations["nvfp4_cast.nvfp4_program"]
    assert casts == operations["nvfp4_cast.nvfp4_amax_program"] == 2 * linear_layers + 4 * LAYERS


NUM_LAYERS, HIDDEN, FFN, VOCABULARY, NUM_RANKS = 6, 2048, 5632, 32000, 32
FLAGS = f"""
    --num-layers {NUM_LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads 16 --swiglu
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size {NUM_RANKS} --bf16
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --lr 1e-4 --train-iters 5 --mock-data
"""
LAYER = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
"""Bytes of a layer's weights, norms left out."""
EMBEDDING = 2 * VOCABULARY * HIDDEN
SHARDED_WHOLE = NUM_LAYERS * LAYER + 2 * EMBEDDING


@pytest.mark.long
def test_a_gpu_never_holds_the_whole_model() -> None:
    sharded = ("--data-parallel-sharding-strategy", "optim_grads_params", "--overlap-grad-reduce")
    cases = {"sharded": sharded, "copies": ("--use-distributed-optimizer",)}
    results = run_dry_runs([DryRunCase(name, (*FLAGS.split(), *more), NUM_RANKS) for name, more in cases.items()])
    assert [results[name].error for name in cases] == ["", ""]
    ours, copies = (results[name].report for name in cases)
    # Weights of 16 bits, and gradients, main weights and two moments of 32.
    kept = 9 * SHARDED_WHOLE / NUM_RANKS
    assert copies["start_peak_bytes"] > 3 * SHARDED_WHOLE
    assert kept <= ours["start_peak_bytes"] <= 1.02 * kept + max(EMBEDDING, LAYER)
    # In a step: two layers and what is beside the layers.
    of_weights = ours["peak_holders"]["weights"]
    assert (
        of_weights <= 1.02 * SHARDED_WHOLE / NUM_RANKS + 2 * LAYER + 2 * EMBEDDING < copies["peak_holders"]["weights"]
    )


@pytest.mark.long
@needs_compiler
def test_deepep_is_simulated_as_alltoall_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "deep_ep.py").write_text("raise SystemExit('the simulation imports deep_ep')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    reports = []
    for kind in ("flex", "alltoall"):
        flags = (*MODEL, *EXPERTS, "--moe-token-dispatcher-type", kind, "--expert-model-parallel-size", "2", "--bf16")
        command = [sys.executable, "-m", "megatron.cli", "simulate", "--gpu", "h100", "--world-size", "2", *flags]
        finished = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
        )
        reports.append(finished.stdout.splitlines())
    assert [line for line in reports[0] if line not in reports[1]] == [DEEPEP_AS_ALLTOALL]
