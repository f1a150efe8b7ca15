"""Recomputed activations and dropout over ranks: no bit of the loss or of a gradient changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.errors import ConfigurationError
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.ops.dropout import DropoutSamples
from megatron.core.process_group import Group
from megatron.core.sharding import spec_of
from megatron.core.tensor_parallel.recompute import saved_in_parts
from tests.harness.distributed import run_distributed
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group

MODES: dict[str, dict[str, Any]] = {
    "selective": {"recompute_granularity": "selective"},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "modules": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm", "core_attn")},
    "uniform-1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform-2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block-2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "distributed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
        "distribute_saved_activations": True,
    },
    "block-9": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9},
}


def run_two_steps(tp: Group, **config: Any) -> dict[str, np.ndarray]:
    """Return the losses of two micro-batches, the sum of their gradients, and the random state after them."""
    model = make_model(
        tp,
        num_layers=3,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        num_query_groups=2,
        position_embedding_type="rope",
        **config,
    )
    load_global_weights(model)
    kept: dict[str, np.ndarray] = {}
    for step in range(2):
        tokens, labels, positions, _ = make_batch(12, 3, 53, seed=step)
        loss = model(tokens, positions, labels=labels).mean()
        loss.backward()
        kept[f"loss {step}"] = loss.detach().numpy().copy()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        kept[f"{spec_of(parameter).name} {name}"] = parameter.grad.numpy().copy()
    states = model.rng.state_dict()
    return kept | {f"state {stream}": state.numpy().copy() for stream, state in states.items()}


def differences(sequence_parallel: bool) -> dict[str, list[str]]:
    """Return for every way of recomputing the names of what is not bitwise equal to no recompute."""
    tp = tensor_parallel_group()
    expected = run_two_steps(tp, sequence_parallel=sequence_parallel)
    found = {}
    for mode, config in MODES.items():
        if mode == "distributed" and (sequence_parallel or tp.size == 1):
            continue  # rejected at parse time
        actual = run_two_steps(tp, sequence_parallel=sequence_parallel, **config)
        assert set(actual) == set(expected)
        found[mode] = [name for name in expected if not np.array_equal(actual[name], expected[name])]
    return found


NO_DIFFERENCES: dict[str, list[str]] = {mode: [] for mode in MODES}
NONE_WITHOUT_PARTS = {mode: names for mode, names in NO_DIFFERENCES.items() if mode != "distributed"}


def test_recompute_is_exact_on_one_rank() -> None:
    assert differences(sequence_parallel=False) == NONE_WITHOUT_PARTS


@pytest.mark.default(1)
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.long), True])
def test_recompute_is_exact_under_tensor_parallelism(sequence_parallel: bool) -> None:
    expected = NONE_WITHOUT_PARTS if sequence_parallel else NO_DIFFERENCES
    assert run_distributed(2, differences, sequence_parallel) == [expected] * 2


@pytest.mark.parametrize(
    ("mode", "passes"), [("uniform-2", (2, 2, 2)), ("block-2", (2, 2, 1)), ("uniform-1", (2, 2, 2))]
)
def test_full_recompute_runs_the_layers_again_that_it_should(mode: str, passes: tuple[int, ...]) -> None:
    tp = tensor_parallel_group()
    model = make_model(tp, num_layers=3, **MODES[mode])
    counts = dict.fromkeys(model.decoder.layers, 0)
    for number, layer in model.decoder.layers.items():

        def count(*_: Any, number: str = number) -> None:
            counts[number] += 1

        layer.self_attention.linear_proj.register_forward_hook(count)
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    model(tokens, positions, labels=labels).mean().backward()
    assert tuple(counts.values()) == passes
    model.eval()
    with torch.no_grad():
        model(tokens, positions)
    assert tuple(counts.values()) == tuple(number + 1 for number in passes)


def test_selective_recompute_keeps_no_attention_weights() -> None:
    """With plain attention the weights [b, n, s, s] are the largest activations; none may be kept."""

    def largest_kept(**config: Any) -> int:
        model = make_model(tensor_parallel_group(), attention_backend="unfused", **config)
        tokens, labels, positions, _ = make_batch(14, 3, 53)
        kept: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, positions, labels=labels)
        return sum(shape[-2:] == (14, 14) for shape in kept)

    assert largest_kept() > 0
    assert largest_kept(recompute_granularity="selective") == 0


def test_recomputed_dropout_leaves_the_default_generator_alone() -> None:
    tp = tensor_parallel_group()
    model = make_model(tp, hidden_dropout=0.1, **MODES["uniform-1"])
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    samples = DropoutSamples.at(1, 0, 0, 3, "cpu")
    model(tokens, positions, labels=labels, dropout_samples=samples).mean().backward()
    assert torch.equal(torch.rand(3), expected)


def gradients_of_what_is_saved_in_parts() -> tuple[list[int], list[bool]]:
    """Return how many elements a product keeps, and whether its gradients are right."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2, 3, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, saved_in_parts(x, tensor_parallel_group()):
        product = x * y
    gradients = torch.autograd.grad(product.sum(), (x, y))
    return sorted(kept), [torch.equal(*pair) for pair in zip(gradients, (y, x), strict=True)]


def test_each_rank_keeps_its_part_of_a_tensor_that_is_the_same_on_all() -> None:
    assert run_distributed(2, gradients_of_what_is_saved_in_parts) == [([12, 24], [True, True])] * 2


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
    with pytest.raises(ConfigurationError, match=r"^layers with --hidden-dropout or .* without dropout keys: pass"):
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
