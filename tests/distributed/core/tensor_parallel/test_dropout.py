"""Dropout in a model: the same at any tensor-parallel layout, with keys or without, and refused where it has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.ops.dropout import DropoutSamples
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group

BOTH = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def losses(sequence_parallel: bool, is_keyed: bool, **config: Any) -> list[torch.Tensor]:
    """Return the losses of two passes in training, and of one in evaluation."""
    model = make_model(tensor_parallel_group(), sequence_parallel=sequence_parallel, **config)
    load_global_weights(model)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    results = []
    for iteration in range(3):
        model.train(iteration < 2)
        samples = DropoutSamples.at(5, iteration, 0, 3, "cpu") if is_keyed else None
        results.append(model(tokens, positions, labels=labels, dropout_samples=samples).detach().clone())
    return results


@pytest.mark.parametrize("is_keyed", [False, True])
def test_a_model_drops_the_same_at_any_size_and_nothing_in_evaluation(is_keyed: bool) -> None:
    expected = losses(False, is_keyed, **BOTH)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (expected[one] - expected[other]).abs().max() > 0.01
    for sequence_parallel in (False, True):
        for result in run_distributed(2, losses, sequence_parallel, is_keyed, **BOTH):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BOTH)
def test_layers_without_keys_are_refused_in_training(name: str) -> None:
    model = make_model(tensor_parallel_group(), **{name: 0.1})
    hidden = torch.ones(4, 2, 28)
    with pytest.raises(ConfigurationError, match=r"^layers with --hidden-dropout or .* without dropout keys: hand"):
        model.decoder(hidden, CAUSAL, None)
    assert model.eval().decoder(hidden, CAUSAL, None).hidden.shape == hidden.shape


def test_attention_and_feed_forward_drop_other_elements_than_the_next_layer() -> None:
    """Each site is keyed by its own number: with weights all alike, equal masks would give equal layers."""
    model = make_model(tensor_parallel_group(), hidden_dropout=0.5)
    keys = model._dropout(DropoutSamples.at(5, 0, 0, 2, "cpu"), torch.zeros(4, 2))
    assert keys is not None
    ones, dropped = torch.ones(4, 2, 28), []
    for layer in model.decoder.layers.values():
        for site in (keys.after_attention(layer.layer_number), keys.after_feed_forward(layer.layer_number)):
            dropped.append(layer.hidden_dropout(ones, site))
    dropped.append(model.embedding.dropout(ones, keys.of_embedding))
    assert len({tuple(mask.flatten().tolist()) for mask in dropped}) == 5
    late = replace(keys, positions=keys.positions + 1)
    assert torch.equal(late.of_embedding.k0[:-1], keys.of_embedding.k0[1:])
