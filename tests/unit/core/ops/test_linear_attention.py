"""Chunked forms of linear attention against their recurrent forms, in float64: results, states and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.linear_attention import (
    causal_convolution,
    chunks,
    convolution,
    document_starts_of,
    gated_delta_rule,
    gated_delta_rule_of_segments,
    recurrent_causal_convolution,
    recurrent_gated_delta_rule,
    recurrent_selective_scan,
    selective_scan,
    selective_scan_of_segments,
)

Operator = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
STRENGTHS = (0.01, 1.0, 20.0, 300.0)
"""Of decays, from almost none to some that leave nothing of a state."""
FORMS: dict[str, tuple[Operator, Operator]] = {
    "gated delta rule": (gated_delta_rule, recurrent_gated_delta_rule),
    "kimi delta attention": (gated_delta_rule, recurrent_gated_delta_rule),
    "selective scan": (selective_scan, recurrent_selective_scan),
    "causal convolution": (
        partial(causal_convolution, silu=True),
        partial(recurrent_causal_convolution, silu=True),
    ),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def size(limit: int, least: int = 1) -> int:
    return int(torch.randint(least, limit + 1, ()))


def make_arguments(name: str, positions: int, strength: float) -> dict[str, torch.Tensor]:
    """Draw the arguments of an operator, with an initial state and without documents."""
    batch, dim, other = size(3), size(8), size(8)
    if name == "causal convolution":
        width = size(4, least=2)
        state = draw(batch, width - 1, dim)
        return {"x": draw(batch, positions, dim), "weight": draw(dim, width), "bias": draw(dim), "initial_state": state}
    if name == "selective scan":
        groups, heads_per_group = size(3), size(3)
        heads = groups * heads_per_group
        return {
            "x": draw(batch, positions, heads, dim),
            "dt": draw(batch, positions, heads).exp() / 3,
            "A": -strength * torch.rand(heads, dtype=torch.float64),
            "B": draw(batch, positions, groups, other),
            "C": draw(batch, positions, groups, other),
            "D": draw(heads),
            "initial_state": draw(batch, heads, dim, other),
        }
    heads = size(3)
    decays = (batch, positions, heads, dim) if name == "kimi delta attention" else (batch, positions, heads)
    return {
        "q": draw(batch, positions, heads, dim),
        "k": F.normalize(draw(batch, positions, heads, dim), dim=-1),
        "v": draw(batch, positions, heads, other),
        "log_decay": -strength * torch.rand(decays, dtype=torch.float64) ** 3,
        # 0 leaves the state alone, and more than 1 reflects it.
        "beta": 1.5 * torch.rand(batch, positions, heads, dtype=torch.float64) * (torch.rand(1) > 0.2),
        "initial_state": draw(batch, heads, dim, other),
    }


def results(operator: Operator, arguments: dict[str, torch.Tensor], **settings: Any) -> dict[str, torch.Tensor]:
    """Return the output, the last state, and the gradients of a fixed random function of both."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
    output, state = operator(**leaves, **settings, return_state=True)
    assert state is not None
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (output, state)]
    grads = torch.autograd.grad((output, state), list(leaves.values()), weights)
    return {"output": output.detach(), "state": state.detach(), **dict(zip(leaves, grads))}


def compare(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        error = float((actual[name] - value).abs().max())
        assert error <= tolerance * max(1.0, float(value.abs().max())), (name, error)


@pytest.mark.default(16)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(12))
def test_chunks_have_the_results_and_gradients_of_the_recurrence(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    monkeypatch.setattr(chunks, "_SLAB_ELEMENTS", [1, 500, 1 << 18][seed % 3])
    monkeypatch.setattr(convolution, "_PART_ELEMENTS", [1, 40, 1 << 18][seed % 3])
    positions = [1, 2, 33, 40][seed] if seed < 4 else size(45)
    arguments = make_arguments(name, positions, STRENGTHS[seed % 4])
    batch = next(iter(arguments.values())).shape[0]
    starts = torch.rand(batch, positions) < 0.15 if seed % 3 else None
    settings = {} if name == "causal convolution" else {"chunk_size": 2 ** size(6, least=0)}
    chunked, recurrent = FORMS[name]
    compare(
        results(chunked, arguments, document_starts=starts, **settings),
        results(recurrent, arguments, document_starts=starts),
    )


OF_SEGMENTS = {
    "gated delta rule": gated_delta_rule_of_segments,
    "kimi delta attention": gated_delta_rule_of_segments,
    "selective scan": selective_scan_of_segments,
}


def states_of_zero(states: torch.Tensor, transitions: torch.Tensor, num_segments: int) -> torch.Tensor:
    """Return the states before segments, which are in the batch in the order of the sequence."""
    found = [torch.zeros_like(states[: len(states) // num_segments])]
    for after, through in zip(states.chunk(num_segments), transitions.chunk(num_segments)):
        found.append(after + (through * found[-1] if through.shape[-1] == 1 else through @ found[-1]))
    return torch.cat(found[:-1])


@pytest.mark.parametrize("name", OF_SEGMENTS)
@pytest.mark.parametrize("seed", range(6))
def test_segments_have_the_results_and_gradients_of_the_recurrence(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    num_segments, length = [2, 4, 8][seed % 3], [70, 3, 9][seed % 3]
    arguments = make_arguments(name, num_segments * length, STRENGTHS[seed % 4])
    del arguments["initial_state"]
    batch = next(iter(arguments.values())).shape[0]
    starts = torch.rand(batch, num_segments * length) < 0.1 if seed % 2 else None
    if starts is not None:
        starts[0] = False
    leaves = {key: value.requires_grad_() for key, value in arguments.items()}
    expected, _ = FORMS[name][1](**leaves, document_starts=starts)
    segments = {
        key: torch.cat(value.chunk(num_segments, dim=1)) if value.dim() > 1 else value for key, value in leaves.items()
    }
    of_segments = None if starts is None else torch.cat(starts.chunk(num_segments, dim=1))
    found = OF_SEGMENTS[name](*segments.values(), of_segments, partial(states_of_zero, num_segments=num_segments))
    found = torch.cat(found.chunk(num_segments), dim=1)
    weights = draw(*found.shape)
    compare(
        {"output": found.detach(), **dict(zip(leaves, torch.autograd.grad(found, list(leaves.values()), weights)))},
        {
            "output": expected.detach(),
            **dict(zip(leaves, torch.autograd.grad(expected, list(leaves.values()), weights))),
        },
    )


@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_chunks_are_those_of_finite_differences(name: str) -> None:
    torch.manual_seed(21)
    arguments = make_arguments(name, 6, 1.0)
    starts = torch.rand(next(iter(arguments.values())).shape[0], 6) < 0.2
    chunked = FORMS[name][0] if name == "causal convolution" else partial(FORMS[name][0], chunk_size=4)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return chunked(**dict(zip(arguments, values)), document_starts=starts, return_state=True)

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in arguments.values()])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("cut", [1, 2, 16, 29])
def test_two_parts_with_the_state_between_them_are_one_sequence(name: str, cut: int) -> None:
    torch.manual_seed(22)
    positions = 30
    arguments = make_arguments(name, positions, 1.0)
    starts = torch.rand(next(iter(arguments.values())).shape[0], positions) < 0.1
    chunked = FORMS[name][0] if name == "causal convolution" else partial(FORMS[name][0], chunk_size=8)

    def in_two_parts(**values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        outputs, state = [], values["initial_state"]
        for part in (slice(None, cut), slice(cut, None)):
            cut_values = {
                key: x[:, part] if key not in ("A", "D", "weight", "bias", "initial_state", "return_state") else x
                for key, x in values.items()
            }
            output, state = chunked(**{**cut_values, "initial_state": state})
            outputs.append(output)
        return torch.cat(outputs, dim=1), state

    compare(
        results(in_two_parts, arguments, document_starts=starts), results(chunked, arguments, document_starts=starts)
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_document_leaks_nothing_into_the_next(name: str) -> None:
    torch.manual_seed(23)
    arguments = make_arguments(name, 40, 0.01)
    ids = (torch.arange(40) >= 21).long().expand(next(iter(arguments.values())).shape[0], -1)
    starts = document_starts_of(ids)
    assert starts.nonzero()[:, 1].unique().tolist() == [21]
    without_positions = ("A", "D", "weight", "bias")
    changed = {
        key: x if key in without_positions else torch.cat((x[:, :21] + 1.0, x[:, 21:]), dim=1)
        for key, x in arguments.items()
    }
    changed["initial_state"] = arguments["initial_state"] + 1.0
    # Decays of an earlier document in the chunk change how sums of logarithms are rounded, and nothing else.
    decays = {key: x for key, x in arguments.items() if key in ("dt", "log_decay")}
    output, state = FORMS[name][0](**arguments, document_starts=starts, return_state=True)
    for values, is_exact in ((changed | decays, True), (changed, not decays)):
        other, other_state = FORMS[name][0](**values, document_starts=starts, return_state=True)
        assert not torch.equal(output[:, :21], other[:, :21])
        tolerance = {"rtol": 0.0, "atol": 0.0 if is_exact else 1e-13}
        torch.testing.assert_close(other[:, 21:], output[:, 21:], **tolerance)
        torch.testing.assert_close(other_state, state, **tolerance)


@pytest.mark.parametrize("name", FORMS)
def test_low_precision_is_that_of_the_inputs_and_the_output_alone(name: str) -> None:
    torch.manual_seed(24)
    arguments = {key: x.bfloat16() for key, x in make_arguments(name, 70, 1.0).items()}
    actual = results(FORMS[name][0], arguments)
    expected = results(FORMS[name][1], {key: x.double() for key, x in arguments.items()})
    assert actual["state"].dtype == torch.float32
    compare({"state": actual.pop("state").double()}, {"state": expected.pop("state")}, 1e-5)
    assert {x.dtype for x in actual.values()} == {torch.bfloat16}
    # The weights of the random function are rounded too.
    compare({key: x.double() for key, x in actual.items()}, expected, 2**-6)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "causal convolution"])
def test_strong_decays_are_finite_in_float32(name: str) -> None:
    torch.manual_seed(25)
    arguments = make_arguments(name, 130, 1.0)
    for key in ("log_decay", "A"):
        if key in arguments:
            arguments[key] *= 1e4
    actual = results(FORMS[name][0], {key: x.float() for key, x in arguments.items()})
    assert all(x.isfinite().all() for x in actual.values())
    expected = results(FORMS[name][1], arguments)
    # Sums of the logarithms of such decays in a chunk reach thousands.
    compare({"output": actual["output"].double()}, {"output": expected["output"]}, 1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_inputs_and_states_are_all_that_is_saved(name: str) -> None:
    torch.manual_seed(26)
    arguments = make_arguments(name, 200, 1.0)
    leaves = [x.requires_grad_() for x in arguments.values()]
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: torch.empty(0)):
        FORMS[name][0](**arguments)
    inputs = {x.data_ptr() for x in leaves}
    others = [x for x in saved if x.data_ptr() not in inputs]
    if name == "causal convolution":
        assert not others
    else:
        # One state per chunk of 64 positions, and the last one.
        assert [x.numel() for x in others] == [5 * arguments["initial_state"].numel()]


def test_a_chunk_size_that_is_no_power_of_two_is_rejected() -> None:
    arguments = make_arguments("gated delta rule", 9, 1.0)
    with pytest.raises(ValueError, match="chunk_size is 48, but must be a power of two"):
        gated_delta_rule(**arguments, chunk_size=48)
