"""Which ranks drop the same elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.kernels.attention_pattern import CAUSAL
from megatron.core.transformer.transformer_layer import HiddenDropout
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, make_batch, make_model, make_rng, tensor_parallel_group


def hidden_dropout(sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dropout = HiddenDropout(0.3, sequence_parallel, make_rng(tensor_parallel_group()))
    ones = torch.ones(6, 3, 40)
    return dropout(ones), dropout(ones)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hidden_dropout_is_equal_over_ranks_unless_each_has_its_own_positions(sequence_parallel: bool) -> None:
    results = run_distributed(2, hidden_dropout, sequence_parallel)
    for first, second in results:
        assert not torch.equal(first, second), "the stream does not move on"
        assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
        assert (first == 0).float().mean().item() == pytest.approx(0.3, abs=0.06)
    same = [torch.equal(a, b) for a, b in zip(*results)]
    assert same == [not sequence_parallel] * 2


def attention_context() -> torch.Tensor:
    """Return the context of this rank's heads; every head sees the same queries, keys and values."""
    tp = tensor_parallel_group()
    model = make_model(tp, attention_dropout=0.4, attention_backend="unfused")
    attention = model.decoder.layers["0"].self_attention
    query = torch.full((9, 2, attention.num_heads, 10), 0.5)
    return attention._attend(query, query, query + torch.arange(10), CAUSAL)


def test_attention_dropout_differs_over_ranks() -> None:
    first, second = run_distributed(2, attention_context)
    assert not torch.equal(first, second)
    assert not torch.equal(first[..., :10], first[..., 10:]), "heads of one rank drop alike"


def trained_hidden_states(**config: Any) -> list[torch.Tensor]:
    tp = tensor_parallel_group()
    model = make_model(tp, **config)
    load_global_weights(model)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    results = [model(tokens, positions, labels=labels).detach().clone()]
    model.eval()
    results.append(model(tokens, positions, labels=labels).detach().clone())
    return results


def hidden_dropout_only() -> list[torch.Tensor]:
    return trained_hidden_states(hidden_dropout=0.2)


def test_hidden_dropout_of_a_model_is_the_same_at_any_size_and_off_in_evaluation() -> None:
    """Without sequence parallelism the replicated stream draws what one process draws: the losses are equal."""
    expected = hidden_dropout_only()
    assert (expected[0] - expected[1]).abs().max() > 0.01
    for result in run_distributed(2, hidden_dropout_only):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
