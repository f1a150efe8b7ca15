"""Exchanges of keys and values, and sends round a ring, against attention to the whole sequence in one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.collectives import all_to_all_first_dim, start_ring_exchange
from megatron.core.context_parallel.attention import (
    AllGatherAttention,
    RingAttention,
    UlyssesAttention,
    with_context_parallel,
)
from megatron.core.context_parallel.partition import cut_sequence, to_sequence_order
from megatron.core.ops.attention_backend import select_attention_core
from megatron.core.ops.attention_block import AttentionBlocks
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention
from megatron.core.ops.dropout import AttentionDropout, DropoutSamples
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import Group, single_rank_group
from megatron.core.transformer.dropout import keys_of_rank
from tests.harness.closeness import assert_tensors_close
from tests.harness.distributed import run_distributed

TOLERANCE = 1e-9
LABELS = ("output", "query", "key", "value", "sinks")
LENGTH, BATCH, HEAD_DIM = 24, 3, 10


@dataclass(frozen=True)
class Case:
    """``heads`` in ``groups``; ``documents`` gives where each sequence of the batch begins a new document."""

    heads: int
    groups: int
    documents: tuple[tuple[int, ...], ...] | None = None
    is_causal: bool = True
    window: int | None = None
    has_sinks: bool = False


PACKED = ((1, 7), (3, 6, 12, 23), ())
CASES = {
    "all-heads": Case(4, 4),
    "grouped": Case(8, 4),
    "fewer-groups-than-ranks": Case(8, 1),
    "packed": Case(4, 4, PACKED),
    "packed-grouped": Case(8, 2, PACKED),
    # A document for every token: beyond its own, every block is invisible.
    "one-token-documents": Case(4, 1, (tuple(range(1, LENGTH)), tuple(range(1, LENGTH)), (12,))),
    "window": Case(4, 2, window=5),
    "window-packed": Case(4, 4, PACKED, window=3),
    "both-directions": Case(8, 2, is_causal=False),
    "both-directions-packed": Case(4, 4, PACKED, is_causal=False),
    "sinks": Case(8, 2, has_sinks=True),
    "sinks-window-packed": Case(4, 1, PACKED, window=3, has_sinks=True),
}
EXCHANGES = ("p2p", "p2p-plain", "all_gather", "a2a")


def pattern_of(case: Case) -> AttentionPattern:
    if case.documents is None:
        return AttentionPattern(case.is_causal, window=case.window)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for row, starts in zip(ids, case.documents, strict=True):
        for start in starts:
            row[start:] += 1
    return AttentionPattern(case.is_causal, ids, window=case.window)


def inputs(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value and the gradient of the output, whole."""
    generator = torch.Generator().manual_seed(11)
    heads = (case.heads, case.groups, case.groups, case.heads)
    return [torch.randn(LENGTH, BATCH, n, HEAD_DIM, generator=generator, dtype=dtype) for n in heads]


def sinks_of(case: Case, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the sinks of all heads, one of which is above every score."""
    if not case.has_sinks:
        return None
    sinks = torch.linspace(-1.0, 9.0, case.heads, dtype=dtype)
    return sinks.requires_grad_()


def dropout_of(case: Case, dropout: float, cp: Group | None = None) -> AttentionDropout | None:
    """Return the dropout of the weights as a layer makes it on a rank."""
    if not dropout:
        return None
    cp = single_rank_group(("cp",)) if cp is None else cp
    samples = DropoutSamples.at(3, 0, 0, BATCH, "cpu")
    keys = keys_of_rank(samples, (0,), LENGTH // cp.size, single_rank_group(), cp, sequence_parallel=False)
    assert keys is not None
    return keys.of_attention(0, dropout, range(case.heads))


def whole_attention(case: Case, dtype: torch.dtype, dropout: float = 0.0) -> list[np.ndarray]:
    """Return the output and the gradients of query, key and value."""
    *leaves, grad = (tensor.requires_grad_() for tensor in inputs(case, dtype))
    sinks = sinks_of(case, dtype)
    output = plain_attention(AttentionInputs(*leaves, pattern_of(case), dropout_of(case, dropout), sinks=sinks))
    output.backward(grad.detach())
    leaves += [] if sinks is None else [sinks]
    return [output.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)]


def gathered(tensor: torch.Tensor, cp: Group) -> np.ndarray:
    parts = [torch.empty_like(tensor) for _ in range(cp.size)]
    dist.all_gather(parts, tensor.contiguous(), group=cp.handle)
    return to_sequence_order(torch.cat(parts), cp.size, dim=0).numpy()


def cut_attention(case: Case, exchange: str, cp: Group, dtype: torch.dtype, dropout: float = 0.0) -> list[np.ndarray]:
    name, _, plain = exchange.partition("-")
    core = with_context_parallel(select_attention_core("auto", "cpu"), name, cp, plain_blocks=bool(plain))
    *leaves, grad = (cut_sequence(tensor, cp, dim=0).requires_grad_() for tensor in inputs(case, dtype))
    sinks = sinks_of(case, dtype)
    output = core(AttentionInputs(*leaves, pattern_of(case), dropout_of(case, dropout, cp), sinks=sinks))
    output.backward(grad.detach())
    tensors = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    found = [gathered(tensor, cp) for tensor in tensors]
    if sinks is not None and sinks.grad is not None:
        dist.all_reduce(sinks.grad, group=cp.handle)
        found.append(sinks.grad.numpy())
    return found


def all_exchanges(case: Case, dtype: torch.dtype, dropout: float = 0.0) -> dict[tuple[int, str], list[np.ndarray]]:
    """Run every exchange on the four ranks as CP 4, and as CP 2 twice side by side."""
    results = {}
    for size in (2, 4):
        cp = create_parallel_state(ParallelSizes(cp=size)).cp
        for exchange in EXCHANGES:
            results[size, exchange] = cut_attention(case, exchange, cp, dtype, dropout)
    return results


@pytest.mark.default(1)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_whole_attention(name: str) -> None:
    expected = whole_attention(CASES[name], torch.float64)
    for results in run_distributed(4, all_exchanges, CASES[name], torch.float64):
        for layout, tensors in results.items():
            for label, actual, wanted in zip(LABELS[: len(expected)], tensors, expected, strict=True):
                assert_tensors_close(actual, wanted, TOLERANCE, f"{layout} {label}")


def three_ranks(case: Case) -> dict[str, list[np.ndarray]]:
    cp = create_parallel_state(ParallelSizes(cp=3)).cp
    return {exchange: cut_attention(case, exchange, cp, torch.float64) for exchange in EXCHANGES}


def test_sizes_need_not_be_powers_of_two() -> None:
    case = Case(6, 2, PACKED)
    expected = whole_attention(case, torch.float64)
    for results in run_distributed(3, three_ranks, case):
        for exchange, tensors in results.items():
            for actual, wanted in zip(tensors, expected, strict=True):
                assert_tensors_close(actual, wanted, TOLERANCE, exchange)


DROPOUT = {"dropout": 0.4}


@pytest.mark.default(1)
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("all-heads", "grouped", "both-directions")),
        *("packed-grouped", "window", "sinks"),
    ],
)
def test_every_exchange_drops_the_weights_that_whole_attention_drops(name: str) -> None:
    expected = whole_attention(CASES[name], torch.float64, **DROPOUT)
    without = whole_attention(CASES[name], torch.float64)
    assert np.abs(expected[0] - without[0]).max() > 0.1, "nothing was dropped"
    for results in run_distributed(4, all_exchanges, CASES[name], torch.float64, **DROPOUT):
        for layout, tensors in results.items():
            for label, actual, wanted in zip(LABELS[: len(expected)], tensors, expected, strict=True):
                assert_tensors_close(actual, wanted, TOLERANCE, f"{layout} {label}")


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", ["grouped", "window-packed", "sinks-window-packed", "both-directions"])
def test_one_rank_alone_computes_whole_attention(name: str, dropout: float, exchange: str) -> None:
    case, cp = CASES[name], single_rank_group(("cp",))
    expected = whole_attention(case, torch.float64, dropout)
    core = select_attention_core("auto", "cpu")
    exchanges = {
        "p2p": lambda: RingAttention(cp, AttentionBlocks()),
        "all_gather": lambda: AllGatherAttention(cp, core),
        "a2a": lambda: UlyssesAttention(cp, core),
    }
    *leaves, grad = (tensor.requires_grad_() for tensor in inputs(case, torch.float64))
    sinks = sinks_of(case, torch.float64)
    output = exchanges[exchange]()(AttentionInputs(*leaves, pattern_of(case), dropout_of(case, dropout), sinks=sinks))
    output.backward(grad.detach())
    leaves += [] if sinks is None else [sinks]
    tensors = [output.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)]
    for label, actual, wanted in zip(LABELS[: len(expected)], tensors, expected, strict=True):
        assert_tensors_close(actual, wanted, TOLERANCE, label)


LARGE = 1_000_000


def exchange_twice_at_once(numel: int) -> tuple[set[float], set[float]]:
    """Start a float32 and a float64 exchange before waiting for either, in the two halves of the world apart."""
    cp = create_parallel_state(ParallelSizes(cp=2)).cp
    rank = cp.ranks[cp.rank]
    first = start_ring_exchange(torch.full((numel,), float(rank)), cp)
    second = start_ring_exchange(torch.full((numel // 2,), rank + 0.5, dtype=torch.float64), cp)
    return set(first.wait().unique().tolist()), set(second.wait().unique().tolist())


@pytest.mark.parametrize("numel", [10, LARGE])
def test_every_rank_receives_from_the_one_before_it(numel: int) -> None:
    received = run_distributed(4, exchange_twice_at_once, numel)
    assert received == [({float(rank)}, {rank + 0.5}) for rank in (1, 0, 3, 2)]


def go_round() -> list[float]:
    """Return what a rank holds after each hop of its neighbors' tensors."""
    cp = create_parallel_state(ParallelSizes(cp=4)).cp
    tensor, seen = torch.tensor([float(cp.rank)]), []
    for _ in range(cp.size):
        tensor = start_ring_exchange(tensor, cp).wait()
        seen.append(tensor.item())
    return seen


def test_tensors_are_home_after_as_many_hops_as_ranks() -> None:
    assert run_distributed(4, go_round) == [[3, 2, 1, 0], [0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3]]


def swap_rows() -> list[list[float]]:
    cp = create_parallel_state(ParallelSizes(cp=3)).cp
    rows = torch.arange(3.0)[:, None] * 10 + cp.rank * torch.ones(2)
    return all_to_all_first_dim(rows, cp).tolist()


def test_row_i_goes_to_rank_i() -> None:
    assert run_distributed(3, swap_rows) == [[[10.0 * rank + source] * 2 for source in range(3)] for rank in range(3)]


def test_one_rank_keeps_its_tensor() -> None:
    tensor, alone = torch.ones(1, 2), single_rank_group(("cp",))
    assert start_ring_exchange(tensor, alone).wait() is tensor
    assert all_to_all_first_dim(tensor, alone) is tensor
