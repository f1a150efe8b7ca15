"""What a position is given and predicts of the tokens further ahead."""

from __future__ import annotations

import torch

from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.multi_token_prediction.further_targets import further_losses, further_targets
from megatron.core.transformer.multi_token_prediction.prediction_config import PredictionConfig


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


def test_the_shares_of_three_ranks_add_up_in_the_dtype_of_the_loss() -> None:
    config = PredictionConfig(mtp_num_layers=1)
    targets = further_targets(torch.arange(8).view(1, 8), None, None, 1, single_rank_group())
    cp = describe_parallel_state(0, 3, ParallelSizes(cp=3)).cp
    per_token = torch.ones(1, 8, dtype=torch.float64)
    (loss,) = further_losses([per_token], targets, config, cp)
    assert loss.num_tokens.dtype is torch.float64
    assert abs(3 * loss.num_tokens.item() - 7) < 1e-15
