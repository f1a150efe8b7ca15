"""The lines of a run's log."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest

from megatron.core.device import Device
from megatron.training.loggers.log_lines import (
    IntervalAverage,
    StepReport,
    format_evaluation,
    format_memory,
    format_step,
    pinned_memory_told,
)
from tests.e2e.megatron_lines import parse

STEP = StepReport(
    iteration=20,
    consumed_samples=80,
    global_batch_size=4,
    num_tokens=96.0,
    lm_loss=4.918365,
    learning_rate=1.5e-4,
    next_learning_rate=2.0e-4,
    loss_scale=131072.0,
    next_loss_scale=131072.0,
    grad_norm=1.529,
    num_zeros=None,
    params_norm=None,
    is_skipped=False,
    step_time_s=0.0115,
    tokens_per_second=8347.8,
    tflops_per_device=0.01,
    mfu=None,
    sample_ids_hash="0123456789abcdef",
)


def averaged(*steps: StepReport) -> IntervalAverage:
    average = IntervalAverage()
    for step in steps:
        average.add(step)
    return average


def test_step_line_is_megatrons() -> None:
    line = format_step(STEP, averaged(STEP), 200, log_throughput=False)
    assert line[len(" [2026-11-22 03:16:32]") :] == (
        " iteration       20/     200 | consumed samples:           80 | elapsed time per iteration (ms): 11.5 |"
        " learning rate: 2.000000E-04 | global batch size:     4 | lm loss: 4.918365E+00 | loss scale: 131072.0 |"
        " grad norm: 1.529 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_throughput_and_utilization_are_those_of_all_iterations_since_the_last_line() -> None:
    fast = dataclasses.replace(STEP, step_time_s=1.0, tflops_per_device=400.0, mfu=0.4)
    slow = dataclasses.replace(STEP, step_time_s=3.0, tflops_per_device=100.0, mfu=0.1)
    line = format_step(slow, averaged(fast, slow), 200, log_throughput=True)
    assert "(ms): 2000.0 | throughput per GPU (TFLOP/s/GPU): 175.0 | MFU: 17.5% | learning rate" in line


def test_skipped_iterations_contribute_no_loss() -> None:
    skipped = dataclasses.replace(STEP, is_skipped=True, lm_loss=99.0, grad_norm=None)
    assert "lm loss: 4.918365E+00" in format_step(STEP, averaged(skipped, STEP, skipped), 200, log_throughput=False)
    line = format_step(skipped, averaged(skipped), 200, log_throughput=False)
    assert "lm loss" not in line
    assert "grad norm" not in line
    assert "number of skipped iterations:   1 |" in line


def test_evaluation_is_framed() -> None:
    above, line, below = format_evaluation("iteration 40 on test set", 2.5).split("\n")
    assert line == (
        " validation loss at iteration 40 on test set | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 |"
    )
    assert above == below == "-" * len(above)


def test_a_decoupled_learning_rate_follows_the_common_one() -> None:
    step = dataclasses.replace(STEP, next_decoupled_learning_rate=5.0e-4)
    line = format_step(step, averaged(step), 200, log_throughput=False)
    assert " learning rate: 2.000000E-04 | decoupled learning rate: 5.000000E-04 | global batch size:" in line


def test_memory_that_a_save_has_pinned_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = iter([5 * 2**18, 5 * 2**19, 5 * 2**19, 5 * 2**19])
    monkeypatch.setattr(Device, "pinned_bytes", lambda self: next(pinned))
    for is_first in (True, True, False):
        state = SimpleNamespace(rank=3, dp_cp=SimpleNamespace(is_first=is_first))
        with pinned_memory_told(SimpleNamespace(device=Device("cuda"), state=state), 20):
            pass
    line = capsys.readouterr().out
    assert line == "[Rank 3] (after 20 iterations) pinned memory of the machine (MB): 2.50\n"
    assert parse(line) == ["pinned memory"]


def test_the_memory_line_has_what_all_processes_use_where_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = r"allocated: [\d.]+ \| max allocated: [\d.]+ \| reserved: [\d.]+ \| max reserved: \d+\.\d"
    plain = rf"\[Rank 3\] \(after 20 iterations\) memory \(MB\) \| {figures}"
    device = Device("cpu")
    assert re.fullmatch(plain, format_memory(3, 20, device))
    monkeypatch.setattr(Device, "used_bytes", lambda self: 3 * 2**19)
    line = format_memory(3, 20, device, with_device=True)
    assert re.fullmatch(rf"{plain} \| total device memory used: 1\.50", line)
    monkeypatch.setattr(Device, "pinned_bytes", lambda self: 5 * 2**18)
    assert format_memory(3, 20, device, with_device=True) == line
    parse(line.removesuffix(" | total device memory used: 1.50"))
    monkeypatch.setattr(Device, "used_bytes", lambda self: None)
    assert re.fullmatch(plain, format_memory(3, 20, device, with_device=True))
