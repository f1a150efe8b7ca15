"""Layouts verified in float64, faults found and named, and workers that fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.core.errors import TrainingError
from megatron.training.model_setup import ModelProvider
from megatron.verification.cells import (
    DROPOUT,
    END_PARTS,
    IN_PARTS,
    MAX_WORLD_SIZE,
    MODULES,
    POSITION_PARTS,
    PP_OVERLAP,
    TP_OVERLAP,
    Cell,
    Layout,
    make_cell,
    matrix,
    with_micro_batch_size,
)
from megatron.verification.hybrid_cells import make_hybrid_cell
from megatron.verification.model_cells import (
    EXPERT_NORMS,
    SPARSEMIXER,
    ExpertLayout,
    expert_matrix,
    make_expert_cell,
    make_latent_cell,
)
from megatron.verification.random_cells import fuzz
from megatron.verification.training_cells import fully_sharded
from megatron.verification.verifier import CellReport, Verifier
from megatron.verification.worker_pool import WorkerPool
from tests.distributed.verification import planted_faults
from tests.distributed.verification.planted_faults import EMBEDDING, INPUT_NORM, NORM
from tests.distributed.verification.small_cells import small

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(MAX_WORLD_SIZE, timeout_s=60) as workers:
        yield workers


@pytest.fixture(scope="module")
def compiling_verifier() -> Iterator[Verifier]:
    """Yield a verifier that waits for compilers: on two slow cores they take 50 s for the first layout alone."""
    with WorkerPool(2, timeout_s=180) as workers:
        yield make_verifier(workers)


@pytest.fixture(scope="module")
def verifier(pool: WorkerPool) -> Verifier:
    return make_verifier(pool)


def make_verifier(pool: WorkerPool, provider: ModelProvider = pretrain_gpt.provide_model) -> Verifier:
    return Verifier(pool, provider, pretrain_gpt.forward_step)


SP = Layout(tp=2, sequence_parallel=True)
DEFAULT = (
    make_cell("gpt2", Layout(tp=2, sequence_parallel=True, pp=2, dp=2, sharding="optim_grads")),
    make_cell("gpt2", Layout(pp=2, dp=2, schedule="zero-bubble", sharding="optim_grads", overlap=True)),
    make_cell("gpt2-untied", Layout(pp=2, pipeline_layout="E|tt|tt|L", virtual_stages=2)),
    make_cell("gpt2", Layout(pp=2, cp=2, dp=2, cp_comm_type="a2a", recompute=("full", "uniform", "1")), "uneven"),
    make_cell("qwen", Layout(dp=2, sharding="optim", overlap=True, recompute=MODULES, offloaded_layers=3), "packed"),
    make_expert_cell("mixtral", ExpertLayout(tp=2, dp=2, ep=2, sequence_parallel=True, dispatcher="allgather")),
    make_expert_cell("deepseek-experts", ExpertLayout(pp=2, dp=2, ep=2, sharding="optim_grads", overlap=True)),
)
"""Cells that the default tests run: each parallelism, sharding and schedule at least once."""
REPRESENTATIVE = (
    make_cell("llama", replace(SP, tp_overlap=TP_OVERLAP[0], cp=2, recompute=("full", "uniform", "1")), "packed"),
    make_cell("gpt2", replace(SP, tp_overlap=TP_OVERLAP[0], pp=2, schedule="zero-bubble")),
    make_cell("llama", Layout(pp=2, first_stage_layers=1)),
    *(make_cell("gpt2", Layout(pp=2, virtual_stages=2, pp_overlap=flags)) for flags in PP_OVERLAP),
    make_cell("gpt2", Layout(pp=2, dp=2, sharding="optim", overlap=True, pp_overlap=PP_OVERLAP[3])),
    make_cell("gpt2", Layout(pp=2, virtual_stages=2), extra=("--global-batch-size", "6")),
    make_cell("llama", Layout(cp=4, cp_comm_type="a2a+p2p", cp_levels=(2, 2)), "packed"),
    make_cell("gpt2", Layout(dp=4, sharding="optim_grads", overlap=True), "uneven"),
    make_cell("llama", Layout(tp=2, sequence_parallel=True, pp=2, cp=2, cp_comm_type="all_gather"), "packed"),
    # Families least alike once; the whole matrix has all of them at all of their layouts.
    make_cell("bloom", Layout(tp=2, sequence_parallel=True, pp=2, cp=2, recompute=("selective",)), "packed"),
    make_cell("gemma4", Layout(tp=2, sequence_parallel=True, pp=2, cp=2, recompute=("selective",))),
    # Dropout: the reference is run once for each shape and kind of data.
    with_micro_batch_size(make_cell("gpt2", Layout(dp=2, sharding="optim_grads"), extra=DROPOUT), 2),
    # What is kept for the backward pass, and where.
    *(
        make_cell("gpt2", layout, extra=DROPOUT)
        for layout in (
            Layout(pp=2, schedule="zero-bubble", recompute=MODULES, offloaded_layers=2),
            Layout(pp=2, virtual_stages=2, offloaded_layers=1, offloads_weights=True),
            Layout(tp=2, sequence_parallel=True, pp=2, cp=2, recompute=MODULES, offloaded_layers=1),
        )
    ),
    make_cell("gpt2", Layout(pp=4, schedule="zero-bubble", recompute=("full", "uniform", "1"))),
    make_expert_cell("dropping", ExpertLayout(tp=2, cp=2, ep=4, etp=1)),
    make_expert_cell("mixtral", ExpertLayout(tp=2, cp=2, ep=4, etp=1, sequence_parallel=True), extra=SPARSEMIXER),
    make_expert_cell("deepseek-experts", ExpertLayout(tp=2, etp=1, dispatcher="allgather"), extra=EXPERT_NORMS),
)
FURTHER = (
    make_cell("gemma2", Layout(tp=2, sequence_parallel=True, pp=2, recompute=("full", "block", "1"))),
    make_cell("cohere", Layout(tp=2, sequence_parallel=True, pp=2, recompute=("selective",))),
    make_cell("apertus", Layout(tp=2, sequence_parallel=True, pp=2, cp=2)),
    make_cell("llama-one-group", Layout(tp=4, sequence_parallel=True)),
    make_cell("mistral", Layout(tp=2, cp=2), "packed"),
    make_cell("gpt2", Layout(cp=2), extra=DROPOUT),
    make_cell("gpt2", Layout(tp=2)),
    make_cell("gpt2", Layout(pp=2)),
    make_cell("gpt2", Layout(pp=2, virtual_stages=2, recompute=("full", "block", "1"))),
    make_cell("gpt2", Layout(pp=4, schedule="zero-bubble")),
    *(make_cell("llama", Layout(cp=2, cp_comm_type=exchange), "packed") for exchange in ("p2p", "all_gather", "a2a")),
    make_cell("gpt2", Layout(cp=4), "uneven"),
    *(make_cell("gpt2", Layout(dp=2, sharding=sharding)) for sharding in ("no_shard", "optim", "optim_grads")),
    make_cell("qwen", Layout(dp=2, sharding="optim", overlap=True), "packed"),
    make_cell("neox", Layout(tp=2, sequence_parallel=True, pp=2, recompute=("full", "block", "1"))),
    *(make_cell("gpt2", layout, extra=DROPOUT) for layout in (Layout(tp=2), Layout(pp=2, schedule="zero-bubble"))),
    make_cell("qwen", Layout(tp=4, recompute=("selective",))),
    make_cell("qwen", Layout(tp=2, sequence_parallel=True, recompute=("full", "uniform", "1"))),
    make_cell("gpt2", Layout(tp=4, sequence_parallel=True, tp_overlap=TP_OVERLAP[1])),
    make_cell("gpt2", Layout(cp=8, cp_comm_type="a2a+p2p", cp_levels=(4, 2))),
    make_cell("qwen", Layout(tp=2, sequence_parallel=True, cp=2, dp=2, sharding="optim"), "uneven"),
    make_cell("llama", Layout(tp=2, pp=2, cp=2), "packed", extra=DROPOUT),
    make_expert_cell("gpt2-experts", ExpertLayout(tp=2, etp=1, recompute=("full", "uniform", "1"))),
    make_cell("gpt2", Layout(tp=2, sequence_parallel=True, recompute=("full", "uniform", "1")), extra=DROPOUT),
    make_cell("gpt2", Layout(tp=2, pp=2, virtual_stages=2, recompute=IN_PARTS, offloaded_layers=1), extra=DROPOUT),
    make_cell("olmo2", Layout(tp=2, sequence_parallel=True, pp=2, recompute=("full", "block", "1"))),
    make_cell("gemma3", Layout(tp=2, cp=2), "packed"),
    make_cell("gemma4-e2b", Layout(tp=2, sequence_parallel=True, pp=2)),
    make_cell("gpt2", Layout(dp=2, sharding="optim_grads_params"), extra=END_PARTS),
    make_cell("gpt2", Layout(tp=2, sequence_parallel=True, cp=2), "packed", extra=POSITION_PARTS),
)
"""Cells whose parts the others have in other mixtures."""


@pytest.mark.default(len(DEFAULT))
@pytest.mark.parametrize(
    "cell",
    [*DEFAULT, *map(small, REPRESENTATIVE), *(pytest.param(cell, marks=pytest.mark.long) for cell in FURTHER)],
    ids=lambda cell: cell.name,
)
def test_a_layout_computes_what_one_process_computes(verifier: Verifier, cell: Cell) -> None:
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
    assert max(report.differences) < 1e-9


COMPILED = (
    make_cell("llama", Layout(tp=2, sequence_parallel=True, recompute=MODULES), extra=DROPOUT),
    *(
        pytest.param(cell, marks=pytest.mark.long)
        for cell in (
            make_cell("llama", fully_sharded(Layout(dp=2), overlap=True), "packed"),
            make_cell("qwen", Layout(pp=2, schedule="zero-bubble", recompute=MODULES, offloaded_layers=1)),
            make_cell("llama", Layout(cp=2, recompute=("full", "uniform", "1")), "packed"),
            make_expert_cell("mixtral", ExpertLayout(dp=2, ep=2)),
            make_latent_cell("latent", SP),
        )
    ),
)


@pytest.mark.full
@pytest.mark.parametrize("cell", COMPILED, ids=lambda cell: cell.name)
def test_compiled_layers_compute_what_one_process_computes_without_compiling(
    compiling_verifier: Verifier, cell: Cell
) -> None:
    report = compiling_verifier.check(replace(cell, layout_flags=(*cell.layout_flags, "--compile")))
    assert report.outcome == "passed", report.describe()
    assert max(report.differences) < 1e-12


@pytest.mark.long
def test_the_whole_matrix(verifier: Verifier) -> None:
    reports = [verifier.check(cell) for cell in (*matrix(), *expert_matrix())]
    assert not [report.describe() for report in reports if report.outcome != "passed"]


@pytest.mark.long
def test_300_random_configurations_run_and_match_or_are_refused(verifier: Verifier) -> None:
    reports = [verifier.check(cell) for cell in fuzz(0, 300)]
    assert not [report.describe() for report in reports if report.outcome == "failed"]
    assert sum(report.outcome == "passed" for report in reports) > 240


def check_fault(pool: WorkerPool, provider: ModelProvider, cell: Cell) -> CellReport:
    report = make_verifier(pool, provider).check(cell)
    assert report.outcome == "failed", report.describe()
    return report


@pytest.mark.full
def test_a_norm_that_is_not_summed_is_named_with_rank_and_element(pool: WorkerPool) -> None:
    report = check_fault(pool, planted_faults.norm_is_not_summed, make_cell("gpt2", SP))
    wrong = [reason for reason in report.reasons if reason.startswith("gradient of ")]
    assert {reason.split(":")[0] for reason in wrong} == {f"gradient of {NORM}"}
    assert [f"rank {rank}, first differing element [0]" in reason for rank, reason in enumerate(wrong)] == [True, True]
    assert NORM in report.describe()


def test_a_tied_embedding_that_is_not_summed_is_named_on_both_stages(pool: WorkerPool) -> None:
    report = check_fault(pool, planted_faults.tied_embedding_is_not_summed, make_cell("gpt2", Layout(pp=2)))
    wrong = [reason for reason in report.reasons if reason.startswith("gradient of ")]
    assert {reason.split(":")[0] for reason in wrong} == {f"gradient of {EMBEDDING}"}
    assert ["rank 0" in wrong[0], "rank 1" in wrong[1]] == [True, True]
    assert any(reason.startswith("gradient norms") for reason in report.reasons)


@pytest.mark.full
def test_a_gradient_that_is_a_millionth_off_on_one_rank_is_found_there(pool: WorkerPool) -> None:
    report = check_fault(pool, planted_faults.one_rank_scales_a_gradient, make_cell("gpt2", Layout(tp=2)))
    (wrong,) = [reason for reason in report.reasons if reason.startswith("gradient of ")]
    assert wrong.startswith(f"gradient of {NORM}: rank 1, first differing element [0]")
    assert 0.9e-6 < report.gradient_difference < 1.1e-6


def test_a_weight_that_starts_otherwise_is_found(pool: WorkerPool) -> None:
    report = check_fault(pool, planted_faults.one_weight_starts_otherwise, make_cell("gpt2", Layout(pp=2)))
    assert any(reason.startswith("losses [") for reason in report.reasons)
    assert any("decoder.layers.3.mlp.linear_fc2.weight: rank 1" in reason for reason in report.reasons)


@pytest.mark.full
def test_dropout_keyed_by_a_wrong_position_is_found(pool: WorkerPool) -> None:
    cell = make_cell("gpt2", SP, extra=("--hidden-dropout", "0.2"))
    report = check_fault(pool, planted_faults.last_rank_keys_dropout_one_position_late, cell)
    assert any(reason.startswith("losses [") for reason in report.reasons)
    assert report.gradient_difference > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
    "cell",
    [
        make_cell("gpt2", SP),
        pytest.param(make_hybrid_cell("delta-net", replace(SP, cp=2, passes_states=True)), marks=pytest.mark.long),
        pytest.param(make_hybrid_cell("mamba", replace(SP, cp=2)), marks=pytest.mark.long),
    ],
    ids=lambda cell: cell.name,
)
def test_errors_in_bfloat16_are_compared_with_those_of_one_process(pool: WorkerPool, cell: Cell) -> None:
    verifier = Verifier(pool, pretrain_gpt.provide_model, pretrain_gpt.forward_step, "bfloat16")
    report = verifier.check(cell)
    assert report.outcome == "passed", report.describe()
    # A delta-net amplifies rounding errors: without a fault, gradients are up to 40 % off.
    has_feed_forward = not cell.name.startswith("mamba")
    norm = planted_faults.norm_is_not_summed if has_feed_forward else planted_faults.input_norm_is_not_summed
    for fault, reason in (
        (norm, f"gradient of {NORM if has_feed_forward else INPUT_NORM}: error "),
        (planted_faults.gradients_are_one_percent_too_large, "scale of the gradients: error "),
        (planted_faults.losses_are_one_percent_too_large, "loss of step 1: error "),
    ):
        verifier.model_provider = fault
        report = verifier.check(cell)
        assert report.outcome == "failed"
        assert any(each.startswith(reason) for each in report.reasons), (fault, report.describe())


@pytest.mark.long
@pytest.mark.parametrize(
    "cell", [make_cell("gpt2", SP), make_expert_cell("mixtral", ExpertLayout(dp=2, ep=2))], ids=lambda cell: cell.name
)
def test_a_fault_of_later_steps_is_found_in_bfloat16(pool: WorkerPool, cell: Cell) -> None:
    fault = planted_faults.gradients_double_after_the_first_step
    report = Verifier(pool, fault, pretrain_gpt.forward_step, "bfloat16").check(cell)
    assert {reason.partition(":")[0] for reason in report.reasons} >= {
        f"gradient norm of step {step}" for step in (2, 3)
    }


@pytest.mark.full
def test_workers_that_fail_are_reported_and_replaced() -> None:
    cell = make_cell("gpt2", Layout(tp=2))
    with WorkerPool(2, timeout_s=60) as pool:
        report = check_fault(pool, planted_faults.raises_on_rank_1, cell)
        assert report.reasons[0] == "rank 1 raised:"
        assert report.reasons[-1] == "ZeroDivisionError: planted"
        assert check_fault(pool, planted_faults.dies_on_rank_1, cell).reasons == ("rank 1 died",)
        assert make_verifier(pool).check(cell).outcome == "passed"


def test_workers_that_hang_are_named_and_replaced() -> None:
    with WorkerPool(2, timeout_s=3) as pool:
        with pytest.raises(TrainingError, match=r"^ranks \[1\] did not answer within 3 s$"):
            pool.run(planted_faults.hang_on_rank_1, 2)
        assert pool.run(abs, 2, -5) == [5, 5]


def test_the_pool_raises_what_a_rank_raised() -> None:
    with WorkerPool(1) as pool, pytest.raises(TrainingError, match=r"rank 0 raised:\n(.|\n)*ValueError"):
        pool.run(int, 1, "not a number")


def test_an_impossible_layout_is_refused_with_what_would_work(verifier: Verifier) -> None:
    report = verifier.check(make_cell("gpt2", Layout(tp=3, pp=2, cp=1)))
    assert report.outcome == "refused"
    assert "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3" in report.describe()
    assert "sizes that work: 1, 2, 4" in report.describe()


@pytest.mark.long
def test_the_command_counts_the_cells_and_fails_where_one_is_off() -> None:
    tool = str(ROOT / "tools" / "verify_parallelism.py")
    flags = ("--shape", "gpt2", "--filter", "first1", "--tolerance", "1e-30")
    result = subprocess.run([sys.executable, tool, *flags], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.startswith("failed  gpt2 plain tp1 pp2 first1 cp1 dp1 | loss")
    assert "first differing element" in result.stdout
    assert "\n0 passed, 1 failed, 0 rejected at parse time, float64" in result.stdout
