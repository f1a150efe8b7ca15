"""Attention sinks: every way to compute them against a softmax with one more column, gradients included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.ops import attention_backend
from megatron.core.ops.attention_backend import (
    IN_BLOCKS,
    STEP_BY_STEP,
    AttentionCall,
    describe_missing_flash,
    select_attention_core,
)
from megatron.core.ops.attention_block import AttentionBlocks, BlockMask
from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern
from megatron.core.ops.attention_sinks import torch_flash_with_sinks
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention
from megatron.core.ops.dropout import AttentionDropout

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 12, 3, 4, 2, 10
DOCUMENTS = AttentionPattern(document_ids=torch.tensor([[0] * 5 + [1] * 7, [0] * 12, [0] + [1] * 11]))
PATTERNS = {
    "causal": CAUSAL,
    "window": AttentionPattern(window=4),
    "documents": DOCUMENTS,
    "window of documents": DOCUMENTS.within(3),
    "both directions": AttentionPattern(is_causal=False),
}


def leaves(num_queries: int = LENGTH) -> list[torch.Tensor]:
    """Return query, key, value and sinks, one of which is far above every score."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((num_queries, BATCH, HEADS, WIDTH), *[(LENGTH, BATCH, GROUPS, WIDTH)] * 2, (HEADS,))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found[3][1] = 40.0
    return [tensor.requires_grad_() for tensor in found]


def with_gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(6), dtype=output.dtype)
    return [output, *torch.autograd.grad(output, tensors, weights)]


def by_the_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pattern: AttentionPattern, sinks: torch.Tensor
) -> torch.Tensor:
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=2) for tensor in (key, value))
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / WIDTH**0.5
    visible = pattern.matrix(len(query), len(key), query.device)
    exponentials = scores.exp() if visible is None else scores.exp() * visible
    sums = exponentials.sum(dim=-1, keepdim=True) + sinks.exp()[:, None, None]
    return torch.einsum("bnqk,kbnd->qbnd", exponentials / sums, value)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("num_queries", [LENGTH, 5, 1])
@pytest.mark.parametrize("name", PATTERNS)
def test_outputs_and_gradients_are_those_of_one_more_summand(name: str, num_queries: int, backend: str) -> None:
    tensors, pattern = leaves(num_queries), PATTERNS[name]
    output = select_attention_core(backend, "cpu")(AttentionInputs(*tensors[:3], pattern, sinks=tensors[3]))
    expected = by_the_definition(*tensors[:3], pattern, tensors[3])
    found, wanted = with_gradients(output, tensors), with_gradients(expected, tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_weights_are_dropped_after_the_sinks_had_their_share() -> None:
    tensors = leaves()
    positions = torch.arange(LENGTH)
    dropout = AttentionDropout(0.4, torch.arange(BATCH), positions, range(HEADS))
    outputs = [
        with_gradients(
            select_attention_core(backend, "cpu")(AttentionInputs(*tensors[:3], CAUSAL, dropout, sinks=tensors[3])),
            tensors,
        )
        for backend in ("auto", "unfused")
    ]
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    undropped = plain_attention(AttentionInputs(*tensors[:3], CAUSAL, sinks=tensors[3]))
    assert (outputs[0][0] - undropped).abs().max() > 0.1


def test_capped_scores_have_uncapped_sinks() -> None:
    query, key, value, sinks = leaves()
    core = select_attention_core("auto", "cpu", 1.5)
    capped = core(AttentionInputs(query, key, value, CAUSAL, sinks=sinks))
    torch.testing.assert_close(capped, plain_attention(AttentionInputs(query, key, value, CAUSAL, sinks=sinks), 1.5))
    assert capped[:, :, 1].abs().max() < 1e-15, "a sink of 40 leaves nothing to keys"


CALL = AttentionCall(torch.bfloat16, 64, 1024, 1024, CAUSAL, has_groups=True, has_sinks=True)
FLASH, FLEX = "torch's flash kernel with sinks", "FlexAttention"
CHOICES = [
    (CALL, FLASH),
    (replace(CALL, pattern=AttentionPattern(window=128)), FLASH),
    (replace(CALL, num_queries=1, has_dropout=True), FLASH),
    (replace(CALL, pattern=DOCUMENTS), FLEX),
    (replace(CALL, has_softcap=True), FLEX),
    (replace(CALL, dtype=torch.float32), FLEX),
    (replace(CALL, dtype=torch.float32, num_queries=1), IN_BLOCKS),
    (replace(CALL, dtype=torch.float32, num_queries=1, has_softcap=True), STEP_BY_STEP),
]


@pytest.mark.parametrize(("call", "expected"), CHOICES)
def test_kernels_on_cuda(call: AttentionCall, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that takes every call is not asked for those with sinks."""
    monkeypatch.setattr(attention_backend, "load_flex_attention", lambda: plain_attention)
    monkeypatch.setattr(attention_backend, "load_flash_attention", lambda *, is_deterministic: plain_attention)
    monkeypatch.setattr(attention_backend, "load_flash_attention_3", lambda: plain_attention)
    core = select_attention_core("auto", "cuda", 30.0 if call.has_softcap else None)
    assert core.choose(call).name == expected
    assert core.choose(replace(call, has_sinks=False)).name not in (FLASH, IN_BLOCKS)
    line = describe_missing_flash("flash", "bfloat16", "cuda", has_sinks=True)
    assert line is not None
    assert "it does not support attention sinks" in line


@pytest.mark.parametrize("name", ["causal", "window", "both directions"])
def test_the_flash_kernel_is_given_what_its_backward_pass_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is of CUDA: one that is written out takes its place, as its backward pass takes output and rows."""
    pattern, blocks = PATTERNS[name], AttentionBlocks(plain=True)
    seen: list[Any] = []

    def mask_of(is_causal: bool, window_size_left: int, window_size_right: int) -> BlockMask:
        assert (window_size_right == 0) == is_causal
        window = None if window_size_left < 0 else window_size_left + 1
        return BlockMask(AttentionPattern(is_causal, window=window).matrix(LENGTH, LENGTH, torch.device("cpu")))

    def forward(*given: Any, **windows: int) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _, num_queries, num_keys, dropout, is_causal, _ = given
        assert (num_queries, num_keys, dropout) == (LENGTH, LENGTH, 0.0)
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output, logsumexp = blocks.forward(*heads, mask_of(is_causal, **windows))
        return output.transpose(1, 2), logsumexp, torch.tensor(3), torch.tensor(4), torch.empty(0)

    def backward(*given: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        grad, query, key, value, output = (tensor.transpose(1, 2) for tensor in given[:5])
        windows = {name: options[name] for name in ("window_size_left", "window_size_right")}
        seen.append((options["max_q"], options["max_k"], int(options["rng_state"]), int(options["unused"])))
        mask = mask_of(options["is_causal"], **windows)
        grads = blocks.backward(grad, query, key, value, output, given[5], mask)
        return tuple(gradient.transpose(1, 2) for gradient in grads)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    tensors = leaves()
    output = torch_flash_with_sinks(AttentionInputs(*tensors[:3], pattern, sinks=tensors[3]))
    found = with_gradients(output, tensors)
    wanted = with_gradients(plain_attention(AttentionInputs(*tensors[:3], pattern, sinks=tensors[3])), tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert seen == [(LENGTH, LENGTH, 3, 4)]
