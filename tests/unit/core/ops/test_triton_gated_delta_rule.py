"""Triton's programs of the gated delta rule, interpreted on the CPU, against the recurrence in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.linear_attention import gated_delta_rule, recurrent_gated_delta_rule
from megatron.planner.simulation.fake_triton import recorded_programs
from megatron.planner.simulation.recorder import Recorder
from tests.harness.triton_interpreter import round_to_bfloat16
from tests.unit.core.ops.interpreted import cpu_runs_on_triton, interpret, needs_triton

pytestmark = needs_triton
ALLOWED = {torch.float32: 2**-18, torch.bfloat16: 2**-6, torch.float16: 2**-10}
"""Error relative to the largest element."""
PROGRAMS = ("sums_program", "products_program", "states_program")
BACKWARD = (*PROGRAMS, "state_gradients_program", "gradients_program")


def prepare_interpreter() -> None:
    """Let the interpreter round as a GPU does, and take less time. Call it once per process."""
    from triton.runtime import interpreter

    from tests.emulated_cuda.triton_launches import make_interpreter_fast

    round_to_bfloat16()
    make_interpreter_fast(interpreter)


def draw(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, per_channel: bool, strength: float = 3.0
) -> list[torch.Tensor]:
    """Draw q, k, v, log_decay, beta and an initial state for ``shape: (b, s, n, dk, dv)``."""
    *positions, key_dim, value_dim = shape
    batch, _, heads = positions
    return [
        torch.randn(*positions, key_dim).to(dtype),
        F.normalize(torch.randn(*positions, key_dim), dim=-1).to(dtype),
        torch.randn(*positions, value_dim).to(dtype),
        -strength * torch.rand(*positions, key_dim if per_channel else 1).pow(3).squeeze(-1),
        # More than 1 reflects the state.
        (1.5 * torch.rand(*positions)).to(dtype),
        torch.randn(batch, heads, key_dim, value_dim),
    ]


def compare(
    arguments: list[torch.Tensor],
    starts: torch.Tensor | None,
    chunk_size: int,
    with_state: bool = True,
    allowed: float | None = None,
) -> None:
    """Compare results and all gradients with those of the recurrence."""
    allowed = ALLOWED[arguments[0].dtype] if allowed is None else allowed
    leaves = [x.detach().requires_grad_() for x in arguments[: 6 if with_state else 5]]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    state = [] if with_state else [None]
    expected = recurrent_gated_delta_rule(*wide, *state, starts, return_state=True)
    with cpu_runs_on_triton():
        actual = gated_delta_rule(*leaves, *state, starts, return_state=True, chunk_size=chunk_size)
    assert actual[0].grad_fn is not None
    assert "Triton" in type(actual[0].grad_fn).__name__
    assert actual[1] is not None
    assert (actual[0].dtype, actual[1].dtype) == (arguments[2].dtype, torch.float32)
    grads = [torch.randn(x.shape).to(x.dtype) for x in actual if x is not None]
    actual_grads = torch.autograd.grad(actual, leaves, grads)
    expected_grads = torch.autograd.grad(expected, wide, [x.double() for x in grads])
    names = ("output", "state", "q", "k", "v", "log_decay", "beta", "initial_state")
    for name, one, other in zip(names, (*actual, *actual_grads), (*expected, *expected_grads)):
        error, largest = float((one.double() - other).detach().abs().max()), float(other.detach().abs().max())
        assert error <= allowed * largest, (name, error, largest)


def check_against_recurrence(dtype: torch.dtype, per_channel: bool) -> None:
    from megatron.core.ops.triton import gated_delta_rule as programs

    programs._BLOCKS = dict.fromkeys(programs._BLOCKS, (64, 16, 16))
    programs._SUMS_COLUMNS = 2
    prepare_interpreter()
    torch.manual_seed(31)
    # Positions, channels and blocks of channels are cut off at the end; one and several chunks; documents that start at
    # the first position, at that of a chunk, and at the last one.
    compare(draw((1, 37, 2, 20, 9), dtype, per_channel), None, 16)
    starts = torch.zeros(2, 35, dtype=torch.bool)
    starts[0, [0, 16, 34]], starts[1, [5, 15, 31, 33]] = True, True
    compare(draw((2, 35, 1, 8, 18), dtype, per_channel), starts, 8)
    # A state in two blocks of rows, with an initial state, a chunk that is cut off, and documents.
    programs._MAX_KEY_BLOCK = 16
    compare(draw((1, 21, 2, 20, 18), dtype, per_channel), torch.rand(1, 21) < 0.2, 16)
    compare(draw((2, 18, 1, 32, 5), dtype, per_channel), None, 16)
    programs._MAX_KEY_BLOCK = 128
    # Sums of the logarithms of such decays in a chunk reach thousands, as in the torch form.
    strong = draw((1, 70, 1, 16, 4), dtype, per_channel, 300.0)
    compare(strong, torch.rand(1, 70) < 0.1, 64, with_state=False, allowed=max(ALLOWED[dtype], 1e-4))
    compare(draw((1, 3, 2, 12, 6), dtype, per_channel), None, 64)


@pytest.mark.default(3)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_programs_have_the_results_and_gradients_of_the_recurrence(dtype: torch.dtype, per_channel: bool) -> None:
    interpret(check_against_recurrence, dtype, per_channel)


def check_equal_keys() -> None:
    prepare_interpreter()
    torch.manual_seed(32)
    q, k, v, _, beta, state = draw((1, 64, 1, 16, 16), torch.float32, False)
    # The powers of the triangular matrix have elements of up to 10^18. Those of its inverse are 0, 1 and -1.
    k, beta = k[:, :1].expand_as(k), torch.ones_like(beta)
    compare([q, k, v, torch.zeros_like(beta), beta, state], None, 64)


def test_equal_keys_lose_no_precision() -> None:
    interpret(check_equal_keys)


def check_documents(per_channel: bool) -> None:
    prepare_interpreter()
    torch.manual_seed(33)
    arguments = draw((1, 40, 1, 16, 16), torch.bfloat16, per_channel)
    starts = torch.zeros(1, 40, dtype=torch.bool)
    starts[0, 21] = True
    # Decays of an earlier document in the chunk change how sums of logarithms are rounded, and nothing else.
    changed = [torch.cat((x[:, :21] + 1.0, x[:, 21:]), dim=1) for x in arguments[:5]]
    changed[3] = arguments[3]
    with cpu_runs_on_triton():
        output, state = gated_delta_rule(*arguments, starts, return_state=True, chunk_size=16)
        other, other_state = gated_delta_rule(*changed, arguments[5] + 1.0, starts, return_state=True, chunk_size=16)
    assert state is not None
    assert other_state is not None
    assert not torch.equal(output[:, :21], other[:, :21])
    assert torch.equal(output[:, 21:], other[:, 21:])
    assert torch.equal(state, other_state)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_document_leaks_nothing_into_the_next(per_channel: bool) -> None:
    interpret(check_documents, per_channel)


def check_selection() -> None:
    saved: list[torch.Tensor] = []
    with cpu_runs_on_triton():
        arguments = [x.requires_grad_() for x in draw((1, 20, 1, 4, 4), torch.float32, False)]
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
            output, _ = gated_delta_rule(*arguments)
        # The backward pass computes everything else again.
        assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in arguments}
        for size, name in [(257, "_GatedDeltaRule"), (4, "_TritonGatedDeltaRule")]:
            output, _ = gated_delta_rule(*(x.requires_grad_() for x in draw((1, 2, 1, size, 1), torch.float32, False)))
            assert type(output.grad_fn).__name__ == f"{name}Backward"
        wide = [x.double().requires_grad_() for x in draw((1, 2, 1, 4, 1), torch.float32, False)]
        assert type(gated_delta_rule(*wide)[0].grad_fn).__name__ == "_GatedDeltaRuleBackward"


def test_programs_save_their_inputs_and_leave_other_dtypes_and_wide_heads_to_torch() -> None:
    interpret(check_selection)


def launches(shape: tuple[int, int, int, int, int], dtype: torch.dtype, per_channel: bool) -> dict[str, Any]:
    """Return bytes and FLOPs of the recorded launches of both passes, by program, which run nothing."""
    recorder = Recorder()
    with recorded_programs(recorder), torch.no_grad():
        from megatron.core.ops.triton import gated_delta_rule as programs

        *arguments, _ = draw(shape, dtype, per_channel)
        output, state = programs.gated_delta_rule_output(*arguments, None, None, 64)
        programs.gated_delta_rule_gradients(output, state, *arguments, None, None, 64)
    operations = recorder.record.operations
    assert not any(each.is_uncounted for each in operations)
    names = [each.name.removeprefix("gated_delta_rule.") for each in operations]
    assert names == [*PROGRAMS, *BACKWARD]
    # The last launch of each.
    return {name: (each.num_bytes, each.flops) for name, each in zip(names, operations)}


@pytest.mark.parametrize("per_channel", [False, True])
def test_launches_are_counted_with_their_bytes_and_flops(per_channel: bool) -> None:
    batch, positions, heads, keys, values = shape = (2, 128, 3, 32, 16)
    tokens, chunks = batch * positions * heads, batch * heads * 2
    counted = launches(shape, torch.bfloat16, per_channel)
    levels = 6 if per_channel else 1
    channels = keys if per_channel else 1
    squares = 2 * 2 * tokens * 64
    decayed = 3 * 2 * tokens * keys if per_channel else 0
    assert counted["sums_program"] == (2 * 4 * tokens * channels, 0.0)
    of_products = 2 * (2 * levels * tokens * 64 * keys + chunks * 4 * 64**3)
    given = 2 * tokens * (2 * keys + 1) + 4 * tokens * channels
    assert counted["products_program"] == (given + squares + decayed, of_products)
    # The second launch keeps the states and corrections instead of writing the output and the last state.
    kept = 2 * (chunks * keys * values + tokens * values)
    given = 4 * tokens * channels + squares // 2 + 2 * tokens * (1 + values)
    read = 2 * tokens * keys * (2 if per_channel else 1)
    assert counted["states_program"] == (given + read + kept, 2 * tokens * values * (2 * keys + 64))
    assert counted["state_gradients_program"][1] == 2 * tokens * values * (3 * keys + 2 * 64)
    of_gradients = 2 * 64 * values + 3 * keys * values + 4 * levels * 64 * keys
    assert counted["gradients_program"][1] == 2 * tokens * of_gradients


def test_wide_keys_have_a_launch_for_the_output() -> None:
    batch, positions, heads, keys, values = shape = (1, 128, 2, 256, 16)
    recorder = Recorder()
    with recorded_programs(recorder), torch.no_grad():
        from megatron.core.ops.triton import gated_delta_rule as programs

        *arguments, _ = draw(shape, torch.bfloat16, False)
        programs.gated_delta_rule_output(*arguments, None, None, 64)
    operations = recorder.record.operations
    names = [each.name.removeprefix("gated_delta_rule.") for each in operations]
    assert names == [*PROGRAMS, "output_program"]
    tokens, chunks = batch * positions * heads, batch * heads * 2
    assert operations[-1].flops == 2 * tokens * values * (keys + 64)
    # Queries, corrections, the output, products within chunks, states, and sums of decays.
    kept = 2 * (tokens * (keys + 2 * values + 64) + chunks * keys * values)
    assert operations[-1].num_bytes == kept + 4 * tokens
