"""FlexAttention's rules against attention written out, and its mask of blocks against the matrix of positions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn.attention import flex_attention as flex_module

from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.ops.dot_product_attention import AttentionInputs, plain_attention
from megatron.core.ops.flex_attention import BlockMaskCache, attend_by_blocks, load_flex_attention, make_block_mask

BATCH, LENGTH, BLOCK = 2, 32, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11 + [2] * 2 + [3] * 14, [0] * 24 + [1] * 8])
# The documents of a reader of one's own need not be in ascending order.
SHUFFLED = torch.tensor([[7] * 9 + [3] * 7 + [9] * 8 + [3] * 8, [1] * 32])
PATTERNS = {
    "causal": AttentionPattern(),
    "documents": AttentionPattern(document_ids=DOCUMENTS),
    "shuffled": AttentionPattern(document_ids=SHUFFLED),
    "both directions": AttentionPattern(is_causal=False, document_ids=DOCUMENTS),
    "window": AttentionPattern(window=7),
    "wide window": AttentionPattern(window=20),
    "window in both directions": AttentionPattern(is_causal=False, window=12),
    "window of documents": AttentionPattern(document_ids=DOCUMENTS, window=5),
}
PARTS = {"whole": (range(32), range(32)), "end": (range(16, 24), range(24)), "middle": (range(8, 24), range(32))}


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return torch's FlexAttention as it computes without compiling, which it allows on CPU in one direction only."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_module, "_warn_once", lambda *args, **options: None)
    return flex_module.flex_attention


@pytest.mark.parametrize("query_block", [None, BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_hold_every_pair_that_may_meet_and_no_others(name: str, part: str, query_block: int | None) -> None:
    queries, keys = PARTS[part]
    if len(queries) % (query_block or BLOCK):
        queries, keys = range(8, 24), range(24)
    pattern = PATTERNS[name].part(queries, keys)
    matrix = pattern.matrix(len(queries), len(keys), torch.device("cpu"))
    assert matrix is not None
    pairs = matrix[:, 0].unflatten(2, (-1, BLOCK)).unflatten(1, (-1, query_block or BLOCK))
    sizes = (BLOCK,) if query_block is None else (BLOCK, query_block)
    mask = make_block_mask(pattern, len(queries), len(keys), torch.device("cpu"), *sizes)
    assert (query_block or BLOCK, BLOCK) == mask.BLOCK_SIZE
    batch, query, key = (torch.arange(size) for size in matrix[:, 0].shape)
    rule = mask.mask_mod(batch[:, None, None], torch.zeros(1), query[:, None], key)
    assert torch.equal(rule.expand_as(matrix[:, 0]), matrix[:, 0])
    assert mask.seq_lengths == (len(queries), len(keys))
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(full, pairs.all(dim=4).all(dim=2))
    assert not (full & partial).any()
    some = pairs.any(dim=4).any(dim=2)
    assert (some <= (full | partial)).all(), "a block that is needed is passed over"
    if name != "shuffled":
        assert torch.equal(full | partial, some), "a block is computed for nothing"


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return ``[b, query blocks, key blocks]`` of bool from the first ``counts`` of ``indices``."""
    counts, indices = counts[:, 0], indices[:, 0].long()
    is_listed = torch.arange(indices.shape[2]) < counts[..., None]
    return torch.zeros_like(indices, dtype=torch.bool).scatter(2, indices, is_listed)


# Every rule once with each kind of part, capped scores and grouped heads among them: compiling is what takes time.
CASES = [
    ("documents", "whole", None),
    ("documents", "end", 1.5),
    ("both directions", "middle", None),
    ("window", "whole", 1.5),
    ("window of documents", "end", None),
]


@pytest.mark.default(1)
@pytest.mark.parametrize(("name", "part", "softcap"), CASES)
def test_outputs_and_gradients_are_those_of_plain_attention(
    flex: Callable[..., Any], name: str, part: str, softcap: float | None
) -> None:
    queries, keys = PARTS[part]
    pattern = PATTERNS[name].part(queries, keys)
    generator = torch.Generator().manual_seed(3)
    leaves = [
        torch.randn(length, BATCH, heads, 16, generator=generator, dtype=torch.float64).requires_grad_()
        for length, heads in ((len(queries), 6), (len(keys), 2), (len(keys), 2))
    ]
    weights = torch.randn(len(queries), BATCH, 6, 16, generator=generator, dtype=torch.float64)
    output = attend_by_blocks(flex, BlockMaskCache(BLOCK), AttentionInputs(*leaves, pattern), softcap)
    expected = plain_attention(AttentionInputs(*leaves, pattern), softcap)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    gradients = (torch.autograd.grad(result, leaves, weights) for result in (output, expected))
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-12)


def test_sinks_are_merged_by_the_sums_of_its_rows(flex: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((LENGTH, BATCH, 6, 16), *[(LENGTH, BATCH, 2, 16)] * 2, (6,))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weights, pattern = torch.randn(shapes[0], generator=generator, dtype=torch.float64), PATTERNS["window of documents"]
    output = attend_by_blocks(flex, BlockMaskCache(BLOCK), AttentionInputs(*leaves[:3], pattern, sinks=leaves[3]), None)
    expected = plain_attention(AttentionInputs(*leaves[:3], pattern, sinks=leaves[3]))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    gradients = (torch.autograd.grad(result, leaves, weights) for result in (output, expected))
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-12)


def test_layers_share_the_blocks_of_documents_and_the_next_batch_does_not() -> None:
    masks = []

    def flex(query: torch.Tensor, *rest: torch.Tensor, block_mask: object, **options: object) -> torch.Tensor:
        masks.append(block_mask)
        return query

    tensors = [torch.zeros(LENGTH, BATCH, 2, 16)] * 3
    batches = [AttentionPattern(document_ids=DOCUMENTS.clone()) for _ in range(2)]
    for pattern in (batches[0], batches[0], batches[1], batches[0].within(5), batches[0].within(5)):
        attend_by_blocks(flex, BlockMaskCache(BLOCK), AttentionInputs(*tensors, pattern), None)
    assert masks[0] is masks[1]
    assert masks[3] is masks[4]
    assert len({id(mask) for mask in masks}) == 3


def test_blocks_without_documents_are_kept_for_the_next_step() -> None:
    masks, device = BlockMaskCache(BLOCK), torch.device("cpu")
    first = masks.get(AttentionPattern(), LENGTH, LENGTH, device)
    assert masks.get(AttentionPattern(), LENGTH, LENGTH, device) is first
    others = [
        masks.get(AttentionPattern(is_causal=False), LENGTH, LENGTH, device),
        masks.get(AttentionPattern(window=5), LENGTH, LENGTH, device),
        masks.get(AttentionPattern(first_query=0), BLOCK, LENGTH, device),
        masks.get(AttentionPattern(), BLOCK, LENGTH, device),
        masks.get(AttentionPattern(), BLOCK, 2 * BLOCK, device),
        masks.get(AttentionPattern(), LENGTH, LENGTH, torch.device("meta")),
    ]
    assert len({id(mask) for mask in (first, *others)}) == 7
    # A run of many lengths keeps the last ones.
    for number in range(1, 17):
        masks.get(AttentionPattern(window=10 + number), LENGTH, LENGTH, device)
    assert masks.get(AttentionPattern(), LENGTH, LENGTH, device) is not first


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Return what says whether Triton is there; what is loaded meanwhile is forgotten."""
    load_flex_attention.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield lambda is_there: monkeypatch.setattr(
            "megatron.core.ops.flex_attention.has_triton_package", lambda: is_there
        )
    load_flex_attention.cache_clear()


def test_without_triton_there_is_no_flex_attention(triton: Callable[[bool], None]) -> None:
    triton(False)
    assert load_flex_attention() is None


def test_what_cannot_be_compiled_is_an_error_and_not_all_scores(
    monkeypatch: pytest.MonkeyPatch, triton: Callable[[bool], None]
) -> None:
    triton(True)
    monkeypatch.setattr(torch, "compile", lambda function, **options: (function, options))
    assert load_flex_attention() == (flex_module.flex_attention, {"fullgraph": True})


def test_other_documents_compile_nothing_anew(monkeypatch: pytest.MonkeyPatch, triton: Callable[[bool], None]) -> None:
    """On CPU torch traces as for CUDA, and then computes without a kernel."""
    triton(True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = load_flex_attention()
    assert compiled is not None
    assert torch._dynamo.config.recompile_limit >= 64
    torch._dynamo.reset()
    counts = []
    for ids in (DOCUMENTS, DOCUMENTS.flip(0), SHUFFLED):
        tensors = [torch.randn(LENGTH, BATCH, 2, 16) for _ in range(3)]
        pattern = AttentionPattern(document_ids=ids)
        output = attend_by_blocks(compiled, BlockMaskCache(BLOCK), AttentionInputs(*tensors, pattern), 2.0)
        torch.testing.assert_close(output, plain_attention(AttentionInputs(*tensors, pattern), 2.0))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < counts[0] == counts[1] == counts[2]
