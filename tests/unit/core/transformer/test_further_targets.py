"""What a position is given and predicts of the tokens further ahead."""

from __future__ import annotations

import torch

from megatron.core.process_group import single_rank_group
from megatron.core.transformer.multi_token_prediction.further_targets import further_targets


def test_tokens_ahead_end_with_sequence_document_and_mask() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    loss_mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]])
    targets = further_targets(labels, loss_mask, documents, 2, single_rank_group())
    assert targets.tokens.tolist() == [[[1, 2, 3, 4, 5, 0]], [[2, 3, 4, 5, 0, 0]]]
    assert targets.labels.tolist() == [[[2, 3, 4, 5, 6, 0]], [[3, 4, 5, 6, 0, 0]]]
    assert targets.mask.tolist() == [
        [[True, True, False, False, True, False]],
        [[True, False, False, True, False, False]],
    ]
    assert targets.counts.tolist() == [3.0, 2.0]


def test_without_a_mask_all_but_the_end_count() -> None:
    targets = further_targets(torch.arange(4).view(1, 4), None, None, 1, single_rank_group())
    assert targets.mask.tolist() == [[[True, True, True, False]]]
