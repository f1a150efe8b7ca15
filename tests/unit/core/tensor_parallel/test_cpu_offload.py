"""Activations and weights leave the device and come back: counted bytes, and not one bit of a step changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from megatron.core.host_memory import Copied, HostCopies
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.cpu_offload import ActivationOffload, WeightOffload
from tests.closed_forms.saved_activations import saved_bytes
from tests.harness.toy_model import load_global_weights, make_batch, make_model, tensor_parallel_group

LENGTH, BATCH = 12, 3
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
ALL_MODULES = SELECTIVE | {"recompute_modules": ("core_attn", "layernorm", "mlp")}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class CountedCopies(HostCopies):
    """Count the bytes that are on the device of what was moved: at most, and now."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.most = 0

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        self._follow(tensor)
        return super()._copy_out(tensor, target)

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        back = super()._copy_in(tensor, target)
        self._follow(back.tensor)
        return back

    def _follow(self, tensor: torch.Tensor) -> None:
        self.live += tensor.nbytes
        self.most = max(self.most, self.live)
        weakref.finalize(tensor.untyped_storage(), self._end, tensor.nbytes)

    def _end(self, num_bytes: int) -> None:
        self.live -= num_bytes


def make_offloaded(num_layers: int, copies: HostCopies, **config: Any) -> GPTModel:
    # The closed form is that of fused attention.
    settings = {"position_embedding_type": "learned_absolute", "attention_backend": "fused", **config}
    model = make_model(tensor_parallel_group(), num_layers=4, **settings)
    load_global_weights(model)
    if num_layers:
        model.decoder.offload = ActivationOffload(copies, num_layers)
    return model


def train(model: GPTModel) -> list[torch.Tensor]:
    """Return the loss and all gradients of one micro-batch."""
    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    loss = model(tokens, positions, labels=labels).mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("num_layers", [1, 3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="all"),
        pytest.param({"hidden_dropout": 0.1, "attention_dropout": 0.1}, id="dropout"),
        pytest.param(SELECTIVE, id="core_attn"),
        pytest.param(ALL_MODULES, id="modules"),
        pytest.param(FULL, id="full"),
        pytest.param({"swiglu": True, "normalization": "RMSNorm", "qk_layernorm": True}, id="llama"),
    ],
)
def test_offload_changes_no_bit(num_layers: int, config: dict[str, Any]) -> None:
    torch.manual_seed(3)
    expected = train(make_offloaded(0, HostCopies(), **config))
    torch.manual_seed(3)
    copies = HostCopies()
    actual = train(make_offloaded(num_layers, copies, **config))
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))
    assert copies.bytes_out == copies.bytes_in > 0


@pytest.mark.parametrize("config", [{}, SELECTIVE, ALL_MODULES, FULL], ids=["all", "core_attn", "modules", "full"])
def test_bytes_out_and_in_are_those_of_the_closed_form(config: dict[str, Any]) -> None:
    for num_layers in (1, 3):
        copies = HostCopies()
        model = make_offloaded(num_layers, copies, **config)
        train(model)
        expected = num_layers * sum(saved_bytes(model.config, LENGTH, BATCH).values())
        assert copies.bytes_out == copies.bytes_in == expected


@pytest.mark.parametrize("config", [{}, ALL_MODULES, FULL], ids=["all", "modules", "full"])
def test_moved_memory_is_free_after_the_forward_pass_and_two_layers_of_it_are_there_at_most(
    config: dict[str, Any],
) -> None:
    copies = CountedCopies()
    model = make_offloaded(3, copies, **config)
    a_layer = sum(saved_bytes(model.config, LENGTH, BATCH).values())
    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, positions, labels=labels).mean()
    assert copies.bytes_out == 3 * a_layer
    assert copies.live == 0
    # The model itself holds the first layer's input as long as its layers run.
    assert a_layer < copies.most <= 2 * a_layer + LENGTH * BATCH * model.config.hidden_size * 4
    # What is left is the fourth layer's, the parameters, and what stands behind the layers.
    copies.most = 0
    without = make_offloaded(0, HostCopies(), **config)
    on_device = sum(kept.values())
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        without(tokens, positions, labels=labels)
    assert sum(kept.values()) - on_device == 3 * a_layer
    loss.backward()
    assert copies.live == 0
    assert a_layer < copies.most <= 2 * a_layer


def test_nothing_moves_in_evaluation() -> None:
    copies = HostCopies()
    model = make_offloaded(2, copies)
    tokens, labels, positions, _ = make_batch(LENGTH, BATCH, 53)
    with torch.no_grad():
        model(tokens, positions, labels=labels)
    model.eval()
    model(tokens, positions, labels=labels)
    assert copies.bytes_out == 0


def test_a_layer_comes_back_while_the_one_behind_it_is_differentiated() -> None:
    """Each layer's copies begin before the layer behind it has used up its own."""
    events: list[str] = []

    class Noted(HostCopies):
        def to_device(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> Copied:
            events.append("copy")
            return super().to_device(tensor, target)

    model = make_offloaded(3, Noted())
    for number, layer in model.decoder.layers.items():
        layer.register_full_backward_hook(lambda *_, number=number: events.append(f"end of {number}"))
    train(model)
    order = [event for event, before in zip(events, ["", *events]) if event != before]
    assert order == ["copy", "end of 3", "copy", "end of 2", "copy", "end of 1", "end of 0"]


class WatchedCopies(HostCopies):
    """Note the copies to the device whose memory was given back before they were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_given_back_too_soon = 0
        self._waited: set[int] = set()

    def to_device(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> Copied:
        number, copied = self.bytes_in, super().to_device(tensor, target)
        weakref.finalize(copied.tensor.untyped_storage(), self._end, number)
        copied.tensor.number = number  # type: ignore[attr-defined]
        return copied

    def wait(self, copied: Copied) -> None:
        if hasattr(copied.tensor, "number"):
            self._waited.add(copied.tensor.number)

    def _end(self, number: int) -> None:
        self.num_given_back_too_soon += number not in self._waited


def test_what_came_back_and_nobody_reads_is_waited_for_before_its_memory_goes() -> None:
    """A loss that does not count, say: its part of the graph has saved what the backward pass never asks for."""
    copies = WatchedCopies()
    running = ActivationOffload(copies, 2).begin_pass([])
    x = torch.randn(48, requires_grad=True)
    with running.layer([]):
        first = x.exp() * 2
        unused = first.sin()
    with running.layer([]):
        second = first.exp()
    running.end(second)
    second.sum().backward()
    assert copies.bytes_in == 3 * x.nbytes
    del first, unused, second
    assert copies.num_given_back_too_soon == 0


def test_masks_and_what_has_no_elements_stay() -> None:
    offload = ActivationOffload(HostCopies(), 1)
    follower = offload.begin_pass(())
    x = torch.randn(4, requires_grad=True)
    with follower.layer(()):
        chosen = torch.where(torch.tensor([True, False, True, True]), x, 0.0)
        empty = x[:0].exp()
    assert offload.num_tensors_moved == 0
    with follower.layer(()):
        output = chosen.exp()
    assert offload.num_tensors_moved == 1
    # Nothing behind the layers has a gradient here, so nothing asks for their tensors together.
    follower.end(torch.ones(2))
    (output.sum() + empty.sum()).backward()
    torch.testing.assert_close(x.grad, x.detach().exp() * torch.tensor([1.0, 0.0, 1.0, 1.0]))


NUM_STEPS, NUM_MICROBATCHES = 2, 2
WEIGHT_FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 2,
}
MODULES: dict[str, Any] = {
    "recompute_granularity": "selective",
    "recompute_modules": ("core_attn", "layernorm", "mlp"),
}


def train_with_weight_offload(
    num_layers: int, moves_activations: bool, **config: Any
) -> tuple[list[torch.Tensor], HostCopies, list[int]]:
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
@pytest.mark.parametrize("config", [{}, MODULES, WEIGHT_FULL], ids=["all", "modules", "full"])
def test_a_step_is_the_same_bits(config: dict[str, Any], moves_activations: bool) -> None:
    expected, _, _ = train_with_weight_offload(0, False, **config)
    for num_layers in (1, 4):
        actual, copies, counts = train_with_weight_offload(num_layers, moves_activations, **config)
        assert all(map(torch.equal, actual, expected))
        assert copies.bytes_out > 0
        if not config:
            assert max(counts) == min(num_layers, 2)


def test_bytes_out_and_in_are_those_of_the_weights() -> None:
    _, copies, _ = train_with_weight_offload(3, False)
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
