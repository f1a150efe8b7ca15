"""Torch's own generator in a run, seeds by name, and the samples that dropout falls back to."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device import Device
from megatron.core.model_parallel_config import ONE_RANK
from megatron.core.tensor_parallel.random import DEFAULT, RngStreams, stream_seed


def streams(seed: int = 5, **place: int) -> RngStreams:
    return RngStreams(Device("cpu"), seed, {**ONE_RANK.place(), **place})


def test_seeds_fit_a_generator_and_do_not_meet() -> None:
    places = [(pp, dp, cp) for pp in range(4) for dp in range(4) for cp in range(4)]
    seeds = {stream_seed(5, stream, place) for stream in ("sampling", "request") for place in places}
    seeds |= {stream_seed(5, "request", (*place, tp)) for place in places for tp in range(4)}
    assert len(seeds) == 64 * 2 + 256
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_default_generator_starts_equal_on_every_rank() -> None:
    drawn = []
    for tp_rank in range(3):
        streams(tp=tp_rank, dp=tp_rank)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp"])
def test_drawn_samples_differ_over_data_parallel_ranks_alone(axis: str) -> None:
    device = torch.device("cpu")
    states = [streams(**{axis: rank}).draw_dropout_samples(3, device).states for rank in (0, 1)]
    assert torch.equal(*states) == (axis != "dp")
    rng = streams()
    first, second = (rng.draw_dropout_samples(3, device).states for _ in range(2))
    assert len({*first.tolist(), *second.tolist()}) == 6


def test_the_default_generator_goes_on_or_starts_anew() -> None:
    rng = streams()
    torch.rand(2)
    states = {name: state.clone() for name, state in rng.state_dict().items()}
    assert list(states) == [DEFAULT]
    expected = torch.rand(3)
    streams(99, tp=3).resume(states, 10)
    assert torch.equal(torch.rand(3), expected)
    anew = []
    for iteration in (10, 11, 10):
        streams().resume({"an older checkpoint's": torch.zeros(3)}, iteration)
        anew.append(torch.rand(3))
    assert torch.equal(anew[0], anew[2])
    assert not torch.equal(anew[0], anew[1])
