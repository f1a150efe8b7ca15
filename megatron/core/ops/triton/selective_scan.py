"""Triton kernels of the selective scan of Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060) in chunks.

Forward, one kernel passes the states from chunk to chunk, and one writes the output of each chunk. Backward, one kernel
passes the gradients of the states back, one writes the gradients per head, and one those of ``B`` and ``C``. The latter
adds up the heads of a group in their order, and other partial sums are added in a fixed order too, so that results are
the same on every GPU. Decays are computed again by each kernel.

Sums, decays and states are float32. Operands of a matmul are bfloat16 for bfloat16 inputs, also those copies of the
states and their gradients that one kernel leaves for another, and else float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.device import compute_capability
from megatron.core.ops.linear_attention import MIN_LOG_DECAY

MAX_HEAD_DIM = 128
"""Wider heads do not fit into the registers of one program."""
_MIN_OPERAND = 16
"""Smallest dimension of a matmul's operand."""
_BLOCKS = {torch.bfloat16: (64, 64, 32, 64), torch.float32: (32, 32, 16, 64)}
"""Most positions of a chunk, states of a program that passes them on, states at once of the other programs, and
channels, by the dtype of operands."""
_WIDE_HEAD, _WIDE_BLOCKS = 64, (32, 16)
"""For heads with more channels, the most positions of a chunk and states at once in the backward pass before Hopper.

There operands of the matmuls pass through registers, and larger ones would be spilled. Hopper and Blackwell read them
from shared memory, and longer chunks have fewer states.
"""
_HOPPER = (9, 0)
_FORWARD_WARPS = {torch.bfloat16: 4, torch.float32: 8}
_GRADIENT_WARPS = 8
_NUM_STAGES = 2


def _matmuls(multiply_adds: Callable[[Mapping[str, Any]], int]) -> Callable[..., dict[str, int]]:
    """Return Triton's ``launch_metadata`` of a program, given the multiply-adds per position and head."""

    def metadata(grid: tuple[int, ...], kernel: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
        bits = 32 if arguments["PRECISION"] == "tf32x3" else 16
        rows = -(-arguments["num_positions"] // arguments["LENGTH"]) * arguments["LENGTH"]
        batch = arguments["dt"].shape[0]
        return {f"flops{bits}": 2 * batch * rows * arguments["heads"] * multiply_adds(arguments)}

    return metadata


def _states_work(of: Mapping[str, Any]) -> int:
    return int(of["HEAD_DIM"] * of["STATE_DIM"])


_state_gradients_work = _states_work


def _output_work(of: Mapping[str, Any]) -> int:
    tiles = -(-of["HEAD_DIM"] // of["DIMS"])
    return int(tiles * of["LENGTH"] * of["STATE_DIM"] + of["HEAD_DIM"] * (of["STATE_DIM"] + of["LENGTH"]))


def _heads_work(of: Mapping[str, Any]) -> int:
    return int(of["LENGTH"] * of["STATE_DIM"] + 2 * of["HEAD_DIM"] * (of["STATE_DIM"] + of["LENGTH"]))


def _groups_work(of: Mapping[str, Any]) -> int:
    tiles = -(-of["STATE_DIM"] // of["STATES"])
    of_heads = of["HEAD_DIM"] * (2 * of["STATE_DIM"] + tiles * of["LENGTH"])
    return int(of_heads + 2 * of["LENGTH"] * of["STATE_DIM"] // of["heads_per_group"])


@triton.jit
def _dot(left, right, PRECISION: tl.constexpr):
    """Multiply two matrices in bfloat16, or in float32 with ``PRECISION``."""
    if PRECISION == "bf16":
        result = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16))
    else:
        result = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision=PRECISION)
    return result


@triton.jit
def _decays(dt, A, starts, dt_row, num_rows, LOWEST: tl.constexpr, LENGTH: tl.constexpr):
    """Return per position of a chunk of one head: step size, whether its logarithm of the decay has a gradient, the sum
    of the logarithms from the start of the chunk, and the number of documents that have started in the chunk.
    """
    position = tl.arange(0, LENGTH)
    step = tl.load(dt + position * dt_row, mask=position < num_rows, other=0.0).to(tl.float32)
    log_decay = step * tl.load(A).to(tl.float32)
    is_free = log_decay >= LOWEST
    log_decay = tl.maximum(log_decay, LOWEST)
    if starts is not None:
        is_start = tl.load(starts + position, mask=position < num_rows, other=0).to(tl.int32)
        log_decay = tl.where(is_start != 0, 0.0, log_decay)
        is_free = is_free & (is_start == 0)
        document = tl.cumsum(is_start, axis=0)
    else:
        document = tl.zeros_like(position)
    return step, is_free, tl.cumsum(log_decay, axis=0), document


@triton.jit
def _enter(sums, document):
    """Return the decay of the state before the chunk to each position, 0 from other documents."""
    return tl.where(document == 0, tl.exp(sums), 0.0)


@triton.jit
def _leave(sums, document, LENGTH: tl.constexpr):
    """Return the decay from each position to the state after the chunk, and the decay of the state before the chunk."""
    last = tl.sum(tl.where(tl.arange(0, LENGTH) == LENGTH - 1, sums, 0.0), axis=0)
    last_document = tl.max(document, axis=0)
    through = tl.where(last_document == 0, tl.exp(last), 0.0)
    return tl.where(document == last_document, tl.exp(last - sums), 0.0), through


@triton.jit
def _between(sums, document, LENGTH: tl.constexpr):
    """Return the decay from each position (rows) to each later one (columns), 0 to other documents."""
    position = tl.arange(0, LENGTH)
    is_seen = (position[:, None] <= position[None, :]) & (document[:, None] == document[None, :])
    return tl.where(is_seen, tl.exp(sums[None, :] - sums[:, None]), 0.0)


@triton.jit
def _tile(x, row, column, row_stride, num_rows, WIDTH: tl.constexpr):
    """Load some rows and columns of a matrix, 0 outside."""
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)


@triton.jit(launch_metadata=_matmuls(_states_work))
def states_program(
    x: tl.tensor,
    dt: tl.tensor,
    A: tl.tensor,
    B: tl.tensor,
    starts: tl.tensor,
    initial_state: tl.tensor,
    states: tl.tensor,
    last_state: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    dt_batch: tl.tensor,
    dt_row: tl.tensor,
    B_batch: tl.tensor,
    B_row: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    DIMS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write one tile of the states of a head before each chunk, and after the last one if there is memory for it."""
    number = tl.program_id(0).to(tl.int64)
    entry, head = number // heads, number % heads
    position, column = tl.arange(0, LENGTH), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    state_row = tl.program_id(1) * STATES + tl.arange(0, STATES)
    inside = (state_row < STATE_DIM)[:, None] & (column < HEAD_DIM)[None, :]
    num_chunks = tl.cdiv(num_positions, LENGTH)
    x += entry * x_batch + head * HEAD_DIM
    dt += entry * dt_batch + head
    A += head
    B += entry * B_batch + head // heads_per_group * STATE_DIM
    if starts is not None:
        starts += entry * num_positions
    states += number * num_chunks * (STATE_DIM * HEAD_DIM) + state_row[:, None] * HEAD_DIM + column[None, :]
    state = tl.zeros((STATES, DIMS), tl.float32)
    at = number * (STATE_DIM * HEAD_DIM) + column[None, :] * STATE_DIM + state_row[:, None]
    if initial_state is not None:
        state += tl.load(initial_state + at, mask=inside, other=0.0).to(tl.float32)
    for chunk in range(num_chunks):
        tl.store(states, state.to(states.dtype.element_ty), mask=inside)
        num_rows = num_positions - chunk * LENGTH
        step, _, sums, document = _decays(dt, A, starts, dt_row, num_rows, LOWEST, LENGTH)
        leave, through = _leave(sums, document, LENGTH)
        inputs = _tile(x, position, column, x_row, num_rows, HEAD_DIM).to(tl.float32) * (step * leave)[:, None]
        to_state = _tile(B, position, state_row, B_row, num_rows, STATE_DIM)
        state = state * through + _dot(tl.trans(to_state), inputs, PRECISION)
        x += LENGTH * x_row
        dt += LENGTH * dt_row
        B += LENGTH * B_row
        if starts is not None:
            starts += LENGTH
        states += STATE_DIM * HEAD_DIM
    if last_state is not None:
        tl.store(last_state + at, state, mask=inside)


@triton.jit(launch_metadata=_matmuls(_output_work))
def output_program(
    x: tl.tensor,
    dt: tl.tensor,
    A: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    D: tl.tensor,
    starts: tl.tensor,
    states: tl.tensor,
    output: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    dt_batch: tl.tensor,
    dt_row: tl.tensor,
    B_batch: tl.tensor,
    B_row: tl.tensor,
    C_batch: tl.tensor,
    C_row: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    DIMS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write some channels of the output of one chunk and head."""
    number = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    head, entry, chunk = number % heads, number // heads // num_chunks, number // heads % num_chunks
    position, column = tl.arange(0, LENGTH), tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    group, first_row = head // heads_per_group, chunk * LENGTH
    num_rows = (num_positions - first_row).to(tl.int32)
    B += entry * B_batch + first_row * B_row + group * STATE_DIM
    C += entry * C_batch + first_row * C_row + group * STATE_DIM
    states += ((entry * heads + head) * num_chunks + chunk) * (STATE_DIM * HEAD_DIM)
    products = tl.zeros((LENGTH, LENGTH), tl.float32)
    result = tl.zeros((LENGTH, DIMS), tl.float32)
    for first in range(0, STATE_DIM, STATES):
        state_row = first + tl.arange(0, STATES)
        to_state = _tile(B, position, state_row, B_row, num_rows, STATE_DIM)
        from_state = _tile(C, position, state_row, C_row, num_rows, STATE_DIM)
        state = _tile(states, state_row, column, HEAD_DIM, STATE_DIM, HEAD_DIM)
        products += _dot(from_state, tl.trans(to_state), PRECISION)
        result += _dot(from_state, state, PRECISION)
    if starts is not None:
        starts += entry * num_positions + first_row
    dt += entry * dt_batch + first_row * dt_row + head
    step, _, sums, document = _decays(dt, A + head, starts, dt_row, num_rows, LOWEST, LENGTH)
    result *= _enter(sums, document)[:, None]
    products *= tl.trans(_between(sums, document, LENGTH))
    x += entry * x_batch + first_row * x_row + head * HEAD_DIM
    inputs = _tile(x, position, column, x_row, num_rows, HEAD_DIM).to(tl.float32)
    result += _dot(products, inputs * step[:, None], PRECISION)
    if D is not None:
        result += inputs * tl.load(D + head).to(tl.float32)
    output += (entry * num_positions + first_row) * heads * HEAD_DIM + head * HEAD_DIM
    at = position[:, None] * heads * HEAD_DIM + column[None, :]
    inside = (position < num_rows)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=inside)


@triton.jit(launch_metadata=_matmuls(_state_gradients_work))
def state_gradients_program(
    grad: tl.tensor,
    dt: tl.tensor,
    A: tl.tensor,
    C: tl.tensor,
    starts: tl.tensor,
    last_state_grad: tl.tensor,
    state_grads: tl.tensor,
    initial_grad: tl.tensor,
    grad_batch: tl.tensor,
    grad_row: tl.tensor,
    dt_batch: tl.tensor,
    dt_row: tl.tensor,
    C_batch: tl.tensor,
    C_row: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    DIMS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write one tile of the gradients of a head's states after each chunk, and of the initial state."""
    number = tl.program_id(0).to(tl.int64)
    entry, head = number // heads, number % heads
    position, column = tl.arange(0, LENGTH), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    state_row = tl.program_id(1) * STATES + tl.arange(0, STATES)
    inside = (state_row < STATE_DIM)[:, None] & (column < HEAD_DIM)[None, :]
    num_chunks = tl.cdiv(num_positions, LENGTH)
    # From the row after the last chunk on back.
    first_row = tl.full((), num_chunks, tl.int64) * LENGTH
    grad += entry * grad_batch + first_row * grad_row + head * HEAD_DIM
    dt += entry * dt_batch + first_row * dt_row + head
    A += head
    C += entry * C_batch + first_row * C_row + head // heads_per_group * STATE_DIM
    if starts is not None:
        starts += entry * num_positions + first_row
    state_grads += (number + 1) * num_chunks * (STATE_DIM * HEAD_DIM) + state_row[:, None] * HEAD_DIM + column[None, :]
    state_grad = tl.zeros((STATES, DIMS), tl.float32)
    at = number * (STATE_DIM * HEAD_DIM) + column[None, :] * STATE_DIM + state_row[:, None]
    if last_state_grad is not None:
        state_grad += tl.load(last_state_grad + at, mask=inside, other=0.0).to(tl.float32)
    for passed in range(num_chunks):
        grad -= LENGTH * grad_row
        dt -= LENGTH * dt_row
        C -= LENGTH * C_row
        if starts is not None:
            starts -= LENGTH
        state_grads -= STATE_DIM * HEAD_DIM
        tl.store(state_grads, state_grad.to(state_grads.dtype.element_ty), mask=inside)
        num_rows = num_positions - (num_chunks - 1 - passed) * LENGTH
        _, _, sums, document = _decays(dt, A, starts, dt_row, num_rows, LOWEST, LENGTH)
        _, through = _leave(sums, document, LENGTH)
        entered_grad = _tile(grad, position, column, grad_row, num_rows, HEAD_DIM).to(tl.float32)
        entered_grad *= _enter(sums, document)[:, None]
        from_state = _tile(C, position, state_row, C_row, num_rows, STATE_DIM)
        state_grad = state_grad * through + _dot(tl.trans(from_state), entered_grad, PRECISION)
    if initial_grad is not None:
        tl.store(initial_grad + at, state_grad.to(initial_grad.dtype.element_ty), mask=inside)


@triton.jit(launch_metadata=_matmuls(_heads_work))
def heads_program(
    grad: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    A: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    D: tl.tensor,
    starts: tl.tensor,
    states: tl.tensor,
    state_grads: tl.tensor,
    x_grad: tl.tensor,
    dt_grad: tl.tensor,
    A_parts: tl.tensor,
    D_parts: tl.tensor,
    grad_batch: tl.tensor,
    grad_row: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    dt_batch: tl.tensor,
    dt_row: tl.tensor,
    B_batch: tl.tensor,
    B_row: tl.tensor,
    C_batch: tl.tensor,
    C_row: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    DIMS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write the gradients of the inputs and steps of one chunk and head, and its part of those of ``A`` and ``D``."""
    number = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    head, entry, chunk = number % heads, number // heads // num_chunks, number // heads % num_chunks
    position, column = tl.arange(0, LENGTH), tl.arange(0, DIMS)
    group, first_row = head // heads_per_group, chunk * LENGTH
    num_rows = (num_positions - first_row).to(tl.int32)
    x += entry * x_batch + first_row * x_row + head * HEAD_DIM
    grad += entry * grad_batch + first_row * grad_row + head * HEAD_DIM
    B += entry * B_batch + first_row * B_row + group * STATE_DIM
    C += entry * C_batch + first_row * C_row + group * STATE_DIM
    states += ((entry * heads + head) * num_chunks + chunk) * (STATE_DIM * HEAD_DIM)
    state_grads += ((entry * heads + head) * num_chunks + chunk) * (STATE_DIM * HEAD_DIM)
    # Rows are the positions of inputs, columns the positions of outputs.
    products = tl.zeros((LENGTH, LENGTH), tl.float32)
    inputs_grad = tl.zeros((LENGTH, DIMS), tl.float32)
    sums_grad = tl.zeros((LENGTH,), tl.float32)
    passed_grad = tl.zeros((DIMS,), tl.float32)
    output_grad = _tile(grad, position, column, grad_row, num_rows, HEAD_DIM)
    for first in range(0, STATE_DIM, STATES):
        state_row = first + tl.arange(0, STATES)
        to_state = _tile(B, position, state_row, B_row, num_rows, STATE_DIM)
        from_state = _tile(C, position, state_row, C_row, num_rows, STATE_DIM)
        products += _dot(to_state, tl.trans(from_state), PRECISION)
        state = _tile(states, state_row, column, HEAD_DIM, STATE_DIM, HEAD_DIM)
        sums_grad += tl.sum(_dot(from_state, state, PRECISION) * output_grad.to(tl.float32), axis=1)
        state_grad = _tile(state_grads, state_row, column, HEAD_DIM, STATE_DIM, HEAD_DIM)
        inputs_grad += _dot(to_state, state_grad, PRECISION)
        passed_grad += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), axis=0)
    if starts is not None:
        starts += entry * num_positions + first_row
    dt += entry * dt_batch + first_row * dt_row + head
    step, is_free, sums, document = _decays(dt, A + head, starts, dt_row, num_rows, LOWEST, LENGTH)
    leave, through = _leave(sums, document, LENGTH)
    inputs = _tile(x, position, column, x_row, num_rows, HEAD_DIM)
    inputs_grad *= leave[:, None]
    step_grad = tl.sum(inputs.to(tl.float32) * inputs_grad, axis=1)
    products *= _between(sums, document, LENGTH)
    inputs_grad += _dot(products, output_grad, PRECISION)
    scores_grad = _dot(inputs, tl.trans(output_grad), PRECISION) * products
    # The decay at a position multiplies the state before the chunk on its way to the position and those after it and
    # through the chunk, earlier inputs on their way to these positions, and earlier inputs on their way out.
    leaving_grad = step * step_grad
    log_decay_grad = tl.sum(passed_grad, axis=0) * through + tl.cumsum(leaving_grad, axis=0) - leaving_grad
    attention_grad = tl.sum(scores_grad, axis=1)
    sums_grad = sums_grad * _enter(sums, document) + tl.sum(scores_grad * step[:, None], axis=0) - step * attention_grad
    log_decay_grad = tl.where(is_free, log_decay_grad + tl.cumsum(sums_grad, axis=0, reverse=True), 0.0)
    step_grad += attention_grad
    # Triton 3.7 fails to compile a sum of this vector for Blackwell, and compiles the last of its prefix sums.
    prefixes = tl.cumsum(log_decay_grad * step, axis=0)
    tl.store(A_parts + number + tl.zeros_like(position), prefixes, mask=position == LENGTH - 1)
    step_grad += log_decay_grad * tl.load(A + head).to(tl.float32)
    dt_grad += (entry * num_positions + first_row) * heads + head
    tl.store(dt_grad + position * heads, step_grad.to(dt_grad.dtype.element_ty), mask=position < num_rows)
    inputs_grad *= step[:, None]
    if D is not None:
        given_grad = output_grad.to(tl.float32)
        tl.store(D_parts + number, tl.sum(tl.sum(inputs.to(tl.float32) * given_grad, axis=1), axis=0))
        inputs_grad += given_grad * tl.load(D + head).to(tl.float32)
    x_grad += ((entry * num_positions + first_row) * heads + head) * HEAD_DIM
    inside = (position < num_rows)[:, None] & (column < HEAD_DIM)[None, :]
    at = position[:, None] * heads * HEAD_DIM + column[None, :]
    tl.store(x_grad + at, inputs_grad.to(x_grad.dtype.element_ty), mask=inside)


@triton.jit(launch_metadata=_matmuls(_groups_work))
def groups_program(
    grad: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    A: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    starts: tl.tensor,
    states: tl.tensor,
    state_grads: tl.tensor,
    B_grad: tl.tensor,
    C_grad: tl.tensor,
    grad_batch: tl.tensor,
    grad_row: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    dt_batch: tl.tensor,
    dt_row: tl.tensor,
    B_batch: tl.tensor,
    B_row: tl.tensor,
    C_batch: tl.tensor,
    C_row: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    LOWEST: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    DIMS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Write some columns of the gradients of ``B`` and ``C`` of one chunk and group, summed over the group's heads."""
    number = tl.program_id(0).to(tl.int64)
    num_chunks, groups = tl.cdiv(num_positions, LENGTH), heads // heads_per_group
    group, entry, chunk = number % groups, number // groups // num_chunks, number // groups % num_chunks
    position, column = tl.arange(0, LENGTH), tl.arange(0, DIMS)
    state_row = tl.program_id(1) * STATES + tl.arange(0, STATES)
    head, first_row = group * heads_per_group, chunk * LENGTH
    num_rows = (num_positions - first_row).to(tl.int32)
    x += entry * x_batch + first_row * x_row + head * HEAD_DIM
    grad += entry * grad_batch + first_row * grad_row + head * HEAD_DIM
    dt += entry * dt_batch + first_row * dt_row + head
    A += head
    if starts is not None:
        starts += entry * num_positions + first_row
    states += ((entry * heads + head) * num_chunks + chunk) * (STATE_DIM * HEAD_DIM)
    state_grads += ((entry * heads + head) * num_chunks + chunk) * (STATE_DIM * HEAD_DIM)
    products_grad = tl.zeros((LENGTH, LENGTH), tl.float32)
    to_state_grad = tl.zeros((LENGTH, STATES), tl.float32)
    from_state_grad = tl.zeros((LENGTH, STATES), tl.float32)
    for _ in range(heads_per_group):
        step, _, sums, document = _decays(dt, A, starts, dt_row, num_rows, LOWEST, LENGTH)
        leave, _ = _leave(sums, document, LENGTH)
        inputs = _tile(x, position, column, x_row, num_rows, HEAD_DIM).to(tl.float32) * step[:, None]
        output_grad = _tile(grad, position, column, grad_row, num_rows, HEAD_DIM)
        products_grad += _dot(inputs, tl.trans(output_grad), PRECISION) * _between(sums, document, LENGTH)
        state = _tile(states, state_row, column, HEAD_DIM, STATE_DIM, HEAD_DIM)
        entered_grad = output_grad.to(tl.float32) * _enter(sums, document)[:, None]
        from_state_grad += _dot(entered_grad, tl.trans(state), PRECISION)
        state_grad = _tile(state_grads, state_row, column, HEAD_DIM, STATE_DIM, HEAD_DIM)
        to_state_grad += _dot(inputs * leave[:, None], tl.trans(state_grad), PRECISION)
        x += HEAD_DIM
        grad += HEAD_DIM
        dt += 1
        A += 1
        states += num_chunks * (STATE_DIM * HEAD_DIM)
        state_grads += num_chunks * (STATE_DIM * HEAD_DIM)
    C += entry * C_batch + first_row * C_row + group * STATE_DIM
    from_state = _tile(C, position, state_row, C_row, num_rows, STATE_DIM)
    to_state_grad += _dot(products_grad, from_state, PRECISION)
    B += entry * B_batch + first_row * B_row + group * STATE_DIM
    to_state = _tile(B, position, state_row, B_row, num_rows, STATE_DIM)
    from_state_grad += _dot(tl.trans(products_grad), to_state, PRECISION)
    first_group = (entry * num_positions + first_row) * groups + group
    inside = (position < num_rows)[:, None] & (state_row < STATE_DIM)[None, :]
    at = position[:, None] * groups * STATE_DIM + state_row[None, :]
    B_grad += first_group * STATE_DIM
    C_grad += first_group * STATE_DIM
    tl.store(B_grad + at, to_state_grad.to(B_grad.dtype.element_ty), mask=inside)
    tl.store(C_grad + at, from_state_grad.to(C_grad.dtype.element_ty), mask=inside)


def _block(size: int, limit: int) -> int:
    return min(max(int(triton.next_power_of_2(size)), _MIN_OPERAND), limit)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x: [b, s, ...]``, or a copy, with contiguous elements of each position."""
    return x if x[:1, :1].is_contiguous() else x.contiguous()


def _is_before_hopper(x: torch.Tensor) -> bool:
    capability = compute_capability(x.device) if x.is_cuda else None
    return capability is not None and capability < _HOPPER


class _Scan:
    """Arguments that the kernels share, by their names in the kernels."""

    def __init__(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None,
        document_starts: torch.Tensor | None,
        length: int,
        grad: torch.Tensor | None = None,
    ) -> None:
        self.batch, num_positions, self.heads, self.head_dim = x.shape
        self.groups, self.state_dim = B.shape[2:]
        precision = {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(x.dtype, "tf32x3")
        self.operand_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        longest, *limits = _BLOCKS[self.operand_dtype]
        if grad is not None and self.head_dim > _WIDE_HEAD and _is_before_hopper(x):
            longest, limits[1] = (min(each) for each in zip((longest, limits[1]), _WIDE_BLOCKS))
        length = min(max(length, _MIN_OPERAND), longest)
        self.num_chunks = triton.cdiv(num_positions, length)
        sizes = (self.state_dim, self.state_dim, self.head_dim)
        self.passed_states, self.states_at_once, self.dims = (_block(*each) for each in zip(sizes, limits))
        self.forward_warps = _FORWARD_WARPS[self.operand_dtype]
        given = {"grad": grad, "x": x, "dt": dt, "B": B, "C": C}
        rows = {name: _dense_rows(each) for name, each in given.items() if each is not None}
        strides = {f"{name}_batch": each.stride(0) for name, each in rows.items()}
        strides |= {f"{name}_row": each.stride(1) for name, each in rows.items()}
        starts = None if document_starts is None else document_starts.contiguous().view(torch.uint8)
        self._arguments: dict[str, Any] = rows | strides
        self._arguments |= {"A": A.contiguous(), "D": None if D is None else D.contiguous(), "starts": starts}
        self._arguments |= {"num_positions": num_positions, "heads": self.heads}
        self._arguments |= {"heads_per_group": self.heads // self.groups}
        self._arguments |= {"HEAD_DIM": self.head_dim, "STATE_DIM": self.state_dim, "LENGTH": length}
        self._arguments |= {"LOWEST": MIN_LOG_DECAY, "PRECISION": precision}

    def launch(self, program: Any, grid: tuple[int, ...], num_warps: int, **given: Any) -> None:
        """Launch a program with the shared and the given arguments that it takes."""
        arguments = self._arguments | given
        arguments = {name: arguments[name] for name in program.arg_names}
        if self.batch:
            program[grid](**arguments, num_warps=num_warps, num_stages=_NUM_STAGES)

    def pass_states(self, program: Any, **given: Any) -> None:
        """Launch a program that passes the tiles of states, or of their gradients, from chunk to chunk."""
        tiles = triton.cdiv(self.state_dim, self.passed_states), triton.cdiv(self.head_dim, self.dims)
        grid = self.batch * self.heads, *tiles
        self.launch(program, grid, self.forward_warps, DIMS=self.dims, STATES=self.passed_states, **given)

    def states(self, initial_state: torch.Tensor | None, last_state: torch.Tensor | None) -> torch.Tensor:
        """Return the states before each chunk as operands of matmuls, and write the last state if given.

        Shapes: ``initial_state, last_state: [b, n, d, d_state] -> [b, n, chunks, d_state, d]``.
        """
        initial_state = None if initial_state is None else initial_state.contiguous()
        states = self.empty_states()
        self.pass_states(states_program, initial_state=initial_state, states=states, last_state=last_state)
        return states

    def empty_states(self) -> torch.Tensor:
        shape = self.batch, self.heads, self.num_chunks, self.state_dim, self.head_dim
        x: torch.Tensor = self._arguments["x"]
        return x.new_empty(shape, dtype=self.operand_dtype)


def scan_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the last state; see `megatron.core.ops.linear_attention.selective_scan`.

    Chunks have ``length`` positions, but at least 16, and at most 64 or for other dtypes than bfloat16 32. ``d`` is at
    most `MAX_HEAD_DIM`.
    """
    scan = _Scan(x, dt, A, B, C, D, document_starts, length)
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    last_state = x.new_empty(scan.batch, scan.heads, scan.head_dim, scan.state_dim, dtype=torch.float32)
    states = scan.states(initial_state, last_state)
    grid = scan.batch * scan.num_chunks * scan.heads, triton.cdiv(scan.head_dim, scan.dims)
    blocks = {"DIMS": scan.dims, "STATES": scan.states_at_once}
    scan.launch(output_program, grid, scan.forward_warps, states=states, output=output, **blocks)
    return output, last_state


def scan_gradients(
    grad: torch.Tensor,
    last_state_grad: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    length: int,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of ``x, dt, A, B, C, D`` and ``initial_state`` of `scan_chunks` in their dtypes.

    Shapes: as in `scan_chunks`; ``grad: [b, s, n, d], last_state_grad: [b, n, d, d_state]``.
    """
    scan = _Scan(x, dt, A, B, C, D, document_starts, length, grad)
    x_grad, dt_grad, B_grad, C_grad = (
        torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, dt, B, C)
    )
    initial_grad = (
        None if initial_state is None else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    )
    parts = x.new_empty(1 if D is None else 2, scan.batch * scan.num_chunks, scan.heads, dtype=torch.float32)
    states, state_grads = scan.states(initial_state, None), scan.empty_states()
    last_state_grad = None if last_state_grad is None else last_state_grad.contiguous()
    scan.pass_states(
        state_gradients_program, last_state_grad=last_state_grad, state_grads=state_grads, initial_grad=initial_grad
    )
    blocks = {"DIMS": _block(scan.head_dim, MAX_HEAD_DIM), "STATES": scan.states_at_once}
    given = {"states": states, "state_grads": state_grads, **blocks}
    of_parts = {"A_parts": parts[0], "D_parts": None if D is None else parts[1]}
    grid = (scan.batch * scan.num_chunks * scan.heads,)
    scan.launch(heads_program, grid, _GRADIENT_WARPS, x_grad=x_grad, dt_grad=dt_grad, **of_parts, **given)
    tiles = scan.batch * scan.num_chunks * scan.groups, triton.cdiv(scan.state_dim, scan.states_at_once)
    scan.launch(groups_program, tiles, _GRADIENT_WARPS, B_grad=B_grad, C_grad=C_grad, **given)
    A_grad, *D_grad = parts.sum(dim=1).unbind()
    D_result = None if D is None else D_grad[0].to(D.dtype)
    return x_grad, dt_grad, A_grad.to(A.dtype), B_grad, C_grad, D_result, initial_grad
