"""Every exchange of keys and values against attention to the whole sequence in one process, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel.exchange import with_context_parallel
from megatron.core.context_parallel.partition import cut_sequence, to_sequence_order
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import Group
from megatron.core.transformer.dot_product_attention import document_mask, fused_attention, plain_attention
from tests.harness.closeness import assert_tensors_close
from tests.harness.distributed import run_distributed

TOLERANCE = 1e-9
LENGTH, BATCH, HEAD_DIM = 24, 3, 10


@dataclass(frozen=True)
class Case:
    """``heads`` in ``groups``; ``documents`` gives where each sequence of the batch begins a new document."""

    heads: int
    groups: int
    documents: tuple[tuple[int, ...], ...] | None = None


PACKED = ((1, 7), (3, 6, 12, 23), ())
CASES = {
    "all-heads": Case(4, 4),
    "grouped": Case(8, 4),
    "fewer-groups-than-ranks": Case(8, 1),
    "packed": Case(4, 4, PACKED),
    "packed-grouped": Case(8, 2, PACKED),
    # A document for every token: beyond its own, every block is invisible.
    "one-token-documents": Case(4, 1, (tuple(range(1, LENGTH)), tuple(range(1, LENGTH)), (12,))),
}
EXCHANGES = ("p2p", "p2p-plain", "all_gather", "a2a")


def document_ids(case: Case) -> torch.Tensor | None:
    if case.documents is None:
        return None
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for row, starts in zip(ids, case.documents, strict=True):
        for start in starts:
            row[start:] += 1
    return ids


def inputs(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value and the gradient of the output, whole."""
    generator = torch.Generator().manual_seed(11)
    heads = (case.heads, case.groups, case.groups, case.heads)
    return [torch.randn(LENGTH, BATCH, n, HEAD_DIM, generator=generator, dtype=dtype) for n in heads]


def whole_attention(case: Case, dtype: torch.dtype) -> list[np.ndarray]:
    """Return the output and the gradients of query, key and value."""
    *leaves, grad = (tensor.requires_grad_() for tensor in inputs(case, dtype))
    ids = document_ids(case)
    output = plain_attention(*leaves, None if ids is None else document_mask(ids), 0.0)
    output.backward(grad.detach())
    return [output.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves if leaf.grad is not None)]


def gathered(tensor: torch.Tensor, cp: Group) -> np.ndarray:
    parts = [torch.empty_like(tensor) for _ in range(cp.size)]
    dist.all_gather(parts, tensor.contiguous(), group=cp.handle)
    return to_sequence_order(torch.cat(parts), cp.size, dim=0).numpy()


def cut_attention(case: Case, exchange: str, cp: Group, dtype: torch.dtype) -> list[np.ndarray]:
    name, _, plain = exchange.partition("-")
    core = with_context_parallel(fused_attention, name, cp, plain_blocks=bool(plain))
    *leaves, grad = (cut_sequence(tensor, cp, dim=0).requires_grad_() for tensor in inputs(case, dtype))
    output = core(*leaves, document_ids(case), 0.0)
    output.backward(grad.detach())
    tensors = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return [gathered(tensor, cp) for tensor in tensors]


def all_exchanges(case: Case, dtype: torch.dtype) -> dict[tuple[int, str], list[np.ndarray]]:
    """Run every exchange on the four ranks as CP 4 and as CP 2, twice side by side, and on three of them as CP 3."""
    results = {}
    for size in (2, 4):
        cp = create_parallel_state(context_parallel_size=size).cp
        for exchange in EXCHANGES:
            results[size, exchange] = cut_attention(case, exchange, cp, dtype)
    return results


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_whole_attention(name: str) -> None:
    expected = whole_attention(CASES[name], torch.float64)
    for results in run_distributed(4, all_exchanges, CASES[name], torch.float64):
        for layout, tensors in results.items():
            for label, actual, wanted in zip(("output", "query", "key", "value"), tensors, expected, strict=True):
                assert_tensors_close(actual, wanted, TOLERANCE, f"{layout} {label}")
