"""The seed of dropout in ring attention: from the host's own copy of a CUDA generator's state."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.core.context_parallel.ring_attention import draw_seed
from megatron.core.device import Device


def test_a_seed_is_drawn_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has no value that could be waited for."""
    states = [torch.tensor(state, dtype=torch.uint8) for state in ([1, 2, 0, 0], [1, 2, 4, 0], [1, 2, 0, 0])]
    given = iter(states)
    monkeypatch.setattr(Device, "get_rng_state", lambda self: next(given))
    with FakeTensorMode(allow_non_fake_inputs=True):
        first, second, third = (draw_seed(torch.device("cuda")) for _ in states)
    assert first == third != second
    assert 0 <= first < 2**62


def test_on_a_cpu_it_is_a_draw_of_the_default_generator() -> None:
    torch.manual_seed(5)
    expected = int(torch.randint(2**62, ()))
    torch.manual_seed(5)
    assert draw_seed(torch.device("cpu")) == expected
