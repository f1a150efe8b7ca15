"""Weights leave the device while no pass uses them, and not one bit of a step changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.host_memory import HostCopies
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.cpu_offload import ActivationOffload, WeightOffload
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group

NUM_STEPS, NUM_MICROBATCHES = 2, 2
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
MODULES: dict[str, Any] = {
    "recompute_granularity": "selective",
    "recompute_modules": ("core_attn", "layernorm", "mlp"),
}


def train(num_layers: int, moves_activations: bool, **config: Any) -> tuple[list[torch.Tensor], HostCopies, list[int]]:
    """Return losses and weights of some steps, the copies, and of how many layers weights are there in each pass."""
    copies = HostCopies()
    model = make_model(tensor_parallel_group(), num_layers=4, **config)
    load_global_weights(model)
    layers = list(model.decoder.layers.values())
    offloaded, counts = layers[:num_layers], list[int]()
    if num_layers:
        model.decoder.weights = WeightOffload(copies, offloaded)
        if moves_activations:
            model.decoder.offload = ActivationOffload(copies, num_layers)
        for layer in layers:
            for module in (layer.self_attention, layer.mlp):
                module.register_forward_hook(lambda *_: counts.append(num_there(offloaded)))
                module.register_full_backward_hook(lambda *_: counts.append(num_there(offloaded)))
    figures = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        figures += run_step(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [*figures, *(parameter.detach().clone() for parameter in model.parameters())], copies, counts


def run_step(model: GPTModel, step: int) -> list[torch.Tensor]:
    weights, losses = model.decoder.weights, []
    if weights is not None:
        weights.leave()
    for microbatch in range(NUM_MICROBATCHES):
        tokens, labels, positions, _ = make_batch(12, 3, 53, seed=NUM_MICROBATCHES * step + microbatch)
        loss = model(tokens, positions, labels=labels).mean()
        loss.backward()
        losses.append(loss.detach())
    if weights is not None:
        weights.onload()
    return losses


def num_there(layers: list[torch.nn.Module]) -> int:
    return sum(all(p.untyped_storage().nbytes() for p in layer.parameters()) for layer in layers)


@pytest.mark.default(5)
@pytest.mark.parametrize("moves_activations", [False, True])
@pytest.mark.parametrize("config", [{}, MODULES, FULL], ids=["all", "modules", "full"])
def test_a_step_is_the_same_bits(config: dict[str, Any], moves_activations: bool) -> None:
    expected, _, _ = train(0, False, **config)
    for num_layers in (1, 4):
        actual, copies, counts = train(num_layers, moves_activations, **config)
        assert all(map(torch.equal, actual, expected))
        assert copies.bytes_out > 0
        if not config:
            assert max(counts) == min(num_layers, 2)


def test_bytes_out_and_in_are_those_of_the_weights() -> None:
    _, copies, _ = train(3, False)
    model = make_model(tensor_parallel_group(), num_layers=4)
    a_layer = sum(parameter.nbytes for parameter in model.decoder.layers["0"].parameters())
    assert copies.bytes_out == NUM_STEPS * 3 * a_layer
    # For each pass, and home.
    assert copies.bytes_in == NUM_STEPS * (2 * NUM_MICROBATCHES + 1) * 3 * a_layer


def test_without_a_step_under_way_nothing_moves() -> None:
    model = make_model(tensor_parallel_group(), num_layers=4)
    copies = HostCopies()
    model.decoder.weights = WeightOffload(copies, list(model.decoder.layers.values()))
    tokens, labels, positions, _ = make_batch(12, 3, 53)
    model(tokens, positions, labels=labels).mean().backward()
    assert copies.bytes_in == copies.bytes_out == 0
