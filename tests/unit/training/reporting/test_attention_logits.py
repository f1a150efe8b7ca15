"""The largest attention logit, block by block, is that of the whole matrix of scores."""

from __future__ import annotations

import pytest
import torch

from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.process_group import single_rank_group
from megatron.training.callbacks import layer_statistics
from megatron.training.callbacks.layer_statistics import AttentionLogits

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 11, 3, 6, 2, 5
WORLD = single_rank_group(("dp",))
MASK = torch.eye(LENGTH, dtype=torch.bool)[None, None]
PATTERNS = {
    "causal": AttentionPattern(),
    "both directions": AttentionPattern(is_causal=False),
    "window": AttentionPattern(window=3),
    "documents": AttentionPattern(document_ids=torch.arange(LENGTH).div(4, rounding_mode="floor").expand(BATCH, -1)),
    "mask": AttentionPattern(mask=MASK),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_the_largest_is_that_of_the_whole_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_statistics, "_BLOCK_ELEMENTS", 4 * BATCH * HEADS * LENGTH)  # 4 queries a block, then 3
    pattern, random = PATTERNS[name], torch.Generator().manual_seed(3)
    query = torch.randn(LENGTH, BATCH, HEADS, WIDTH, generator=random)
    key = torch.randn(LENGTH, BATCH, GROUPS, WIDTH, generator=random)
    query[0, :, 0] = 9.0 * key[-1, :, 0]  # the largest of all is where most patterns forbid to look
    every_key = key.repeat_interleave(HEADS // GROUPS, dim=2)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, every_key) / WIDTH**0.5
    visible = pattern.matrix(LENGTH, LENGTH, torch.device("cpu"))
    expected = (scores if visible is None else scores.masked_fill(~visible, -torch.inf)).max().item()
    assert visible is None or expected < scores.max().item()  # the pattern matters

    logits = AttentionLogits((), torch.device("cpu"))
    logits.observe(query, key, pattern)
    assert logits.take(WORLD) is None  # it was off
    logits.is_on = True
    logits.observe(query / 2, key, pattern)
    logits.observe(query, key, pattern)
    assert logits.take(WORLD) == pytest.approx(expected, rel=1e-6)
    assert logits.take(WORLD) is None
