"""Triton's programs in a dry run, with and without their package, and read without a trace in the process."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from megatron.core.ops import triton as triton_kernels
from megatron.core.ops import triton_support
from megatron.planner.gpu import find_gpu
from megatron.planner.simulation import fake_triton
from megatron.planner.simulation.fake_triton import has_triton_package, recorded_programs
from megatron.planner.simulation.recorder import Gemm, Recorder
from megatron.planner.simulation.roofline import operation_seconds
from tests.harness.dry_runs import DryRunCase, run_dry_runs
from tests.unit.config.command_lines import MINIMAL

_PROGRAMS = triton_kernels.__name__
H100 = find_gpu("h100-80gb")
_READ = ("activation", "fp8_cast")
_NAMES = ("triton", "triton.language", "triton.errors", "triton.runtime.jit")


def recorded_launches() -> Sequence[tuple[object, ...]]:
    """Return what the launches of some programs are recorded as; their tensors are on a CPU, where none could run."""
    recorder = Recorder()
    with recorded_programs(recorder):
        programs = {name: importlib.import_module(f"{_PROGRAMS}.{name}") for name in ("activation", "fp8_cast")}
        x = torch.ones(6, 16, dtype=torch.bfloat16, requires_grad=True)
        programs["activation"].gated_activation(x, "swiglu").sum().backward()
        cast = programs["fp8_cast"].cast_and_transpose
        cast(x, torch.float8_e4m3fn, torch.ones(1, 1), None, plain=True, transpose=False)
        cast(x, torch.float8_e4m3fn, torch.ones(1, 1), torch.ones(()), plain=True, transpose=True)
        rule = importlib.import_module(f"{_PROGRAMS}.gated_delta_rule").gated_delta_rule_output
        rows = torch.ones(1, 128, 2, 16, dtype=torch.bfloat16)
        rule(rows, rows, rows, torch.zeros(1, 128, 2), rows[..., 0], None, None, 64)
    return [(each.name, each.shapes, each.num_bytes, each.flops) for each in recorder.record.operations]


def test_a_program_that_is_one_gemm_is_recorded_as_such() -> None:
    recorder = Recorder()
    with recorded_programs(recorder):
        gemms = importlib.import_module(f"{_PROGRAMS}.gemm_activation")
        x, weight, bias = (torch.ones(size, dtype=torch.bfloat16) for size in ((6, 2, 16), (40, 16), (40,)))
        _, output = gemms.linear_with_activation(x, weight, bias, "gelu", keeps_input=True)
        gemms.linear_with_activation(x, weight, None, "gelu", keeps_input=False)
        gemms.activation_input_gradient(x, weight.t().contiguous(), output, "gelu", sums_rows=True)
    forward, without, gradient = recorder.record.operations
    assert [each.gemm for each in recorder.record.operations] == [Gemm(1, 12, 16, 40)] * 3
    assert [each.flops for each in recorder.record.operations] == [2 * 12 * 16 * 40] * 3
    # Input, weight, bias, and two results; then one result; then two matrices in and one out, and sums in float32.
    result = 12 * 40
    assert forward.num_bytes == 2 * (12 * 16 + 40 * 16 + 40 + 2 * result)
    assert without.num_bytes == 2 * (12 * 16 + 40 * 16 + result)
    assert gradient.num_bytes == 2 * (12 * 16 + 40 * 16 + 2 * result) + 4 * 40
    assert {each.itemsize for each in recorder.record.operations} == {2}
    assert operation_seconds(forward, H100) == operation_seconds(replace(forward, name="addmm"), H100)


def test_programs_are_counted_without_the_package_as_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = triton_support.has_readable_memory, triton_support.triton_works
    has_package = has_triton_package()
    with_package = recorded_launches() if has_package else None
    for name in _NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    assert not has_triton_package()
    loaded = {name: module for name, module in sys.modules.items() if name.startswith(f"{_PROGRAMS}.")}
    without = recorded_launches()
    names = [name for name, *_ in without]
    assert names[:2] == ["activation.gated_forward_program", "activation.gated_backward_program"]
    # 6 rows of 16 numbers in, 8 out, of two bytes each; then both and the gradient of the latter.
    assert [num_bytes for _, _, num_bytes, _ in without[:2]] == [6 * 24 * 2, 6 * 40 * 2]
    # A scale is read as well, and the transpose written. The atomic update of the greatest number is not counted.
    assert [num_bytes for _, _, num_bytes, _ in without[2:4]] == [6 * 16 * 3 + 4, 6 * 16 * 4 + 4]
    # Programs with matmuls declare their FLOPs.
    assert [flops for _, _, _, flops in without[:5]] == [0.0] * 5
    assert [flops for _, _, _, flops in without[5:]] == [
        4 * 2 * (2 * 64 * 64 * 16 + 4 * 64**3),
        4 * 2 * 64 * 16 * (3 * 16 + 2 * 64),
    ]
    if has_package:
        assert without == with_package
    assert (triton_support.has_readable_memory, triton_support.triton_works) == before
    assert {name: sys.modules[name] for name in _NAMES} == dict.fromkeys(_NAMES)
    assert {name: module for name, module in sys.modules.items() if name.startswith(f"{_PROGRAMS}.")} == loaded


@pytest.mark.full
@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed here")
def test_a_step_without_the_package_is_that_with_it() -> None:
    layer = "--swiglu --normalization RMSNorm --position-embedding-type rope --bf16 --hidden-dropout 0.1"
    float8 = "--fp8-format hybrid --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64"
    flags = (*MINIMAL, *layer.split(), *float8.split(), "--max-position-embeddings", "64")
    # The first case also tries what a process tries once, such as whether there are casts to fp8.
    cases = [DryRunCase(name, flags, has_package=name != "without") for name in ("first", "without", "with")]
    results = run_dry_runs(cases)
    assert not [result.error for result in results.values() if result.error]
    assert any("_program" in name for name in results["with"].report["by_operation"])
    assert results["without"].report == results["with"].report


NAMES = [f"{triton_kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(triton_kernels.__path__)]
WATCHED = (*NAMES, "triton", "triton.language", "triton.errors")


def loaded() -> dict[str, ModuleType]:
    return {name: sys.modules[name] for name in WATCHED if name in sys.modules}


def test_a_program_that_cannot_be_imported_leaves_the_others_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = importlib.import_module
    own = ModuleType(NAMES[0])
    monkeypatch.setitem(sys.modules, NAMES[0], own)
    monkeypatch.setattr(triton_kernels, NAMES[0].rpartition(".")[2], own, raising=False)
    before = loaded()

    def import_all_but_the_last(name: str) -> ModuleType:
        if name == NAMES[-1]:
            raise ImportError(name)
        return imported(name)

    monkeypatch.setattr("megatron.planner.simulation.fake_triton.importlib.import_module", import_all_but_the_last)
    with pytest.raises(ImportError, match=NAMES[-1]), fake_triton.readable_programs():
        raise AssertionError("the programs are not readable")
    assert loaded() == before
    assert getattr(triton_kernels, NAMES[0].rpartition(".")[2]) is own
    monkeypatch.undo()
    before = loaded()
    with fake_triton.readable_programs():
        assert {*NAMES} <= sys.modules.keys()
    assert loaded() == before
