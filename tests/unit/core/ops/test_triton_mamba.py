"""Triton kernels of Mamba-2, the selective scan and the gated norm: interpreted against float64, and compiled."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.ops.linear_attention import recurrent_selective_scan, selective_scan
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.mamba_mixer import GatedNorm
from megatron.planner.simulation.fake_triton import recorded_programs
from megatron.planner.simulation.recorder import Recorder
from tests.harness.distributed import run_distributed
from tests.harness.triton_interpreter import round_to_bfloat16
from tests.unit.core.ops.interpreted import close, cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton
TOLERANCE = {torch.float32: 2**-18, torch.float16: 2**-9, torch.bfloat16: 2**-7}
"""Of the largest value."""
CANCELLATION = {"A": 4}
"""Multiples of the tolerance: the gradient is a sum of terms with both signs."""
FLOAT32_STACK = 528
INPUTS = ("x", "dt", "A", "B", "C", "D", "initial_state")


@dataclass(frozen=True)
class Case:
    """Sizes of a scan. ``has_rest`` means with ``D`` and an initial state; inputs are parts of wider tensors then."""

    batch: int
    positions: int
    groups: int
    heads_per_group: int
    head_dim: int
    state_dim: int
    has_rest: bool
    has_documents: bool
    chunk_size: int = 64


CASES = (
    Case(2, 6, 2, 2, 5, 4, has_rest=True, has_documents=True),
    Case(1, 9, 1, 3, 5, 9, has_rest=False, has_documents=False),
    # One chunk that is not full, and one group per head.
    Case(1, 3, 2, 1, 3, 4, has_rest=True, has_documents=False, chunk_size=4),
)


def draw(case: Case, dtype: torch.dtype, strength: float = 1.0) -> dict[str, torch.Tensor | None]:
    """Draw the arguments by name, in Mamba-2's dtypes: those of the step sizes, decays and the state are float32."""
    heads = case.groups * case.heads_per_group

    def rows(*shape: int) -> torch.Tensor:
        wide = torch.randn(case.batch, case.positions, shape[0] + 1, *shape[1:]).to(dtype)
        return wide[:, :, 1:] if case.has_rest else wide[:, :, 1:].contiguous()

    return {
        "x": rows(heads, case.head_dim),
        "dt": torch.randn(case.batch, case.positions, heads).exp() / 3,
        "A": -strength * torch.rand(heads),
        "B": rows(case.groups, case.state_dim),
        "C": rows(case.groups, case.state_dim),
        "D": torch.randn(heads).to(dtype) if case.has_rest else None,
        "initial_state": torch.randn(case.batch, heads, case.head_dim, case.state_dim) if case.has_rest else None,
        "document_starts": torch.rand(case.batch, case.positions) < 0.2 if case.has_documents else None,
    }


def make_blocks_small() -> None:
    """Cut small sizes into several blocks, and let the interpreter round operands as a GPU does."""
    from triton.runtime import interpreter

    from tests.emulated_cuda.triton_launches import make_interpreter_fast

    round_to_bfloat16()
    make_interpreter_fast(interpreter)
    from megatron.core.ops.triton import selective_scan as programs

    programs._MIN_OPERAND = 2
    programs._BLOCKS = dict.fromkeys(programs._BLOCKS, (4, 4, 4, 4))


def agree(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((actual.double() - expected).detach().abs().max())
    allowed = CANCELLATION.get(name, 1) * tolerance * float(expected.detach().abs().max())
    assert error <= allowed, (name, error, allowed)


def check_results(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(31)
    make_blocks_small()
    if case.has_documents:
        from megatron.core.ops.triton import selective_scan as programs

        programs._WIDE_HEAD, programs._WIDE_BLOCKS = case.head_dim - 1, (2, 2)
        programs._is_before_hopper = lambda x: True
    given = draw(case, dtype)
    names = [name for name in INPUTS if given[name] is not None]
    wide = {name: given[name].double().requires_grad_() for name in names}
    expected = recurrent_selective_scan(**{**given, **wide}, return_state=True)
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    saved: list[torch.Tensor] = []

    def save(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with cpu_runs_on_triton():
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            actual = selective_scan(**{**given, **leaves}, return_state=True, chunk_size=case.chunk_size)
        assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in given.values() if x is not None}
        assert (actual[0].dtype, actual[1].dtype) == (dtype, torch.float32)
        for name, one, other in zip(("output", "state"), actual, expected):
            agree(name, one, other, TOLERANCE[dtype])
        grads = [torch.randn(x.shape).to(x.dtype) for x in actual]
        # One of the two results may have no gradient.
        for used in ((0, 1), (1,)) if case.has_rest else ((0,),):
            ours, theirs, factors = ([each[place] for place in used] for each in (actual, expected, grads))
            options = {"retain_graph": True, "materialize_grads": True}
            actual_grads = torch.autograd.grad(ours, list(leaves.values()), factors, **options)
            wide_factors = [each.double() for each in factors]
            expected_grads = torch.autograd.grad(theirs, list(wide.values()), wide_factors, **options)
            for name, one, other in zip(names, actual_grads, expected_grads, strict=True):
                assert one.dtype == given[name].dtype
                agree(name, one, other, TOLERANCE[dtype])


@pytest.mark.default(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES, ids=["documents", "ragged", "one chunk"])
def test_results_and_gradients_are_those_of_the_recurrence(case: Case, dtype: torch.dtype) -> None:
    interpret(check_results, case, dtype)


def check_documents() -> None:
    """Change everything before a document's start: nothing after it may change."""
    torch.manual_seed(32)
    make_blocks_small()
    case = Case(1, 9, 1, 1, 4, 4, has_rest=True, has_documents=False)
    given = draw(case, torch.float32)
    given["document_starts"] = (torch.arange(9) == 6).expand(1, -1)
    changed = dict(given)
    for name in ("x", "B", "C"):
        changed[name] = torch.cat((given[name][:, :6] + 1.0, given[name][:, 6:]), dim=1)
    changed["initial_state"] = given["initial_state"] + 1.0
    results = []
    with cpu_runs_on_triton():
        for arguments in (given, changed):
            leaves = {**arguments, "x": arguments["x"].detach().requires_grad_()}
            output, state = selective_scan(**leaves, return_state=True)
            (grad,) = torch.autograd.grad(output[:, 6:].sum() + state.sum(), leaves["x"])
            assert not grad[:, :6].any()
            results.append((output[:, 6:], state, output[:, :6]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][2], results[1][2])


def test_a_document_leaks_nothing_into_the_next() -> None:
    interpret(check_documents)


def check_strong_decays() -> None:
    torch.manual_seed(33)
    case = Case(1, 70, 1, 1, 2, 2, has_rest=True, has_documents=True)
    given = draw(case, torch.float32, strength=1e4)
    leaves = {name: given[name].detach().requires_grad_() for name in INPUTS}
    with cpu_runs_on_triton():
        output, _ = selective_scan(**{**given, **leaves})
        grads = torch.autograd.grad(output.sum(), list(leaves.values()))
    assert all(grad.isfinite().all() for grad in grads)
    wide = {name: given[name].double() for name in INPUTS}
    # Sums of the logarithms of such decays in a chunk reach thousands.
    agree("output", output, recurrent_selective_scan(**{**given, **wide})[0], 1e-4)


def test_strong_decays_are_finite() -> None:
    interpret(check_strong_decays)


def check_choice() -> None:
    torch.manual_seed(34)
    from megatron.core.ops.triton import MAX_HEAD_DIM

    for head_dim, dtype, expected in [
        (MAX_HEAD_DIM, torch.float32, "_TritonSelectiveScan"),
        (MAX_HEAD_DIM + 1, torch.float32, "_SelectiveScan"),
        (4, torch.float64, "_SelectiveScan"),
    ]:
        case = Case(1, 2, 1, 1, head_dim, 2, has_rest=False, has_documents=False)
        given = {name: None if x is None else x.to(dtype) for name, x in draw(case, dtype).items()}
        given["x"] = given["x"].requires_grad_()
        with cpu_runs_on_triton():
            output, _ = selective_scan(**given)
        assert type(output.grad_fn).__name__ == f"{expected}Backward"


def test_wide_heads_and_float64_are_computed_by_torch() -> None:
    interpret(check_choice)


def check_flops() -> None:
    """Count the multiplications of the interpreted matmuls, and compare with what each launch declares."""
    from triton.runtime.interpreter import InterpreterBuilder

    make_blocks_small()
    from megatron.core.ops.triton import selective_scan as programs

    multiply, launch = InterpreterBuilder.create_dot, programs._Scan.launch
    counted, declared = Counter[str](), Counter[str]()
    running = ""

    def multiply_and_count(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        (rows, inner), columns = left.data.shape, right.data.shape[1]
        counted[running] += 2 * rows * inner * columns
        return multiply(builder, left, right, *others)

    def launch_and_note(scan: Any, program: Any, grid: tuple[int, ...], num_warps: int, **given: Any) -> None:
        nonlocal running
        running = program.__name__
        (count,) = program.kwargs["launch_metadata"](grid, None, {**scan._arguments, **given}).values()
        declared[running] += count
        launch(scan, program, grid, num_warps, **given)

    InterpreterBuilder.create_dot, programs._Scan.launch = multiply_and_count, launch_and_note
    # Without any padding.
    given = draw(Case(1, 8, 2, 2, 8, 8, has_rest=False, has_documents=False), torch.float32)
    given["x"] = given["x"].requires_grad_()
    with cpu_runs_on_triton():
        selective_scan(**given)[0].sum().backward()
    assert len(declared) == 5
    assert declared == counted


def test_flops_of_launches_are_those_of_their_matmuls() -> None:
    interpret(check_flops)


def test_launches_are_recorded_with_their_bytes_and_flops() -> None:
    recorder = Recorder()
    x, B = torch.ones(1, 128, 2, 16, dtype=torch.bfloat16), torch.ones(1, 128, 1, 16, dtype=torch.bfloat16)
    with recorded_programs(recorder):
        scan_chunks = importlib.import_module("megatron.core.ops.triton.selective_scan").scan_chunks
        scan_chunks(x, torch.ones(1, 128, 2), -torch.ones(2), B, B, None, None, None, 64)
    states, output = recorder.record.operations[-2:]
    assert (states.name, output.name) == ("selective_scan.states_program", "selective_scan.output_program")
    # Rows of x, dt and B, and A; two states of two heads in bfloat16, and the last ones in float32.
    of_rows = 128 * (2 * 16 * 2 + 2 * 4 + 16 * 2)
    assert states.num_bytes == of_rows + 2 * 4 + 2 * 2 * 16 * 16 * 2 + 2 * 16 * 16 * 4
    assert states.flops == 2 * 128 * 2 * 16 * 16
    # B and C are one tensor here, which counts once; the output is as large as x.
    assert output.num_bytes == of_rows + 2 * 4 + 2 * 2 * 16 * 16 * 2 + 128 * 2 * 16 * 2
    assert output.flops == 2 * 128 * 2 * (64 * 16 + 16 * (16 + 64))
    assert not states.is_uncounted
    assert not output.is_uncounted


def make_norm(kind: str, num_groups: int, width: int, dtype: torch.dtype) -> GatedNorm:
    config: Any = SimpleNamespace(
        hybrid=SimpleNamespace(mamba_norm=kind, mamba_num_groups=num_groups), norm_epsilon=1e-3
    )
    return GatedNorm(config, num_groups * width, single_rank_group(), dtype, "cpu")


def check_gated_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(35)
    from megatron.core.ops.triton import gated_norm as programs

    programs._MAX_PARTS = 2
    for kind in ("after-gate", "before-gate", "none"):
        for batch, positions, num_groups, width in [(2, 3, 2, 5), (1, 2, 1, 16)]:
            norm, wide_norm = (make_norm(kind, num_groups, width, each) for each in (dtype, torch.float64))
            if norm.weight is not None and wide_norm.weight is not None:
                torch.nn.init.normal_(norm.weight)
                wide_norm.weight.data.copy_(norm.weight)
            inner = num_groups * width
            # As they come: the gate is a part of a projection with the positions first, and so is the gradient.
            mixed = torch.randn(positions, batch, inner + 4).to(dtype)
            given = torch.randn(batch, positions, inner).to(dtype), mixed.transpose(0, 1)[..., 2:-2]
            grad = torch.randn(positions, batch, inner).to(dtype).transpose(0, 1)
            wide = [x.double().requires_grad_() for x in given]
            expected = wide_norm(*wide)
            expected_grads = torch.autograd.grad(expected, [*wide, *wide_norm.parameters()], grad.double())
            leaves = [x.detach().requires_grad_() for x in given]
            with cpu_runs_on_triton():
                actual = norm(*leaves)
                assert type(actual.grad_fn).__name__ == "_GatedNormBackward"
                assert actual.transpose(0, 1).is_contiguous()
                actual_grads = torch.autograd.grad(actual, [*leaves, *norm.parameters()], grad)
            for one, other in zip((actual, *actual_grads), (expected, *expected_grads), strict=True):
                close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_gated_norm(dtype: torch.dtype) -> None:
    interpret(check_gated_norm, dtype)


def check_choice_of_norm() -> None:
    from megatron.core.ops.triton import gated_norm as programs

    programs.MAX_GROUP_WIDTH = 4
    for width, dtype, expected in [(4, torch.float32, True), (5, torch.float32, False), (4, torch.float64, False)]:
        x = torch.randn(1, 2, 2 * width, dtype=dtype, requires_grad=True)
        with cpu_runs_on_triton():
            output = make_norm("after-gate", 2, width, dtype)(x, x.detach())
        assert (type(output.grad_fn).__name__ == "_GatedNormBackward") == expected


def test_norms_of_wide_groups_and_float64_are_computed_by_torch() -> None:
    interpret(check_choice_of_norm)


@dataclass(frozen=True)
class Compiled:
    """Registers and spilled bytes per thread of a program, and shared memory of an instance."""

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int


SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Most shared memory of an instance."""
_FLOAT32 = (
    "dt",
    "A",
    "initial_state",
    "last_state",
    "dt_grad",
    "A_parts",
    "D_parts",
    "last_state_grad",
    "initial_grad",
)
_ROWS = ("grad", "x", "B", "C", "D", "output", "x_grad", "B_grad", "C_grad")


def compile_programs(
    capability: int, folder: Path, precision: str, has_rest: bool, head_dim: int = 64, state_dim: int = 128
) -> list[Compiled]:
    """Compile the programs with or without optional arguments, by default for Mamba-2's usual sizes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.core.ops.triton import selective_scan as programs

    triton.knobs.cache.dir = str(folder / "cache")
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    absent = ("D", "D_parts", "starts", "initial_state", "last_state", "last_state_grad", "initial_grad")
    dtype, rows = (torch.bfloat16, "*bf16") if precision == "bf16" else (torch.float32, "*fp32")
    results = []
    for program, length, dims, states, num_warps in _launches(programs, dtype, head_dim, capability):
        sizes = {"HEAD_DIM": head_dim, "STATE_DIM": state_dim, "LOWEST": -50.0, "PRECISION": precision}
        sizes |= {"LENGTH": length, "DIMS": dims, "STATES": states}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = dict(sizes)
        attributes = {}
        for place, argument in enumerate(program.arg_names):
            if argument in sizes or (not has_rest and argument in absent):
                signature[argument] = "constexpr"
                constants.setdefault(argument, None)
                continue
            kind = "*fp32" if argument in _FLOAT32 else rows if argument in (*_ROWS, "states", "state_grads") else "i32"
            signature[argument] = "*u8" if argument == "starts" else kind
            if argument not in ("num_positions", "heads_per_group"):
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": num_warps, "num_stages": programs._NUM_STAGES}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        binary = folder / "program.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([disassembler, "--dump-resource-usage", binary], capture_output=True, text=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found is not None, usage
        results.append(Compiled(program.__name__, *map(int, found.groups()), compiled.metadata.shared))
    return results


def _launches(
    programs: Any, dtype: torch.dtype, head_dim: int, capability: int
) -> Iterator[tuple[Any, int, int, int, int]]:
    """Yield each program with its positions of a chunk, its blocks of channels and of states, and its warps.

    The backward pass computes the states again, in its chunks.
    """
    length, passed, states, dims = programs._BLOCKS[dtype]
    warps = programs._FORWARD_WARPS[dtype]
    yield programs.states_program, length, dims, passed, warps
    yield programs.output_program, length, dims, states, warps
    if head_dim > programs._WIDE_HEAD and (capability // 10, capability % 10) < programs._HOPPER:
        length, states = programs._WIDE_BLOCKS
        yield programs.states_program, length, dims, passed, warps
    yield programs.state_gradients_program, length, dims, passed, warps
    for program in (programs.heads_program, programs.groups_program):
        yield program, length, head_dim, states, programs._GRADIENT_WARPS


@pytest.mark.full
@pytest.mark.parametrize(
    ("capability", "precision", "has_rest", "max_stack"),
    [
        (90, "bf16", True, 0),
        pytest.param(90, "bf16", False, 0, marks=pytest.mark.long),
        pytest.param(100, "bf16", True, 0, marks=pytest.mark.long),
        # Ampere's matmuls have their operands in registers, of which two programs spill a few.
        pytest.param(80, "bf16", True, 32, marks=pytest.mark.long),
        # As float16 is computed.
        pytest.param(80, "tf32", True, 0, marks=pytest.mark.long),
        # Three matmuls stand for one in float32, and some of their operands are spilled.
        pytest.param(90, "tf32x3", True, FLOAT32_STACK, marks=pytest.mark.long),
        pytest.param(100, "tf32x3", True, FLOAT32_STACK, marks=pytest.mark.long),
        pytest.param(80, "tf32x3", True, FLOAT32_STACK, marks=pytest.mark.long),
    ],
)
def test_programs_fit_into_registers_and_shared_memory(
    capability: int, precision: str, has_rest: bool, max_stack: int, tmp_path: Path
) -> None:
    (results,) = run_distributed(1, compile_programs, capability, tmp_path, precision, has_rest, timeout_s=300.0)
    assert len(results) == 5
    for result in results:
        assert result.stack_bytes <= max_stack, result
        assert result.shared_bytes <= SHARED_BYTES[capability], result


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_programs_of_wide_heads_and_states_fit_into_registers_and_shared_memory(
    capability: int, tmp_path: Path
) -> None:
    (results,) = run_distributed(1, compile_programs, capability, tmp_path, "bf16", True, 128, 256, timeout_s=300.0)
    # Before Hopper the backward pass computes the states in chunks of its own.
    assert len(results) == (6 if capability < 90 else 5)
    for result in results:
        # As heads of 64 channels on A100: one program spills a few registers.
        assert result.stack_bytes <= 32, result
        assert result.shared_bytes <= SHARED_BYTES[capability], result
