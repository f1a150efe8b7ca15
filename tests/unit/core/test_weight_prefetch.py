"""Weights and their memory come for the layers that run, with those of the next one, and go when they have run."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.weight_prefetch import WeightPrefetch, alloc_storage, free_storage, has_memory


class Weights:
    """Note what a layer's weights are asked for."""

    def __init__(self, number: int, log: list[str]) -> None:
        self._number, self._log = number, log

    def begin(self) -> None:
        self._log.append(f"begin {self._number}")

    def use(self) -> None:
        self._log.append(f"use {self._number}")

    def free(self) -> None:
        self._log.append(f"free {self._number}")


def make(num_layers: int) -> tuple[WeightPrefetch, list[nn.Module], list[str]]:
    log: list[str] = []
    layers: list[nn.Module] = [nn.Identity() for _ in range(num_layers)]
    return WeightPrefetch(layers, [Weights(number, log) for number in range(num_layers)]), layers, log


def taken(log: list[str]) -> list[str]:
    found = list(log)
    log.clear()
    return found


def test_passes_bring_the_next_layer_and_free_the_last() -> None:
    in_use, layers, log = make(4)
    in_use.is_away = True
    in_use.enter(layers[:2])
    assert taken(log) == ["begin 0", "begin 1", "use 0", "use 1", "begin 2"]
    x = torch.ones(3, requires_grad=True)
    before = x * 2.0
    middle = before * 3.0
    in_use.exit(layers[:2], before, middle)
    assert taken(log) == ["free 0", "free 1"]
    in_use.enter(layers[2:])
    assert taken(log) == ["begin 2", "begin 3", "use 2", "use 3"]
    after = middle * 4.0
    in_use.exit(layers[2:], middle, after)
    assert taken(log) == ["free 2", "free 3"]
    after.sum().backward()
    assert taken(log) == [
        *("begin 2", "begin 3", "use 2", "use 3", "begin 1"),
        *("free 2", "free 3", "begin 0", "begin 1", "use 0", "use 1"),
        *("free 2", "free 3", "free 0", "free 1"),
    ]


def test_without_a_gradient_in_front_weights_stay_and_without_any_nothing_comes_back() -> None:
    in_use, layers, log = make(2)
    in_use.is_away = True
    weight = torch.ones(3, requires_grad=True)
    after = torch.ones(3) * weight
    in_use.exit(layers[:1], torch.ones(3), after)
    assert taken(log) == ["free 0"]
    after.sum().backward()
    assert taken(log) == ["free 1", "begin 0", "use 0"]
    in_use.exit(layers[:1], torch.ones(3), torch.ones(3))
    assert taken(log) == ["free 0"]


def test_weights_that_are_here_and_other_layers_are_left_alone() -> None:
    in_use, layers, log = make(2)
    in_use.enter(layers)
    in_use.exit(layers, torch.ones(1), torch.ones(1))
    in_use.is_away = True
    in_use.enter([nn.Identity()])
    in_use.exit([nn.Identity()], torch.ones(1), torch.ones(1, requires_grad=True))
    assert log == []
    others: list[nn.Module] = [nn.Identity(), nn.Identity()]
    in_use.follow(others)
    in_use.enter(others[1:])
    in_use.enter(layers[1:])
    assert log == ["begin 1", "use 1"] * 2


def test_memory_is_taken_and_given_again() -> None:
    linear = nn.Linear(3, 5)
    free_storage(linear)
    assert not any(has_memory(parameter) for parameter in linear.parameters())
    assert linear.weight.untyped_storage().nbytes() == 0
    alloc_storage(linear.weight)
    assert linear.weight.untyped_storage().nbytes() == 60
    assert has_memory(linear.weight)
    assert not has_memory(linear.bias)


def test_what_has_memory_or_needs_none_is_left_as_it_is() -> None:
    full, empty, meta = torch.full((3,), 7.0), torch.empty(0, 4), torch.empty(3, device="meta")
    for parameter in (full, empty, meta):
        assert has_memory(parameter)
        alloc_storage(parameter)
    assert full.tolist() == [7.0] * 3
    assert empty.untyped_storage().nbytes() == 0
    assert has_memory(torch.ones(1, dtype=torch.int8))
