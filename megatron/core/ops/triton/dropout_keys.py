"""Triton kernel of the keys from which dropout masks follow: one launch instead of some fifteen integer operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def mixed(state, number, STEP: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Mix an integer into a 64-bit state, by the rule of `megatron.core.ops.dropout`."""
    x = state + (number + 1).to(tl.uint64) * STEP
    x = (x ^ (x >> 32)) * FIRST
    x = (x ^ (x >> 32)) * SECOND
    return x ^ (x >> 32)


@triton.jit
def states_program(
    states: tl.tensor,
    base: tl.tensor,
    first_number: tl.tensor,
    count: tl.tensor,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mix consecutive numbers into ``base``."""
    index = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    # Numbers of a launch may be built in as constants, which cannot be converted.
    state = (tl.zeros((BLOCK,), tl.int64) + base).to(tl.uint64)
    x = mixed(state, index + first_number, STEP, FIRST, SECOND)
    tl.store(states + index, x.to(tl.int64), mask=index < count)


@triton.jit
def keys_program(
    states: tl.tensor,
    positions: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    batch: tl.tensor,
    num_rows: tl.tensor,
    first_site: tl.tensor,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write both keys of some rows of one site; a row is a position of a sample."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    site = tl.program_id(1).to(tl.int64)
    inside = row < num_rows
    state = tl.load(states + row % batch, mask=inside, other=0).to(tl.uint64)
    position = tl.load(positions + row // batch, mask=inside, other=0)
    x = mixed(state, position, STEP, FIRST, SECOND)
    x = mixed(x, site + first_site, STEP, FIRST, SECOND)
    at = site * num_rows + row
    tl.store(first_key + at, x.to(tl.int32), mask=inside)
    tl.store(second_key + at, (x >> 32).to(tl.int32), mask=inside)


def write_states(states: torch.Tensor, base: int, first_number: int, step: int, factors: tuple[int, int]) -> None:
    """Mix the numbers from ``first_number`` on into ``base`` of at most 63 bits. Shapes: ``states: [n]`` int64."""
    count = len(states)
    states_program[(triton.cdiv(count, _BLOCK),)](
        states, base, first_number, count, STEP=step, FIRST=factors[0], SECOND=factors[1], BLOCK=_BLOCK
    )


def keys_of_sites(
    states: torch.Tensor, positions: torch.Tensor, first_site: int, num_sites: int, step: int, factors: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both keys of consecutive sites at each position of each sample.

    Shapes: ``states: [b]``, ``positions: [s]``, both int64 ``-> [num_sites, s, b]`` int32 twice.
    """
    batch, length = len(states), len(positions)
    keys = torch.empty((2, num_sites, length, batch), dtype=torch.int32, device=states.device)
    first_key, second_key = keys.unbind()
    if keys.numel():
        keys_program[(triton.cdiv(length * batch, _BLOCK), num_sites)](
            states, positions.contiguous(), first_key, second_key, batch, length * batch, first_site,
            STEP=step, FIRST=factors[0], SECOND=factors[1], BLOCK=_BLOCK,
        )  # fmt: skip
    return first_key, second_key
