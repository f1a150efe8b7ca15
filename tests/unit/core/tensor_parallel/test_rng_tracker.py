"""RNG states by name, and recomputation that frees its output, in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    CudaRNGStatesTracker,
    checkpoint,
    convert_cuda_rng_state,
    get_cuda_rng_tracker,
    initialize_rng_tracker,
)
from megatron.core.tensor_parallel.random import get_all_rng_states, is_graph_safe_cuda_rng_tracker


@pytest.fixture(autouse=True)
def _fresh_tracker():
    with torch.random.fork_rng():
        initialize_rng_tracker(force_reset=True)
        yield
        initialize_rng_tracker(force_reset=True)


def test_states_are_added_set_and_reset() -> None:
    tracker = CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    outer = torch.get_rng_state()
    tracker.add("first", 7)
    assert tracker.is_initialized()
    assert torch.equal(torch.get_rng_state(), outer)
    assert torch.equal(tracker.get_states()["first"], torch.Generator().manual_seed(7).get_state())
    with pytest.raises(RuntimeError, match="seed 7 already exists"):
        tracker.add("second", 7)
    with pytest.raises(RuntimeError, match="cuda rng state first already exists"):
        tracker.add("first", 8)
    states = tracker.get_states()
    tracker.reset()
    assert tracker.get_states() == {}
    tracker.set_states(states)
    assert tracker.get_states().keys() == {"first"}
    with pytest.raises(RuntimeError, match="use_cudagraphable_rng"):
        CudaRNGStatesTracker(use_cudagraphable_rng=True)


def test_nested_states_keep_their_progress() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("outer", 1)
    tracker.add("inner", 2)
    torch.manual_seed(3)
    with tracker.fork("outer"):
        a = torch.rand(1)
        with tracker.fork("inner"):
            b = torch.rand(1)
        c = torch.rand(1)
    with tracker.fork("inner"):
        d = torch.rand(1)
    e = torch.rand(1)
    expected = [torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2, 3)]
    assert [[a.item(), c.item()], [b.item(), d.item()]] == expected[:2]
    assert e.item() == expected[2][0]
    with pytest.raises(RuntimeError, match="cuda rng state missing is not added"), tracker.fork("missing"):
        pass


def test_the_process_has_one_tracker_until_it_is_replaced() -> None:
    tracker = get_cuda_rng_tracker()
    assert get_cuda_rng_tracker() is tracker
    tracker.add("a", 1)
    assert get_all_rng_states().keys() == {"a"}
    assert not is_graph_safe_cuda_rng_tracker(tracker)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    inference = get_cuda_rng_tracker()
    inference.add("a", 1)
    before = torch.get_rng_state()
    with inference.fork():
        assert torch.equal(torch.get_rng_state(), before)
    assert inference.get_states() == {}


def test_states_are_tensors_or_generators() -> None:
    state = torch.Generator().manual_seed(5).get_state()
    generator = convert_cuda_rng_state(state, to_graphable=True)
    assert isinstance(generator, torch.Generator)
    assert convert_cuda_rng_state(generator, to_graphable=True) is generator
    assert torch.equal(convert_cuda_rng_state(generator), state)
    assert convert_cuda_rng_state(state) is state
    with pytest.raises(ValueError, match="Invalid state type"):
        convert_cuda_rng_state([1])


def test_recomputation_without_groups_and_its_limits() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    assert torch.equal(checkpoint(add, None, torch.ones(8), 2 * torch.ones(8)), 3 * torch.ones(8))
    first = torch.ones(4, 4)
    checkpoint(add, True, first, torch.ones(4, 4))
    assert torch.equal(first, torch.ones(16))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"not compatible with \.grad"):
        torch.autograd.grad(checkpoint(add, False, x, x).sum(), x)


def test_the_output_is_freed_until_the_backward_pass() -> None:
    torch.manual_seed(9)
    x = torch.randn(4, 4)

    def dropped(value: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(value), 0.5)

    def run(frees: bool) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(10)
        leaf = x.clone().requires_grad_()
        saved = CheckpointWithoutOutput()
        hidden = saved.checkpoint(dropped, leaf) if frees else dropped(leaf)
        output = hidden * leaf
        if frees:
            saved.discard_output_and_register_recompute(output)
            assert hidden.untyped_storage().nbytes() == 0
        output.backward(torch.arange(16.0).view(4, 4))
        assert leaf.grad is not None
        return output.detach(), leaf.grad

    for expected, found in zip(run(False), run(True), strict=True):
        assert torch.equal(found, expected)
