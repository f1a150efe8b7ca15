"""What only a GPU can show: bash tests/run.sh -m gpu, and docs/development/gpu_tests.md for what comes of it."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.device import Device
from tests.gpu.bandwidths import measure_bandwidths
from tests.gpu.cells import CELL_TIMEOUT_S, check_cells, fitting_cells
from tests.gpu.kernels import KernelSizes, compare_all, kernel_pairs
from tests.gpu.offload import offload_distance
from tests.gpu.report import Report
from tests.gpu.source_lines import measure_lines
from tests.gpu.timing import (
    GPT2_345M,
    LAYERS_8B,
    LAYOUTS,
    SHAPE_8B,
    Timing,
    layers_that_fit,
    layout_flags,
    time_training,
)

pytestmark = pytest.mark.gpu

measures_speed = pytest.mark.usefixtures("_measures_speed")
SMALL_SIZES = KernelSizes(length=16, batch=1, heads=4, groups=2, head_size=16)
"""For emulated devices, whose Triton programs are interpreted."""
NUM_EMULATED_CELLS = {"float64": 3, "bfloat16": 4}
EMULATED_TIMEOUT_S = 900.0
MESSAGE_BYTES = tuple(2**power for power in (12, 16, 20, 24, 26, 28, 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_agree_with_their_twins(dtype: torch.dtype, device: Device, report: Report, is_emulated: bool) -> None:
    sizes = SMALL_SIZES if is_emulated else KernelSizes()
    wrong = compare_all(kernel_pairs(device, dtype, sizes), device, dtype, report.add, is_timed=not is_emulated)
    # The processes of the other tests need the memory.
    device.empty_cache()
    assert wrong == {}


@measures_speed
def test_bandwidth_of_nccl(num_gpus: int, report: Report) -> None:
    if num_gpus == 1:
        pytest.skip("one GPU communicates with no other")
    rows, done = measure_bandwidths(num_gpus, MESSAGE_BYTES, report.folder)
    for row in rows:
        report.add("bandwidths", row)
    done.check()
    # Two operations of the four reduce, each by a sum and by an average.
    assert len(rows) == 6 * len(MESSAGE_BYTES)
    assert all(row["gb_s"] > 0 for row in rows)


@measures_speed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt2_345m_is_timed(layout: str, num_gpus: int, gpu: str | None, report: Report) -> None:
    flags = layout_flags(layout, num_gpus)
    if flags is None:
        pytest.skip(f"on one GPU this is the command of {LAYOUTS[0]}")
    row = time_training(Timing(f"GPT-2 345M {layout}", flags, num_gpus, gpu), report.folder)
    report.add("timings", row)
    assert math.isfinite(row["last_loss"])


@measures_speed
def test_an_8b_shape_is_timed(num_gpus: int, gpu: str | None, report: Report) -> None:
    flags = (*SHAPE_8B, "--global-batch-size", "4", "--tensor-model-parallel-size", str(num_gpus))
    flags = (*flags, "--sequence-parallel") if num_gpus > 1 else flags
    memory = torch.cuda.get_device_properties(0).total_memory
    count, note = layers_that_fit(flags, LAYERS_8B, num_gpus, gpu or "h100-80gb", memory, report.folder)
    flags = (*flags, "--num-layers", str(count))
    row = time_training(Timing(f"8B shape, {count} layers", flags, num_gpus, gpu, note), report.folder)
    report.add("timings", row)
    assert math.isfinite(row["last_loss"])


@measures_speed
def test_lines_take_what_is_predicted_of_them(gpu: str | None, report: Report) -> None:
    """Held to nothing but being there: the report says how far off the prediction is."""
    flags = (*GPT2_345M, "--global-batch-size", "8")
    row = measure_lines("GPT-2 345M, one micro-batch of 8", flags, gpu, report.folder)
    report.add("source lines", row)
    assert row["measured_total_ms"] > 0


@pytest.mark.usefixtures("_small_buckets")
@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_offloaded_state_trains_as_state_on_the_device(
    fraction: float, overlap: bool, pinned: bool, device: Device, report: Report, is_emulated: bool
) -> None:
    """Some 100 million parameters are four buckets; a step of 0.01 is two units of a bf16 number just below one."""
    rows = 24 if is_emulated else 100_000
    options = {"optimizer_offload_fraction": fraction, "overlap_cpu_optimizer_d2h_h2d": overlap}
    options |= {"pin_cpu_grads": pinned, "pin_cpu_params": pinned}
    distance = offload_distance(device, rows, **options)
    report.add("offload", {**options, "distance": distance})
    assert distance <= 2.0**-7


@pytest.mark.usefixtures("_cells_without_triton")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_layouts_compute_what_one_gpu_computes(dtype: str, num_gpus: int, report: Report, is_emulated: bool) -> None:
    cells = fitting_cells(num_gpus, dtype)
    if is_emulated:
        cells = cells[:: len(cells) // NUM_EMULATED_CELLS[dtype]]
    timeout_s = EMULATED_TIMEOUT_S if is_emulated else CELL_TIMEOUT_S
    bad = check_cells(cells, "cuda", dtype, lambda row: report.add("cells", row), timeout_s)
    assert bad == []
