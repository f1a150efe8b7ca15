"""What a position is given and predicts of the tokens further ahead."""

from __future__ import annotations

import pytest
import torch

from megatron.core.config_base import from_fields
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import single_rank_group
from megatron.core.transformer.decoder_config import DecoderConfig, MTPConfig
from megatron.core.transformer.multi_token_prediction import further_layer_numbers, further_losses, mtp_targets


def test_tokens_ahead_end_with_sequence_document_and_mask() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    loss_mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]])
    targets = mtp_targets(labels, loss_mask, documents, 2, single_rank_group())
    assert targets.tokens.tolist() == [[[1, 2, 3, 4, 5, 0]], [[2, 3, 4, 5, 0, 0]]]
    assert targets.labels.tolist() == [[[2, 3, 4, 5, 6, 0]], [[3, 4, 5, 6, 0, 0]]]
    assert targets.mask.tolist() == [
        [[True, True, False, False, True, False]],
        [[True, False, False, True, False, False]],
    ]
    assert targets.counts.tolist() == [3.0, 2.0]


def test_without_a_mask_all_but_the_end_count() -> None:
    targets = mtp_targets(torch.arange(4).view(1, 4), None, None, 1, single_rank_group())
    assert targets.mask.tolist() == [[[True, True, True, False]]]


def test_the_shares_of_three_ranks_add_up_in_the_dtype_of_the_loss() -> None:
    config = MTPConfig(mtp_num_layers=1)
    targets = mtp_targets(torch.arange(8).view(1, 8), None, None, 1, single_rank_group())
    cp = describe_parallel_state(0, 3, ParallelSizes(cp=3)).cp
    per_token = torch.ones(1, 8, dtype=torch.float64)
    (loss,) = further_losses([per_token], targets, config, cp)
    assert loss.num_tokens.dtype is torch.float64
    assert abs(3 * loss.num_tokens.item() - 7) < 1e-15


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_weight_of_further_losses_is_that_of_their_mean(number: int) -> None:
    config = MTPConfig(mtp_num_layers=number, mtp_loss_scaling_factor=0.4)
    targets = mtp_targets(torch.arange(8).view(1, 8), None, None, number, single_rank_group())
    losses = list(further_losses([torch.full((1, 8), 2.0)] * number, targets, config, single_rank_group()))
    assert [loss.name for loss in losses] == [f"mtp_{depth}_loss" for depth in range(1, number + 1)]
    for distance, loss in enumerate(losses, start=1):
        assert loss.coefficient == 0.4 / number
        assert (loss.loss_sum.item(), loss.num_tokens.item()) == (2.0 * (8 - distance), 8 - distance)


def test_more_tokens_ahead_than_a_sequence_has_do_not_count() -> None:
    targets = mtp_targets(torch.arange(1, 3).view(1, 2), None, None, 3, single_rank_group())
    assert targets.tokens.tolist() == [[[1, 0]], [[0, 0]], [[0, 0]]]
    assert targets.labels.tolist() == [[[2, 0]], [[0, 0]], [[0, 0]]]
    assert targets.counts.tolist() == [1, 0, 0]


def test_dropout_knows_the_further_layers_and_then_their_embeddings() -> None:
    config = from_fields(DecoderConfig, num_layers=3, hidden_size=24, num_attention_heads=4, mtp_num_layers=2)
    assert further_layer_numbers(config) == range(3, 7)
