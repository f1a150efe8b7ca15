"""The code that measures a GPU, driven at tiny sizes on a CPU; its figures are those of a CPU and say nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.device import Device
from megatron.planner.simulation.fake_cuda import find_compiler
from megatron.verification.cells import Layout, make_cell
from megatron.verification.verifier import CellReport
from tests.gpu import test_gpu
from tests.gpu.bandwidths import measure_bandwidths
from tests.gpu.cells import check_cells, fitting_cells, to_row
from tests.gpu.kernels import KernelPair, KernelSizes, compare, compare_all, kernel_pairs
from tests.gpu.offload import offload_distance
from tests.gpu.report import Report
from tests.gpu.source_lines import measure_lines
from tests.gpu.timing import GPT2_345M, LAYOUTS, Timing, gpu_type, layers_that_fit, layout_flags, time_training
from tests.harness.training_run import run_command

CPU = Device("cpu")
SIZES = KernelSizes(length=24, batch=2, heads=4, groups=2, head_size=6)
TINY = (
    *("--num-layers", "2", "--hidden-size", "24", "--ffn-hidden-size", "40", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--vocab-size", "52", "--micro-batch-size", "2"),
)
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="a CPU build of torch needs a C++ compiler")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "report", {"GPUs": "none: a CPU"})


def markdown(report: Report) -> str:
    return (report.folder / "report.md").read_text()


def content(report: Report) -> dict:
    return json.loads((report.folder / "report.json").read_text())


def test_offloaded_state_is_held_against_state_on_the_device(report: Report) -> None:
    options = {"optimizer_offload_fraction": 0.4, "overlap_cpu_optimizer_d2h_h2d": True, "pin_cpu_grads": False}
    report.add("offload", {**options, "distance": offload_distance(CPU, 3, **options)})
    assert "| 0.4 | True | False | 0.0e+00 |" in markdown(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_held_against_their_twins(dtype: torch.dtype, report: Report) -> None:
    for pair in kernel_pairs(CPU, dtype, SIZES):
        row = compare(pair, CPU, dtype)
        assert max(row["difference"], row["gradient_difference"]) <= row["allowed"], row["name"]
        report.add("kernels", row)
    names = [row["name"].partition(",")[0] for row in content(report)["kernels"]]
    assert names == [
        *(2 * ["fused attention"]),
        *(4 * ["attention as chosen"]),
        *("swiglu", "geglu", "swiglu in FP8", "gradient of swiglu in FP8", "weighted rows in FP8"),
        *("projection cut and rotated", "projection with a bias cut", "gelu behind a bias"),
        *("GEMMs with gelu", "GEMMs with gelu_tanh", "GEMMs with squared_relu"),
        *("dropout added to a stream", "scan", "scan of documents", "gated norm", "dropout", "dropout"),
        *("cross-entropy", "gated delta rule", "gated delta rule of documents"),
        *("Kimi delta attention", "Kimi delta attention of documents"),
        *("attention block", "linear map"),
    ]
    assert markdown(report).count("\n| fused attention, ") == 2


@pytest.mark.long
@needs_compiler
def test_kernels_are_called_on_cuda_tensors_without_values() -> None:
    """Each kernel of each pair takes CUDA tensors and makes what its twin makes, on the device and in the format."""
    done = run_command([sys.executable, "-m", "tests.gpu.pretended"]).check()
    found = json.loads(done.stdout)
    assert len(found) == 2 * 2 * 30
    for (name, made), (_, wanted) in zip(found[::2], found[1::2]):
        assert made == wanted, name
        assert {device for device, _, _ in made} == {"cuda:0"}


def test_a_wrong_kernel_is_seen_in_its_result_and_its_gradient() -> None:
    pair = KernelPair("halved", lambda x: x * 0.5, lambda x: x * 1.0, ((4, 6),))
    row = compare(pair, CPU, torch.float32)
    assert row["difference"] == pytest.approx(0.5)
    assert row["gradient_difference"] == pytest.approx(0.5)


def test_a_pair_that_raises_costs_its_own_row_alone(report: Report) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    pairs = [
        KernelPair("halved", lambda x: x * 0.5, lambda x: x * 1.0, ((4, 6),)),
        KernelPair("broken", broken, lambda x: x * 1.0, ((4, 6),)),
        KernelPair("doubled", lambda x: x + x, lambda x: x * 2.0, ((4, 6),)),
    ]
    wrong = compare_all(iter(pairs), CPU, torch.float32, report.add)
    assert wrong == {
        "halved, float32": "off by 5.0e-01, and 2e-05 is allowed",
        "broken, float32": "RuntimeError: no kernel image is available",
    }
    assert [row["name"] for row in content(report)["kernels"]] == ["halved, float32", "doubled, float32"]
    assert "**broken, float32**\n\n    RuntimeError: no kernel image is available" in markdown(report)


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_no_command_is_timed_twice(num_gpus: int) -> None:
    commands = [flags for layout in LAYOUTS if (flags := layout_flags(layout, num_gpus)) is not None]
    assert len(commands) == (1 if num_gpus == 1 else 2)
    assert len(set(commands)) == len(commands)


def test_no_memory_history_is_kept_while_steps_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Run:
        stdout = "max allocated: 12.5"

        def __init__(self, flags: Sequence[str | Path], nproc: int, timeout_s: float) -> None:
            commands.append([str(flag) for flag in flags])
            (tmp_path / "tiny").mkdir(exist_ok=True)

        def check(self) -> Run:
            if "--record-memory-history" in commands[-1]:
                raise AssertionError("exit status 1\nout of disk")
            return self

        def iterations(self) -> list[dict[str, float | None]]:
            return [{"step_time_s": 0.1, "tokens_per_second": 1.0, "tflops_per_device": 1.0, "mfu": None}] * 8

        def losses(self) -> list[float]:
            return [1.0]

    monkeypatch.setattr("tests.gpu.timing.run_training", Run)
    row = time_training(Timing("tiny", ("--bf16",), 1, None, num_steps=8), tmp_path)
    timed, with_history = commands
    assert "--profile" in timed
    assert "--record-memory-history" not in timed
    assert "--profile" not in with_history
    assert row["without_memory_history"] == "out of disk"


def test_cells_that_fit_have_fsdp_and_experts() -> None:
    assert make_cell("gpt2", Layout(tp=2, sequence_parallel=True)) in fitting_cells(2, "bfloat16")
    assert {each.world_size for each in fitting_cells(4, "float64")} == {1, 2, 4}
    in_float64, in_bf16 = (
        " | ".join(cell.name for cell in fitting_cells(2, dtype)) for dtype in ("float64", "bfloat16")
    )
    assert "dp2-optim_grads_params" in in_float64
    assert "dp2-optim_grads_params" in in_bf16
    assert "mixtral plain tp1 pp1 cp1 dp2 ep2" in in_float64
    # Where scores are close, rounding chooses the experts.
    assert "mixtral" not in in_bf16


@pytest.mark.long
def test_cells_that_fit_are_checked_and_reported(report: Report) -> None:
    cell = make_cell("gpt2", Layout(tp=2, sequence_parallel=True))
    assert check_cells([cell], "cpu", "float64", lambda row: report.add("cells", row)) == []
    report.add(
        "cells", to_row(CellReport(replace(cell, name="bad one"), "failed", 0.25, reasons=("a reason",)), "float64")
    )
    text = markdown(report)
    assert "1 of 2 layouts compute what one device computes." in text
    assert "Worst relative difference of loss: 2.5e-01 (bad one float64)." in text
    assert "**failed** bad one float64\n    a reason" in text


@pytest.mark.long
def test_bandwidths_are_measured_by_processes(report: Report) -> None:
    report.write()
    rows, done = measure_bandwidths(2, (4096, 65536), report.folder)
    done.check()
    for row in rows:
        report.add("bandwidths", row)
    rows = content(report)["bandwidths"]
    assert [(row["operation"], row["bytes"]) for row in rows[:3]] == [
        ("all_reduce sum", 4096),
        ("all_reduce sum", 65536),
        ("all_reduce avg", 4096),
    ]
    assert len(rows) == 12
    assert all(row["gb_s"] > 0 and row["ranks"] == 2 for row in rows)
    assert "| send | 2 | 0.0625 |" in markdown(report)


@pytest.mark.long
@needs_compiler
def test_a_training_is_timed_beside_its_prediction(report: Report) -> None:
    flags = (*GPT2_345M, *TINY, "--global-batch-size", "4")
    timing = Timing("GPT-2 tiny", flags, 1, "h100-80gb", "Made small for a CPU.", num_steps=8)
    row = time_training(timing, report.folder)
    report.add("timings", row)
    assert len(row["steps_ms"]) == 2
    assert min(row["steps_ms"]) <= row["step_ms"] <= max(row["steps_ms"])
    assert row["mfu"] is None
    assert row["predicted"]["step_ms"] > 0
    assert row["files"][:2] == ["GPT-2-tiny/dry_run.json", row["files"][1]]
    assert "GPT-2-tiny/rank0.iterations7-8.pt.trace.json" in row["files"]
    text = markdown(report)
    assert "Made small for a CPU." in text
    assert f"| step, ms (median) | {row['step_ms']:.1f} | {row['predicted']['step_ms']:.1f} |" in text
    assert "| MFU | not known | " in text


def test_fewer_layers_are_taken_where_memory_asks_and_that_is_said(tmp_path: Path, monkeypatch) -> None:
    """A model that takes 10 GiB, and 3 GiB more for each layer."""

    def peak(flags: tuple[str, ...], num_ranks: int, gpu: str, path: Path) -> dict:
        return {"peak_bytes": (10 + 3 * int(flags[-1])) * 2**30}

    monkeypatch.setattr("tests.gpu.timing.dry_run", peak)
    assert layers_that_fit((), 32, 1, "h100-80gb", 125 * 2**30, tmp_path) == (32, "")
    count, note = layers_that_fit((), 32, 1, "h100-80gb", 80 * 2**30, tmp_path)
    assert 10 + 3 * count <= 80 * 0.85 < 10 + 3 * (count + 1)
    assert note == "19 of 32 layers: more do not fit into 80.0 GiB by the dry run."


@pytest.mark.full
@needs_compiler
def test_measured_lines_have_the_names_of_predicted_ones(report: Report) -> None:
    report.write()
    flags = (*GPT2_345M, *TINY, "--global-batch-size", "2")
    row = measure_lines("tiny", flags, "h100-80gb", report.folder)
    report.add("source lines", row)
    both = {line["where"] for line in row["lines"] if line["measured_ms"] and line["predicted_ms"]}
    for file in ("ops/gemm", "tensor_parallel/cross_entropy", "optimizer/clip_grads"):
        assert any(where.startswith(f"megatron/core/{file}.py:") for where in both), file
    assert any(where.startswith("gradient of megatron/core/ops/dot_product_attention.py:") for where in both)
    predicted = [line for line in row["lines"] if line["predicted_ms"]]
    assert len(both) > len(predicted) / 2
    assert row["measured_total_ms"] == pytest.approx(sum(line["measured_ms"] for line in row["lines"]))
    assert "| line | measured ms | predicted ms | measured / predicted |" in markdown(report)


def test_a_device_is_matched_with_what_is_known_of_it() -> None:
    assert gpu_type("NVIDIA H100 80GB HBM3") == "h100-80gb"
    assert gpu_type("NVIDIA H200") == "h200"
    assert gpu_type("NVIDIA A100-SXM4-80GB") == "a100-80gb"
    assert gpu_type("NVIDIA B300 SXM6 AC") == "b300"
    assert gpu_type("NVIDIA RTX 4090") is None


def test_everything_that_measures_a_gpu_is_marked() -> None:
    assert test_gpu.pytestmark.name == "gpu"
