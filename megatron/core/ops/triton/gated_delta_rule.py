"""Triton kernels of the gated delta rule in chunks of positions, with decays per head or per channel of the keys (KDA).

`megatron.core.ops.linear_attention.delta_rule` has the same algorithm and defines the results: one triangular
system per chunk (Yang et al. 2024, https://arxiv.org/abs/2406.06484 and https://arxiv.org/abs/2412.06464; Kimi Team
2025, https://arxiv.org/abs/2510.26692). The forward pass is three kernels: sums of the decays, the products of each
chunk with the inverse of its system, and the recurrence over chunks, which keeps a block of the state's columns in
registers. With keys of more than 128 channels the state is two blocks of rows, and a fourth kernel computes the output
from the states and corrections of all chunks. The backward pass runs the three again, then the recurrence of the
state's gradient from the last chunk to the first, and one kernel per chunk for the gradients of the inputs.

Sums and states are float32. Matmuls of bfloat16 inputs have bfloat16 operands. All other matmuls, and the inverse,
split float32 operands into three TensorFloat-32 matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.ops.linear_attention import MIN_LOG_DECAY

_MAX_KEY_BLOCK = 128
_MIN_BLOCK = 16
"""Least size of a matmul's operands, and of a chunk."""
_BLOCKS = {torch.bfloat16: (64, 32, 32), torch.float32: (32, 16, 16)}
"""Greatest numbers of positions per chunk, channels of keys and channels of values, by the dtype of the operands.

With decays per channel, blocks of keys have the least size, because each comes with its decays.
"""
_WIDE_VALUES = 16
"""Channels of the values of a state in two blocks of rows."""
_SUMS_COLUMNS = 32
_SUBSTITUTED_ROWS = 16
_STAGES, _WIDE_STAGES = 2, 1


def _matmuls(multiply_adds: Callable[..., int]) -> Callable[..., dict[str, int]]:
    """Return Triton's ``launch_metadata`` for a program, given the multiply-adds of one instance."""

    def metadata(grid: tuple[int, ...], kernel: Any, arguments: dict[str, Any]) -> dict[str, int]:
        width = 16 if arguments["k" if "k" in arguments else "q"].dtype is torch.bfloat16 else 32
        return {f"flops{width}": 2 * grid[0] * multiply_adds(arguments)}

    return metadata


def _levels(of: dict[str, Any]) -> int:
    return int(of["LENGTH"]).bit_length() - 1 if of["PER_CHANNEL"] else 1


def _chunks(of: dict[str, Any]) -> int:
    return -(-int(of["num_positions"]) // int(of["LENGTH"]))


def _products_work(of: dict[str, Any]) -> int:
    length, keys = int(of["LENGTH"]), int(of["key_dim"])
    merges = (length // int(of["BLOCK"])).bit_length() - 1
    return 2 * _levels(of) * length**2 * keys + 2 * merges * length**3


def _states_work(of: dict[str, Any]) -> int:
    length, keys, values = int(of["LENGTH"]), int(of["key_dim"]), int(of["value_dim"])
    count = 1 if of["output"] is None else 2
    return _chunks(of) * length * values * ((count + 1) * keys + count * length)


def _output_work(of: dict[str, Any]) -> int:
    length, keys, values = int(of["LENGTH"]), int(of["key_dim"]), int(of["value_dim"])
    return length * values * (keys + length)


def _state_gradients_work(of: dict[str, Any]) -> int:
    length, keys, values = int(of["LENGTH"]), int(of["key_dim"]), int(of["value_dim"])
    return _chunks(of) * length * values * (3 * keys + 2 * length)


def _gradients_work(of: dict[str, Any]) -> int:
    length, keys, values = int(of["LENGTH"]), int(of["key_dim"]), int(of["value_dim"])
    return length * (2 * length * values + 3 * keys * values + 4 * _levels(of) * length * keys)


@triton.jit
def _tile(x, entry, row, num_positions, head, heads, column, width):
    """Return positions and channels of one head, 0 outside. Shapes: ``x: [b, s, n, width]``."""
    at = ((entry * num_positions + row) * heads + head)[:, None] * width + column[None, :]
    return tl.load(x + at, mask=(row < num_positions)[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def _store_tile(x, value, entry, row, num_positions, head, heads, column, width):
    """Write positions and channels of one head. Shapes: ``x: [b, s, n, width]``."""
    at = ((entry * num_positions + row) * heads + head)[:, None] * width + column[None, :]
    inside = (row < num_positions)[:, None] & (column < width)[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _column(x, entry, row, num_positions, head, heads):
    """Return one number per position of a head, 0 outside, in float32. Shapes: ``x: [b, s, n]``."""
    at = (entry * num_positions + row) * heads + head
    return tl.load(x + at, mask=row < num_positions, other=0.0).to(tl.float32)


@triton.jit
def _sums_at(sums, entry, row, num_positions, head, heads, column, width, PER_CHANNEL: tl.constexpr):
    """Return the sums of the logarithms of decays at some positions, those of the last position after the end.

    Shapes: ``sums: [b, s, n, width] -> [rows, columns]``, or ``[b, s, n] -> [rows, 1]``.
    """
    known = (entry * num_positions + tl.minimum(row, num_positions - 1)) * heads + head
    if PER_CHANNEL:
        at = known[:, None] * width + column[None, :]
        result = tl.load(sums + at, mask=(column < width)[None, :], other=0.0)
    else:
        result = tl.load(sums + known)[:, None]
    return result


@triton.jit
def _last_sums(sums, entry, chunk, num_positions, head, heads, column, width, PER_CHANNEL: tl.constexpr, LENGTH):
    """Return the sums at the last position of a chunk, one per channel or the same for all of them."""
    end = tl.minimum((chunk + 1) * LENGTH, num_positions) - 1
    at = (entry * num_positions + end) * heads + head
    if PER_CHANNEL:
        result = tl.load(sums + at * width + column, mask=column < width, other=0.0)
    else:
        result = tl.load(sums + at + 0 * column)
    return result


@triton.jit
def _document_at(documents, entry, row, num_positions):
    """Return the number of documents that have started up to a position, or up to the last one after the end."""
    known = tl.minimum(row, num_positions - 1)
    return tl.load(documents + entry * num_positions + known, mask=known >= 0, other=0)


@triton.jit
def _passes_in(documents, entry, chunk, row, num_positions, LENGTH):
    """Return 1 where the state before the chunk passes into a position, else 0."""
    before = tl.load(documents + entry * num_positions + chunk * LENGTH - 1, mask=chunk > 0, other=0)
    return (_document_at(documents, entry, row, num_positions) == before).to(tl.float32)


@triton.jit
def _passes_out(documents, entry, chunk, row, num_positions, LENGTH):
    """Return 1 where a position passes into the state after the chunk, else 0."""
    end = tl.minimum((chunk + 1) * LENGTH, num_positions) - 1
    last = tl.load(documents + entry * num_positions + end)
    return (_document_at(documents, entry, row, num_positions) == last).to(tl.float32)


@triton.jit
def _through(
    sums, documents, entry, chunk, num_positions, head, heads, column, width, PER_CHANNEL: tl.constexpr, LENGTH
):  # fmt: skip
    """Return the decays of a state through a chunk, ``[columns]``."""
    result = tl.exp(_last_sums(sums, entry, chunk, num_positions, head, heads, column, width, PER_CHANNEL, LENGTH))
    if documents is not None:
        end = tl.minimum((chunk + 1) * LENGTH, num_positions) - 1 + 0 * column
        result *= _passes_in(documents, entry, chunk, end, num_positions, LENGTH)
    return result


@triton.jit
def _decays(
    sums, documents, entry, chunk, row, num_positions, head, heads, column, width, PER_CHANNEL: tl.constexpr, LENGTH
):  # fmt: skip
    """Return the decays of states on their way into positions and out of them, ``[rows, columns or 1]``."""
    own = _sums_at(sums, entry, row, num_positions, head, heads, column, width, PER_CHANNEL)
    last = _last_sums(sums, entry, chunk, num_positions, head, heads, column, width, PER_CHANNEL, LENGTH)
    if not PER_CHANNEL:
        last = tl.max(last, axis=0, keep_dims=True)
    enter, leave = tl.exp(own), tl.exp(last[None, :] - own)
    if documents is not None:
        enter *= _passes_in(documents, entry, chunk, row, num_positions, LENGTH)[:, None]
        leave *= _passes_out(documents, entry, chunk, row, num_positions, LENGTH)[:, None]
    return enter, leave


@triton.jit
def _dot(left, right, KIND: tl.constexpr):
    """Return a matmul in float32 whose operands have the kind."""
    return tl.dot(left.to(KIND), right.to(KIND), input_precision="tf32x3")


@triton.jit
def _turned_dot(left, right, KIND: tl.constexpr):
    """Return ``left^T @ right`` in float32."""
    return _dot(tl.trans(left.to(KIND)), right, KIND)


@triton.jit
def _visible(documents, entry, row, num_positions, LENGTH: tl.constexpr):
    """Return whether a position (first axis) sees each position of the chunk: itself and earlier ones."""
    place = tl.arange(0, LENGTH)
    result = place[:, None] >= place[None, :]
    if documents is not None:
        number = _document_at(documents, entry, row, num_positions)
        result = result & (number[:, None] == number[None, :])
    return result


@triton.jit
def _between(sums, entry, row, num_positions, head, heads, visible, LENGTH: tl.constexpr):
    """Return the decay per head from each position (last axis) to each later one, 0 where none is seen."""
    known = (entry * num_positions + tl.minimum(row, num_positions - 1)) * heads + head
    own = tl.load(sums + known)
    return tl.exp(tl.where(visible, own[:, None] - own[None, :], float("-inf")))


@triton.jit
def _halved(sums, own, entry, chunk, num_positions, head, heads, column, width, half, LENGTH: tl.constexpr):
    """Return which positions are in the later half of every two, and the decays from or to the end of the earlier one.

    No exponent is positive: rows of the later half decay from there, and columns of the earlier half decay to there.
    """
    place = tl.arange(0, LENGTH)
    end = chunk * LENGTH + place // (2 * half) * (2 * half) + half - 1
    middle = _sums_at(sums, entry, end, num_positions, head, heads, column, width, True)
    is_later = (place % (2 * half) >= half)[:, None]
    return is_later, tl.exp(tl.where(is_later, own - middle, middle - own))


@triton.jit
def _meet(half, LENGTH: tl.constexpr):
    """Return whether two positions are in the same two halves."""
    pair = tl.arange(0, LENGTH) // (2 * half)
    return pair[:, None] == pair[None, :]


@triton.jit
def _unit_lower_inverse(x, LENGTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of ``I + x`` for ``x`` that is 0 on and above the diagonal.

    Rows are substituted in all blocks on the diagonal at once. Then every two blocks are joined by matmuls.
    """
    NUM: tl.constexpr = LENGTH // BLOCK
    outer, inner, place = tl.arange(0, NUM), tl.arange(0, BLOCK), tl.arange(0, LENGTH)
    is_own = outer[:, None, None, None] == outer[None, None, :, None]
    blocks = tl.sum(tl.where(is_own, tl.reshape(x, (NUM, BLOCK, NUM, BLOCK)), 0.0), axis=2)
    solved = tl.where(inner[None, :, None] == inner[None, None, :], 1.0, 0.0) + tl.zeros_like(blocks)
    for number in range(1, BLOCK):
        is_row = (inner == number)[None, :, None]
        factors = tl.sum(tl.where(is_row, blocks, 0.0), axis=1)
        known = tl.sum(factors[:, :, None] * solved, axis=1)
        solved -= tl.where(is_row, known[:, None, :], 0.0)
    result = tl.reshape(tl.where(is_own, solved[:, :, None, :], 0.0), (LENGTH, LENGTH))
    half = BLOCK
    while half < LENGTH:
        is_later = place % (2 * half) >= half
        is_below = _meet(half, LENGTH) & is_later[:, None] & (is_later[None, :] == 0)
        below = tl.dot(tl.where(is_below, x, 0.0), result, input_precision=PRECISION)
        result -= tl.dot(result, below, input_precision=PRECISION)
        half *= 2
    return result


@triton.jit
def sums_program(
    log_decay: tl.tensor,
    documents: tl.tensor,
    sums: tl.tensor,
    num_positions: tl.tensor,
    columns: tl.tensor,
    LEAST: tl.constexpr,
    LENGTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the sums of the logarithms of decays from the start of a chunk. Shapes: ``[b, s, columns]``."""
    tile = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    entry, row = tile // num_chunks, tile % num_chunks * LENGTH + tl.arange(0, LENGTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = (entry * num_positions + row)[:, None] * columns + column[None, :]
    inside = (row < num_positions)[:, None] & (column < columns)[None, :]
    values = tl.maximum(tl.load(log_decay + at, mask=inside, other=0.0).to(tl.float32), LEAST)
    if documents is not None:
        number = _document_at(documents, entry, row, num_positions)
        is_start = number != _document_at(documents, entry, row - 1, num_positions)
        values = tl.where(is_start[:, None], 0.0, values)
    tl.store(sums + at, tl.cumsum(values, axis=0), mask=inside)


@triton.jit(launch_metadata=_matmuls(_products_work))
def products_program(
    q: tl.tensor,
    k: tl.tensor,
    beta: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    attention: tl.tensor,
    inverse: tl.tensor,
    q_in: tl.tensor,
    k_in: tl.tensor,
    k_out: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Write the decayed products of a chunk's queries and keys, and the inverse of its triangular system.

    With decays per channel, also write queries and keys that have decayed as the state on its way into positions, and
    keys that decay until the end of the chunk.
    """
    KIND: tl.constexpr = inverse.dtype.element_ty
    tile = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    entry, head, chunk = tile // num_chunks // heads, tile // num_chunks % heads, tile % num_chunks
    place = tl.arange(0, LENGTH)
    row = chunk * LENGTH + place
    of_queries, of_keys = tl.zeros((LENGTH, LENGTH), tl.float32), tl.zeros((LENGTH, LENGTH), tl.float32)
    for start in range(0, key_dim, KEYS):
        column = start + tl.arange(0, KEYS)
        query = _tile(q, entry, row, num_positions, head, heads, column, key_dim)
        key = _tile(k, entry, row, num_positions, head, heads, column, key_dim)
        if PER_CHANNEL:
            query, key = query.to(tl.float32), key.to(tl.float32)
            own = _sums_at(sums, entry, row, num_positions, head, heads, column, key_dim, True)
            of_queries += tl.where(place[:, None] == place[None, :], tl.sum(query * key, axis=1)[:, None], 0.0)
            half = LENGTH // 2
            while half > 0:
                is_later, decay = _halved(
                    sums, own, entry, chunk, num_positions, head, heads, column, key_dim, half, LENGTH
                )
                earlier = tl.trans(tl.where(is_later, 0.0, key * decay).to(KIND))
                meet = _meet(half, LENGTH)
                later = tl.where(is_later, query * decay, 0.0)
                of_queries += tl.where(meet, _dot(later, earlier, KIND), 0.0)
                later = tl.where(is_later, key * decay, 0.0)
                of_keys += tl.where(meet, _dot(later, earlier, KIND), 0.0)
                half = half // 2
            enter, leave = _decays(
                sums, documents, entry, chunk, row, num_positions, head, heads, column, key_dim, True, LENGTH
            )
            _store_tile(q_in, query * enter, entry, row, num_positions, head, heads, column, key_dim)
            _store_tile(k_in, key * enter, entry, row, num_positions, head, heads, column, key_dim)
            _store_tile(k_out, key * leave, entry, row, num_positions, head, heads, column, key_dim)
        else:
            turned = tl.trans(key.to(KIND))
            of_queries += _dot(query, turned, KIND)
            of_keys += _dot(key, turned, KIND)
    visible = _visible(documents, entry, row, num_positions, LENGTH)
    if PER_CHANNEL:
        of_queries, of_keys = tl.where(visible, of_queries, 0.0), tl.where(visible, of_keys, 0.0)
    else:
        between = _between(sums, entry, row, num_positions, head, heads, visible, LENGTH)
        of_queries, of_keys = of_queries * between, of_keys * between
    at = (tile * LENGTH + place)[:, None] * LENGTH + place[None, :]
    tl.store(attention + at, of_queries.to(KIND))
    of_keys *= _column(beta, entry, row, num_positions, head, heads)[:, None]
    of_keys = tl.where(place[:, None] > place[None, :], of_keys, 0.0)
    tl.store(inverse + at, _unit_lower_inverse(of_keys, LENGTH, BLOCK, PRECISION).to(KIND))


@triton.jit
def _pass_on(
    state, keys, correction, sums, documents, entry, chunk, row, num_positions, head, heads, channel, key_dim,
    PER_CHANNEL: tl.constexpr, LENGTH, KIND: tl.constexpr
):  # fmt: skip
    """Return the state after a chunk, given corrections that have decayed until its end if decays are per head."""
    through = _through(sums, documents, entry, chunk, num_positions, head, heads, channel, key_dim, PER_CHANNEL, LENGTH)
    leaving = _tile(keys, entry, row, num_positions, head, heads, channel, key_dim)
    return through[:, None] * state + _turned_dot(leaving, correction, KIND)


@triton.jit(launch_metadata=_matmuls(_states_work))
def states_program(
    q: tl.tensor,
    k: tl.tensor,
    k_out: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    attention: tl.tensor,
    inverse: tl.tensor,
    initial_state: tl.tensor,
    output: tl.tensor,
    last_state: tl.tensor,
    states: tl.tensor,
    corrections: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Continue some columns of a head's state over all chunks.

    Write the output, or the states before each chunk and the corrections, from which another program computes it or
    the gradients. With ``IS_WIDE`` the state is two blocks of ``KEYS`` rows, so that no matmul has more of them, and
    the output is left to `output_program`.
    """
    KIND: tl.constexpr = inverse.dtype.element_ty
    pair = tl.program_id(0).to(tl.int64)
    entry, head = pair // heads, pair % heads
    place, channel = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    of_state = channel[:, None] * value_dim + column[None, :]
    in_state = (channel < key_dim)[:, None] & (column < value_dim)[None, :]
    state = tl.zeros((KEYS, VALUES), tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + pair * key_dim * value_dim + of_state, mask=in_state, other=0.0)
    upper_channel = channel + KEYS
    of_upper = upper_channel[:, None] * value_dim + column[None, :]
    in_upper = (upper_channel < key_dim)[:, None] & (column < value_dim)[None, :]
    upper = tl.zeros((KEYS, VALUES), tl.float32)
    if IS_WIDE and initial_state is not None:
        upper += tl.load(initial_state + pair * key_dim * value_dim + of_upper, mask=in_upper, other=0.0)
    for chunk in range(num_chunks):
        row = chunk * LENGTH + place
        square = ((pair * num_chunks + chunk) * LENGTH + place)[:, None] * LENGTH + place[None, :]
        key = _tile(k, entry, row, num_positions, head, heads, channel, key_dim)
        if PER_CHANNEL:
            # Queries and keys have decayed already.
            enter, leave = 1.0, 1.0
        else:
            enter, leave = _decays(
                sums, documents, entry, chunk, row, num_positions, head, heads, channel, key_dim, False, LENGTH
            )
        value = _tile(v, entry, row, num_positions, head, heads, column, value_dim).to(tl.float32)
        value -= _dot(key, state, KIND) * enter
        if IS_WIDE:
            key = _tile(k, entry, row, num_positions, head, heads, upper_channel, key_dim)
            value -= _dot(key, upper, KIND) * enter
        value *= _column(beta, entry, row, num_positions, head, heads)[:, None]
        correction = _dot(tl.load(inverse + square), value, KIND)
        if output is not None:
            query = _tile(q, entry, row, num_positions, head, heads, channel, key_dim)
            result = _dot(query, state, KIND) * enter
            result += _dot(tl.load(attention + square), correction, KIND)
            _store_tile(output, result, entry, row, num_positions, head, heads, column, value_dim)
        if states is not None:
            before = (pair * num_chunks + chunk) * key_dim * value_dim
            tl.store(states + before + of_state, state.to(KIND), mask=in_state)
            if IS_WIDE:
                tl.store(states + before + of_upper, upper.to(KIND), mask=in_upper)
            _store_tile(corrections, correction, entry, row, num_positions, head, heads, column, value_dim)
        correction *= leave
        state = _pass_on(
            state, k if k_out is None else k_out, correction, sums, documents, entry, chunk, row, num_positions, head,
            heads, channel, key_dim, PER_CHANNEL, LENGTH, KIND
        )  # fmt: skip
        if IS_WIDE:
            upper = _pass_on(
                upper, k if k_out is None else k_out, correction, sums, documents, entry, chunk, row, num_positions,
                head, heads, upper_channel, key_dim, PER_CHANNEL, LENGTH, KIND
            )  # fmt: skip
    if last_state is not None:
        tl.store(last_state + pair * key_dim * value_dim + of_state, state, mask=in_state)
        if IS_WIDE:
            tl.store(last_state + pair * key_dim * value_dim + of_upper, upper, mask=in_upper)


@triton.jit(launch_metadata=_matmuls(_output_work))
def output_program(
    q: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    attention: tl.tensor,
    states: tl.tensor,
    corrections: tl.tensor,
    output: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Write some columns of a chunk's output, given the state before the chunk and its corrections."""
    KIND: tl.constexpr = corrections.dtype.element_ty
    tile = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    entry, head, chunk = tile // num_chunks // heads, tile // num_chunks % heads, tile % num_chunks
    place = tl.arange(0, LENGTH)
    row = chunk * LENGTH + place
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    result = tl.zeros((LENGTH, VALUES), tl.float32)
    for start in range(0, key_dim, KEYS):
        channel = start + tl.arange(0, KEYS)
        inside = (channel < key_dim)[:, None] & (column < value_dim)[None, :]
        at = (tile * key_dim + channel)[:, None] * value_dim + column[None, :]
        query = _tile(q, entry, row, num_positions, head, heads, channel, key_dim)
        result += _dot(query, tl.load(states + at, mask=inside, other=0.0), KIND)
    if not PER_CHANNEL:
        enter = tl.exp(_sums_at(sums, entry, row, num_positions, head, heads, column, 1, False))
        if documents is not None:
            enter *= _passes_in(documents, entry, chunk, row, num_positions, LENGTH)[:, None]
        result *= enter
    correction = _tile(corrections, entry, row, num_positions, head, heads, column, value_dim)
    square = (tile * LENGTH + place)[:, None] * LENGTH + place[None, :]
    result += _dot(tl.load(attention + square), correction, KIND)
    _store_tile(output, result, entry, row, num_positions, head, heads, column, value_dim)


@triton.jit
def _pass_back(
    state_grad, q, k, result_grad, row_grad, sums, documents, entry, chunk, row, num_positions, head, heads, channel,
    key_dim, PER_CHANNEL: tl.constexpr, LENGTH, KIND: tl.constexpr
):  # fmt: skip
    """Return the gradient of the state before a chunk, given decayed gradients of the outputs and of the rows."""
    through = _through(sums, documents, entry, chunk, num_positions, head, heads, channel, key_dim, PER_CHANNEL, LENGTH)
    query = _tile(q, entry, row, num_positions, head, heads, channel, key_dim)
    state_grad = through[:, None] * state_grad + _turned_dot(query, result_grad, KIND)
    key = _tile(k, entry, row, num_positions, head, heads, channel, key_dim)
    return state_grad - _turned_dot(key, row_grad, KIND)


@triton.jit(launch_metadata=_matmuls(_state_gradients_work))
def state_gradients_program(
    q: tl.tensor,
    k: tl.tensor,
    k_out: tl.tensor,
    beta: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    attention: tl.tensor,
    inverse: tl.tensor,
    grad: tl.tensor,
    last_state_grad: tl.tensor,
    state_grads: tl.tensor,
    rows_grad: tl.tensor,
    initial_grad: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Write the gradients of some columns of a head's states after each chunk, and of ``beta * v`` minus the rest."""
    KIND: tl.constexpr = inverse.dtype.element_ty
    pair = tl.program_id(0).to(tl.int64)
    entry, head = pair // heads, pair % heads
    place, channel = tl.arange(0, LENGTH), tl.arange(0, KEYS)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    of_state = channel[:, None] * value_dim + column[None, :]
    in_state = (channel < key_dim)[:, None] & (column < value_dim)[None, :]
    state_grad = tl.zeros((KEYS, VALUES), tl.float32)
    if last_state_grad is not None:
        state_grad += tl.load(last_state_grad + pair * key_dim * value_dim + of_state, mask=in_state, other=0.0)
    upper_channel = channel + KEYS
    of_upper = upper_channel[:, None] * value_dim + column[None, :]
    in_upper = (upper_channel < key_dim)[:, None] & (column < value_dim)[None, :]
    upper_grad = tl.zeros((KEYS, VALUES), tl.float32)
    if IS_WIDE and last_state_grad is not None:
        upper_grad += tl.load(last_state_grad + pair * key_dim * value_dim + of_upper, mask=in_upper, other=0.0)
    for number in range(num_chunks):
        chunk = num_chunks - 1 - number
        row = chunk * LENGTH + place
        square = ((pair * num_chunks + chunk) * LENGTH + place)[:, None] * LENGTH + place[None, :]
        after = (pair * num_chunks + chunk) * key_dim * value_dim
        tl.store(state_grads + after + of_state, state_grad.to(KIND), mask=in_state)
        if PER_CHANNEL:
            enter, leave = 1.0, 1.0
        else:
            enter, leave = _decays(
                sums, documents, entry, chunk, row, num_positions, head, heads, channel, key_dim, False, LENGTH
            )
        leaving = _tile(k if k_out is None else k_out, entry, row, num_positions, head, heads, channel, key_dim)
        correction_grad = _dot(leaving, state_grad, KIND)
        if IS_WIDE:
            tl.store(state_grads + after + of_upper, upper_grad.to(KIND), mask=in_upper)
            leaving = _tile(
                k if k_out is None else k_out, entry, row, num_positions, head, heads, upper_channel, key_dim
            )
            correction_grad += _dot(leaving, upper_grad, KIND)
        correction_grad *= leave
        result_grad = _tile(grad, entry, row, num_positions, head, heads, column, value_dim)
        correction_grad += _dot(tl.trans(tl.load(attention + square)), result_grad, KIND)
        row_grad = _dot(tl.trans(tl.load(inverse + square)), correction_grad, KIND)
        _store_tile(rows_grad, row_grad, entry, row, num_positions, head, heads, column, value_dim)
        row_grad *= _column(beta, entry, row, num_positions, head, heads)[:, None] * enter
        result_grad = result_grad.to(tl.float32) * enter
        state_grad = _pass_back(
            state_grad, q, k, result_grad, row_grad, sums, documents, entry, chunk, row, num_positions, head, heads,
            channel, key_dim, PER_CHANNEL, LENGTH, KIND
        )  # fmt: skip
        if IS_WIDE:
            upper_grad = _pass_back(
                upper_grad, q, k, result_grad, row_grad, sums, documents, entry, chunk, row, num_positions, head,
                heads, upper_channel, key_dim, PER_CHANNEL, LENGTH, KIND
            )  # fmt: skip
    if initial_grad is not None:
        tl.store(initial_grad + pair * key_dim * value_dim + of_state, state_grad, mask=in_state)
        if IS_WIDE:
            tl.store(initial_grad + pair * key_dim * value_dim + of_upper, upper_grad, mask=in_upper)


@triton.jit(launch_metadata=_matmuls(_gradients_work))
def gradients_program(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    grad: tl.tensor,
    states: tl.tensor,
    corrections: tl.tensor,
    state_grads: tl.tensor,
    rows_grad: tl.tensor,
    q_grad: tl.tensor,
    k_grad: tl.tensor,
    v_grad: tl.tensor,
    log_decay_grad: tl.tensor,
    beta_grad: tl.tensor,
    num_positions: tl.tensor,
    heads: tl.tensor,
    key_dim: tl.tensor,
    value_dim: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    LEAST: tl.constexpr,
    LENGTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Write the gradients of a chunk's inputs."""
    KIND: tl.constexpr = corrections.dtype.element_ty
    tile = tl.program_id(0).to(tl.int64)
    num_chunks = tl.cdiv(num_positions, LENGTH)
    entry, head, chunk = tile // num_chunks // heads, tile // num_chunks % heads, tile % num_chunks
    place = tl.arange(0, LENGTH)
    row = chunk * LENGTH + place
    factor = _column(beta, entry, row, num_positions, head, heads)
    is_start = row < 0
    if documents is not None:
        number = _document_at(documents, entry, row, num_positions)
        is_start = number != _document_at(documents, entry, row - 1, num_positions)
    of_queries, of_keys = tl.zeros((LENGTH, LENGTH), tl.float32), tl.zeros((LENGTH, LENGTH), tl.float32)
    factor_grad = tl.zeros((LENGTH,), tl.float32)
    for start in range(0, value_dim, VALUES):
        column = start + tl.arange(0, VALUES)
        correction = tl.trans(_tile(corrections, entry, row, num_positions, head, heads, column, value_dim))
        row_grad = _tile(rows_grad, entry, row, num_positions, head, heads, column, value_dim)
        result_grad = _tile(grad, entry, row, num_positions, head, heads, column, value_dim)
        of_queries += _dot(result_grad, correction, KIND)
        of_keys -= _dot(row_grad, correction, KIND)
        value = _tile(v, entry, row, num_positions, head, heads, column, value_dim).to(tl.float32)
        row_grad = row_grad.to(tl.float32)
        factor_grad += tl.sum(row_grad * value, axis=1)
        row_grad *= factor[:, None]
        _store_tile(v_grad, row_grad, entry, row, num_positions, head, heads, column, value_dim)
    visible = _visible(documents, entry, row, num_positions, LENGTH)
    if PER_CHANNEL:
        of_queries, of_keys = tl.where(visible, of_queries, 0.0), tl.where(visible, of_keys, 0.0)
    else:
        between = _between(sums, entry, row, num_positions, head, heads, visible, LENGTH)
        of_queries, of_keys = of_queries * between, of_keys * between
    # A position's own key is no part of the triangular system.
    of_keys = tl.where(place[:, None] > place[None, :], of_keys, 0.0)
    sums_grad, ends_grad = tl.zeros((LENGTH,), tl.float32), tl.zeros((LENGTH,), tl.float32)
    last_grad = 0.0
    for start in range(0, key_dim, KEYS):
        channel = start + tl.arange(0, KEYS)
        to_queries = tl.zeros((LENGTH, KEYS), tl.float32)
        to_keys, to_last = tl.zeros((LENGTH, KEYS), tl.float32), tl.zeros((LENGTH, KEYS), tl.float32)
        through_grad = tl.zeros((KEYS,), tl.float32)
        for first in range(0, value_dim, VALUES):
            column = first + tl.arange(0, VALUES)
            at = (tile * key_dim + channel)[:, None] * value_dim + column[None, :]
            inside = (channel < key_dim)[:, None] & (column < value_dim)[None, :]
            state = tl.load(states + at, mask=inside, other=0.0)
            state_grad = tl.load(state_grads + at, mask=inside, other=0.0)
            through_grad += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), axis=1)
            state = tl.trans(state)
            result_grad = _tile(grad, entry, row, num_positions, head, heads, column, value_dim)
            to_queries += _dot(result_grad, state, KIND)
            row_grad = _tile(rows_grad, entry, row, num_positions, head, heads, column, value_dim)
            to_keys -= _dot(row_grad, state, KIND)
            correction = _tile(corrections, entry, row, num_positions, head, heads, column, value_dim)
            to_last += _dot(correction, tl.trans(state_grad), KIND)
        enter, leave = _decays(
            sums, documents, entry, chunk, row, num_positions, head, heads, channel, key_dim, PER_CHANNEL, LENGTH
        )
        through = _through(
            sums, documents, entry, chunk, num_positions, head, heads, channel, key_dim, PER_CHANNEL, LENGTH
        )
        to_queries, to_keys, to_last = to_queries * enter, to_keys * enter, to_last * leave
        query = _tile(q, entry, row, num_positions, head, heads, channel, key_dim).to(tl.float32)
        key = _tile(k, entry, row, num_positions, head, heads, channel, key_dim).to(tl.float32)
        # Every term of the state after the chunk has decayed by the last sum.
        from_keys, through_grad = to_last * key, through * through_grad
        if PER_CHANNEL:
            end_grad = through_grad + tl.sum(from_keys, axis=0)
            own = _sums_at(sums, entry, row, num_positions, head, heads, channel, key_dim, True)
            diagonal = tl.sum(tl.where(place[:, None] == place[None, :], of_queries, 0.0), axis=1)[:, None]
            to_queries += diagonal * key
            to_last += diagonal * query
            half = LENGTH // 2
            while half > 0:
                is_later, decay = _halved(
                    sums, own, entry, chunk, num_positions, head, heads, channel, key_dim, half, LENGTH
                )
                later = (place % (2 * half) >= half)[:, None] & (place % (2 * half) < half)[None, :]
                met = later & _meet(half, LENGTH)
                earlier = tl.where(is_later, 0.0, key * decay).to(KIND)
                some = tl.where(met, of_queries, 0.0).to(KIND)
                to_queries += decay * _dot(some, earlier, KIND)
                to_last += decay * _dot(tl.trans(some), tl.where(is_later, query * decay, 0.0), KIND)
                some = tl.where(met, of_keys, 0.0).to(KIND)
                to_keys += decay * _dot(some, earlier, KIND)
                later = tl.where(is_later, factor[:, None] * key * decay, 0.0)
                to_last += decay * _dot(tl.trans(some), later, KIND)
                half = half // 2
        else:
            to_queries += _dot(of_queries, key, KIND)
            to_keys += _dot(of_keys, key, KIND)
            to_last += _dot(tl.trans(of_queries.to(KIND)), query, KIND)
            to_last += _dot(tl.trans(of_keys.to(KIND)), factor[:, None] * key, KIND)
        channels_grad = query * to_queries + factor[:, None] * key * to_keys - key * to_last
        if PER_CHANNEL:
            given = _tile(log_decay, entry, row, num_positions, head, heads, channel, key_dim).to(tl.float32)
            result = tl.cumsum(channels_grad, axis=0, reverse=True) + end_grad[None, :]
            result = tl.where((given < LEAST) | is_start[:, None], 0.0, result)
            _store_tile(log_decay_grad, result, entry, row, num_positions, head, heads, channel, key_dim)
        else:
            sums_grad += tl.sum(channels_grad, axis=1)
            ends_grad += tl.sum(from_keys, axis=1)
            last_grad += tl.sum(through_grad, axis=0)
        factor_grad += tl.sum(to_keys * key, axis=1)
        to_last += factor[:, None] * to_keys
        _store_tile(q_grad, to_queries, entry, row, num_positions, head, heads, channel, key_dim)
        _store_tile(k_grad, to_last, entry, row, num_positions, head, heads, channel, key_dim)
    at = (entry * num_positions + row) * heads + head
    inside = row < num_positions
    tl.store(beta_grad + at, factor_grad.to(beta_grad.dtype.element_ty), mask=inside)
    if not PER_CHANNEL:
        given = _column(log_decay, entry, row, num_positions, head, heads)
        result = tl.cumsum(sums_grad, axis=0, reverse=True) + tl.sum(ends_grad, axis=0) + last_grad
        result = tl.where((given < LEAST) | is_start, 0.0, result)
        tl.store(log_decay_grad + at, result.to(log_decay_grad.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class _Chunks:
    """Contiguous inputs, and results of the first two programs.

    ``decayed`` are queries and keys with the decay of the state on its way into positions, and keys with the decay
    until the end of the chunk. With decays per head these are queries and keys alone, and later programs apply them.

    Shapes: as in `gated_delta_rule_output`; ``documents: [b, s]`` of int32; ``sums`` as ``log_decay``, in float32;
    ``attention, inverse: [b * n * chunks, length, length]``; ``decayed`` three times ``[b, s, n, dk]``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    documents: torch.Tensor | None
    sums: torch.Tensor
    attention: torch.Tensor
    inverse: torch.Tensor
    decayed: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    length: int

    @staticmethod
    def of(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        document_starts: torch.Tensor | None,
        chunk_size: int,
    ) -> _Chunks:
        q, k, v, log_decay, beta = (x.contiguous() for x in (q, k, v, log_decay, beta))
        batch, num_positions, heads, key_dim = q.shape
        documents = None if document_starts is None else document_starts.cumsum(dim=1, dtype=torch.int32)
        kind = _kind(q)
        length = min(max(chunk_size, _MIN_BLOCK), _BLOCKS[kind][0])
        num_chunks = triton.cdiv(num_positions, length)
        sums = torch.empty_like(log_decay, dtype=torch.float32)
        columns = log_decay.shape[2:].numel()
        sums_program[batch * num_chunks, triton.cdiv(columns, _SUMS_COLUMNS)](
            log_decay, documents, sums, num_positions, columns, LEAST=MIN_LOG_DECAY, LENGTH=length,
            COLUMNS=_SUMS_COLUMNS, num_warps=4,
        )  # fmt: skip
        attention = q.new_empty(batch * heads * num_chunks, length, length, dtype=kind)
        inverse = torch.empty_like(attention)
        is_per_channel = log_decay.dim() == q.dim()
        q_in, k_in, k_out = (torch.empty_like(q, dtype=kind) if is_per_channel else None for _ in range(3))
        products_program[len(attention),](
            q, k, beta, sums, documents, attention, inverse, q_in, k_in, k_out, num_positions, heads, key_dim,
            PER_CHANNEL=is_per_channel, PRECISION="tf32" if kind is torch.bfloat16 else "tf32x3", LENGTH=length,
            BLOCK=_SUBSTITUTED_ROWS, KEYS=_key_block(q, is_per_channel), num_warps=4, num_stages=_STAGES,
        )  # fmt: skip
        decayed = q if q_in is None else q_in, k if k_in is None else k_in, k_out
        return _Chunks(q, k, v, log_decay, beta, documents, sums, attention, inverse, decayed, length)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return the numbers of positions, heads, channels of keys and channels of values."""
        return *self.q.shape[1:], self.v.shape[3]

    @property
    def is_per_channel(self) -> bool:
        return self.log_decay.dim() == self.q.dim()

    def per_position(self) -> torch.Tensor:
        """Return memory for a tensor of the shape of the values."""
        return self.v.new_empty(self.v.shape, dtype=self.inverse.dtype)

    def per_chunk(self) -> torch.Tensor:
        """Return memory for a state per chunk."""
        _, _, key_dim, value_dim = self.sizes
        return self.inverse.new_empty(len(self.inverse), key_dim, value_dim)

    @property
    def is_wide(self) -> bool:
        """Return whether the state is in two blocks of rows."""
        return self.q.shape[3] > _MAX_KEY_BLOCK

    def recur(self, program: Any, *tensors: torch.Tensor | None) -> None:
        """Launch a program for each block of columns of each head's state."""
        num_positions, heads, key_dim, value_dim = self.sizes
        values = _block(value_dim, _WIDE_VALUES if self.is_wide else _BLOCKS[_kind(self.q)][2])
        program[len(self.q) * heads, triton.cdiv(value_dim, values)](
            *tensors, num_positions, heads, key_dim, value_dim, PER_CHANNEL=self.is_per_channel, LENGTH=self.length,
            KEYS=_block(key_dim, _MAX_KEY_BLOCK), VALUES=values, IS_WIDE=self.is_wide, num_warps=8,
            num_stages=_WIDE_STAGES if self.is_wide else _STAGES,
        )  # fmt: skip


def _block(size: int, limit: int) -> int:
    """Return the number of channels of a block."""
    return min(limit, max(_MIN_BLOCK, 1 << (size - 1).bit_length()))


def _kind(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of the operands of matmuls."""
    return torch.bfloat16 if q.dtype is torch.bfloat16 else torch.float32


def _key_block(q: torch.Tensor, is_per_channel: bool) -> int:
    return _block(q.shape[3], _MIN_BLOCK if is_per_channel else _BLOCKS[_kind(q)][1])


def gated_delta_rule_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the last state; see `megatron.core.ops.linear_attention.gated_delta_rule`.

    ``chunk_size`` is a power of two. Chunks have at least 16 positions, and at most 64 for bfloat16 and 32 otherwise.

    Shapes: ``q, k: [b, s, n, dk], v: [b, s, n, dv], log_decay: [b, s, n] or [b, s, n, dk], beta: [b, s, n],
    initial_state: [b, n, dk, dv]`` in float32, ``document_starts: [b, s]`` of bool ``-> [b, s, n, dv]`` in the dtype of
    ``v``, and ``[b, n, dk, dv]`` in float32.
    """
    chunks = _Chunks.of(q, k, v, log_decay, beta, document_starts, chunk_size)
    output = torch.empty_like(chunks.v)
    last_state = q.new_empty(q.shape[0], *q.shape[2:], v.shape[3], dtype=torch.float32)
    state = _contiguous(initial_state)
    if not chunks.is_wide:
        chunks.recur(
            states_program, *chunks.decayed, chunks.v, chunks.beta, chunks.sums, chunks.documents, chunks.attention,
            chunks.inverse, state, output, last_state, None, None,
        )  # fmt: skip
        return output, last_state
    states, corrections = chunks.per_chunk(), chunks.per_position()
    chunks.recur(
        states_program, None, *chunks.decayed[1:], chunks.v, chunks.beta, chunks.sums, chunks.documents, None,
        chunks.inverse, state, None, last_state, states, corrections,
    )  # fmt: skip
    values = _block(v.shape[3], _BLOCKS[_kind(q)][2])
    output_program[len(states), triton.cdiv(v.shape[3], values)](
        chunks.decayed[0], chunks.sums, chunks.documents, chunks.attention, states, corrections, output, *chunks.sizes,
        PER_CHANNEL=chunks.is_per_channel, LENGTH=chunks.length, KEYS=_key_block(q, False), VALUES=values, num_warps=4,
        num_stages=_WIDE_STAGES,
    )  # fmt: skip
    return output, last_state


def gated_delta_rule_gradients(
    grad: torch.Tensor,
    last_state_grad: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    document_starts: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of q, k, v, log_decay, beta and the initial state, whose gradient is float32.

    Shapes: as in `gated_delta_rule_output`; ``grad: [b, s, n, dv], last_state_grad: [b, n, dk, dv]`` in float32.
    """
    chunks = _Chunks.of(q, k, v, log_decay, beta, document_starts, chunk_size)
    inputs = chunks.q, chunks.k, chunks.v, chunks.log_decay, chunks.beta
    grad, initial_state = grad.contiguous(), _contiguous(initial_state)
    states, corrections = chunks.per_chunk(), chunks.per_position()
    chunks.recur(
        states_program, None, *chunks.decayed[1:], chunks.v, chunks.beta, chunks.sums, chunks.documents, None,
        chunks.inverse, initial_state, None, None, states, corrections,
    )  # fmt: skip
    state_grads, rows_grad = torch.empty_like(states), torch.empty_like(corrections)
    initial_grad = None if initial_state is None else torch.empty_like(initial_state)
    chunks.recur(
        state_gradients_program, *chunks.decayed, chunks.beta, chunks.sums, chunks.documents, chunks.attention,
        chunks.inverse, grad, _contiguous(last_state_grad), state_grads, rows_grad, initial_grad,
    )  # fmt: skip
    grads = [torch.empty_like(x) for x in inputs]
    num_positions, heads, key_dim, value_dim = chunks.sizes
    gradients_program[len(states),](
        *inputs, chunks.sums, chunks.documents, grad, states, corrections, state_grads, rows_grad, *grads,
        num_positions, heads, key_dim, value_dim, PER_CHANNEL=chunks.is_per_channel, LEAST=MIN_LOG_DECAY,
        LENGTH=chunks.length, KEYS=_key_block(q, chunks.is_per_channel), VALUES=_block(value_dim, _BLOCKS[_kind(q)][2]),
        num_warps=8, num_stages=_STAGES,
    )  # fmt: skip
    return *grads, initial_grad


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
