"""Named random streams: where they differ, that they can be put back, and that nothing else is disturbed."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device import Device
from megatron.core.parallel_sizes import ONE_RANK
from megatron.core.tensor_parallel.random import REPLICATED, TENSOR_PARALLEL, RngStreams, stream_seed


def streams(seed: int = 5, **place: int) -> RngStreams:
    return RngStreams(Device("cpu"), seed, {**ONE_RANK.place(), **place})


def draw(rng: RngStreams, stream: str, count: int = 8) -> torch.Tensor:
    with rng.fork(stream):
        return torch.rand(count)


@pytest.mark.parametrize("axis", ["tp", "dp", "cp", "pp"])
def test_streams_differ_over_the_ranks_that_they_must(axis: str) -> None:
    replicated = [draw(streams(**{axis: rank}), REPLICATED) for rank in (0, 1, 2)]
    parallel = [draw(streams(**{axis: rank}), TENSOR_PARALLEL) for rank in (0, 1, 2)]
    pairs = ((0, 1), (0, 2), (1, 2))
    assert all(torch.equal(replicated[a], replicated[b]) == (axis == "tp") for a, b in pairs)
    assert not any(torch.equal(parallel[a], parallel[b]) for a, b in pairs)
    assert not any(torch.equal(a, b) for a in replicated for b in parallel)


def test_streams_are_a_function_of_the_seed() -> None:
    assert torch.equal(draw(streams(), REPLICATED), draw(streams(), REPLICATED))
    assert not torch.equal(draw(streams(5), REPLICATED), draw(streams(6), REPLICATED))


def test_seeds_fit_a_generator_and_do_not_meet() -> None:
    places = [(pp, dp, cp) for pp in range(4) for dp in range(4) for cp in range(4)]
    seeds = {stream_seed(5, stream, place) for stream in (REPLICATED, TENSOR_PARALLEL) for place in places}
    seeds |= {stream_seed(5, TENSOR_PARALLEL, (*place, tp)) for place in places for tp in range(4)}
    assert len(seeds) == 64 * 2 + 256
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_default_generator_starts_equal_on_every_rank() -> None:
    drawn = []
    for tp_rank in range(3):
        streams(tp=tp_rank, dp=tp_rank)
        drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


def test_fork_continues_its_stream_and_leaves_the_default_one() -> None:
    whole = draw(streams(), REPLICATED, 16)
    rng = streams()
    torch.manual_seed(1)
    outside = torch.rand(4)
    torch.manual_seed(1)
    parts = [torch.rand(2)]
    first = draw(rng, REPLICATED)
    parts.append(torch.rand(2))
    draw(rng, TENSOR_PARALLEL)
    second = draw(rng, REPLICATED)
    assert torch.equal(torch.cat((first, second)), whole)
    assert torch.equal(torch.cat(parts), outside)


def test_forks_nest() -> None:
    expected = draw(streams(), REPLICATED, 16)
    rng = streams()
    with rng.fork(REPLICATED):
        first = torch.rand(8)
        with rng.fork(TENSOR_PARALLEL):
            inner = torch.rand(8)
        second = torch.rand(8)
    assert torch.equal(torch.cat((first, second)), expected)
    assert torch.equal(inner, draw(streams(), TENSOR_PARALLEL))


def test_fork_is_left_in_order_by_an_error() -> None:
    rng = streams()
    torch.manual_seed(1)
    before = torch.get_rng_state()

    def fail() -> None:
        with rng.fork(REPLICATED):
            torch.rand(8)
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draw(rng, REPLICATED), draw(streams(), REPLICATED, 16)[8:])


def test_state_round_trip() -> None:
    rng = streams()
    draw(rng, REPLICATED, 3)
    draw(rng, TENSOR_PARALLEL, 5)
    torch.rand(2)
    states = {name: state.clone() for name, state in rng.state_dict().items()}
    expected = [draw(rng, REPLICATED), draw(rng, TENSOR_PARALLEL), torch.rand(3)]
    other = streams(99, tp=3)
    other.load_state_dict(states)
    actual = [draw(other, REPLICATED), draw(other, TENSOR_PARALLEL), torch.rand(3)]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_state_taken_before_is_not_changed_by_drawing() -> None:
    rng = streams()
    states = rng.state_dict()
    kept = {name: state.clone() for name, state in states.items()}
    draw(rng, REPLICATED)
    torch.rand(3)
    assert all(torch.equal(states[name], kept[name]) for name in kept)


def test_streams_go_on_or_start_anew_at_another_place() -> None:
    before = streams(tp=1)
    beginning = draw(streams(), TENSOR_PARALLEL)
    draw(before, REPLICATED)
    state = before.state_dict()
    expected = draw(before, REPLICATED)

    def resumed(iteration: int, **ranks: int) -> RngStreams:
        rng = streams(**ranks)
        outer = torch.get_rng_state()
        rng.resume({REPLICATED: state[REPLICATED]}, iteration)
        assert torch.equal(torch.get_rng_state(), outer)
        return rng

    assert torch.equal(draw(resumed(10), REPLICATED), expected)
    anew = [draw(resumed(*place), TENSOR_PARALLEL) for place in ((10,), (11,))]
    anew.append(draw(resumed(10, tp=1), TENSOR_PARALLEL))
    assert torch.equal(anew[0], draw(resumed(10), TENSOR_PARALLEL))
    different = [*anew, beginning]
    assert not any(torch.equal(a, b) for i, a in enumerate(different) for b in different[:i])


def test_replay_draws_the_same_again_and_leaves_no_trace() -> None:
    rng = streams()
    states = rng.state_dict()
    first = [draw(rng, REPLICATED), torch.rand(3), draw(rng, TENSOR_PARALLEL)]
    after = {name: state.clone() for name, state in rng.state_dict().items()}
    with rng.replay(states):
        again = [draw(rng, REPLICATED), torch.rand(3), draw(rng, TENSOR_PARALLEL)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    now = rng.state_dict()
    assert all(torch.equal(now[name], after[name]) for name in after)
