"""Every kernel that CUDA offers against plain attention, forward and backward."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.attention_backend import select_attention_core
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention

BATCH, HEADS, GROUPS, WIDTH, LENGTH = 2, 4, 2, 64, 384
STARTS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
STARTS[0, [5, 130, 131, 300]] = 1
DOCUMENTS = AttentionPattern(document_ids=STARTS.cumsum(dim=1))
CASES = {
    "causal": (CAUSAL, LENGTH, None),
    "end of more keys": (CAUSAL, 128, None),
    "documents": (DOCUMENTS, LENGTH, None),
    "documents of the end": (DOCUMENTS, 128, None),
    "window": (AttentionPattern(window=100), LENGTH, None),
    "window at the end": (AttentionPattern(window=100), 128, None),
    "window of documents": (DOCUMENTS.within(100), LENGTH, None),
    "capped scores": (CAUSAL, LENGTH, 5.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", ["auto", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_close_to_plain_attention(name: str, backend: str, dtype: torch.dtype) -> None:
    pattern, num_queries, softcap = CASES[name]
    if pattern.document_ids is not None:
        pattern = AttentionPattern(document_ids=pattern.document_ids.cuda(), window=pattern.window)
    generator = torch.Generator().manual_seed(8)
    shapes = ((num_queries, HEADS), (LENGTH, GROUPS), (LENGTH, GROUPS))
    leaves = [
        torch.randn(length, BATCH, heads, WIDTH, generator=generator).to("cuda", dtype).requires_grad_()
        for length, heads in shapes
    ]
    weights = torch.randn(num_queries, BATCH, HEADS, WIDTH, generator=generator).to("cuda", dtype)
    output = select_attention_core(backend, "cuda", softcap)(AttentionInputs(*leaves, pattern))
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = plain_attention(AttentionInputs(*exact, pattern), softcap)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 5e-3
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(output, leaves, weights)
    for ours, wanted in zip(grads, torch.autograd.grad(expected, exact, weights.double()), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2 * tolerance, atol=2 * tolerance)
