"""Delayed scaling: histories of amax, and the scales that follow from them."""

from __future__ import annotations

import pytest
import torch

from megatron.core.model_parallel_config import Float8Config, Fp8TensorIndex
from megatron.core.ops import fp8_quantizers
from megatron.core.ops.fp8_quantizers import Float8Recipe, Float8State, Fp8Quantizers
from megatron.core.ops.fp8_tensor import E4M3, E5M2, scale_of
from megatron.core.process_group import Group, single_rank_group

WORLD = single_rank_group(("world",))
PLACE = (1, 2)


def state_after(amaxes: list[float], **config: object) -> Float8State:
    """Return the state after steps in which one operand had these amaxes."""
    state = Float8State(Float8Config(fp8_format="hybrid", **config), Fp8TensorIndex(3), "cpu")  # type: ignore[arg-type]
    for iteration, amax in enumerate(amaxes):
        state.amax[PLACE] = torch.tensor([amax, 2 * amax, 3 * amax])
        state.update(WORLD, iteration)
    return state


def expected(amax: float, margin: int = 0) -> list[float]:
    given = [(amax, E4M3), (2 * amax, E4M3), (3 * amax, E5M2)]
    return [float(scale_of(torch.tensor(each), dtype, margin)) for each, dtype in given]


@pytest.mark.parametrize(
    ("config", "amax"),
    [
        ({}, 5.0),
        ({"fp8_amax_history_len": 3}, 5.0),
        ({"fp8_amax_history_len": 3, "fp8_amax_compute_algo": "max"}, 900.0),
        ({"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"}, 40.0),
        ({"fp8_interval": 3}, 40.0e4),
    ],
)
def test_scales_follow_from_the_history(config: dict[str, object], amax: float) -> None:
    state = state_after([1.0, 7.0, 900.0, 40.0, 5.0] if amax < 1e5 else [1.0, 7.0, 900.0, 40.0e4, 5.0], **config)
    assert state.scale[PLACE].tolist() == expected(amax)
    assert state.scale[0, 0].tolist() == [1.0, 1.0, 1.0]
    assert not state.amax.any()


def test_addresses_of_scales_are_multiples_of_16_bytes() -> None:
    """On an H200 cuBLAS returned CUBLAS_STATUS_NOT_SUPPORTED for other addresses."""
    state = state_after([1.0, 7.0])
    assert {scale.data_ptr() % 16 for layer in state.scale for place in layer for scale in place} == {0}
    before = state.snapshot()
    state.scale.zero_()
    state.restore(before)
    assert state.scale[PLACE].tolist() == expected(7.0)


def test_the_history_has_the_newest_first() -> None:
    state = state_after([1.0, 7.0, 900.0, 40.0], fp8_amax_history_len=3)
    assert state.history[PLACE][0].tolist() == [40.0, 900.0, 7.0]


def test_gradients_that_are_averaged_later_are_remembered_as_averaged() -> None:
    config = Float8Config(fp8_format="hybrid")
    state = Float8State(config, Fp8TensorIndex(3), "cpu", num_averaged=4)
    state.amax[PLACE] = torch.tensor([40.0, 80.0, 120.0])
    state.update(WORLD, 0)
    assert state.history[PLACE][:, 0].tolist() == [40.0, 80.0, 30.0]
    assert state.scale[PLACE].tolist() == expected(40.0)
    other = Float8State(config, Fp8TensorIndex(3), "cpu", num_averaged=2)
    for name, values in state.tensors().items():
        other.tensors()[name].copy_(values)
    other.loaded()
    assert other.scale[PLACE][2] == state.scale[PLACE][2] / 2


def test_a_margin_leaves_powers_of_two_free() -> None:
    assert state_after([40.0], fp8_margin=2).scale[PLACE].tolist() == [4 * each for each in expected(40.0)]


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan")])
def test_a_step_that_says_nothing_leaves_the_scale(amax: float) -> None:
    assert state_after([40.0, amax]).scale[PLACE].tolist() == expected(40.0)


def test_the_first_step_scales_by_what_it_sees_and_the_next_by_that() -> None:
    config = Float8Config(fp8_format="hybrid")
    state = Float8State(config, Fp8TensorIndex(3), "cpu")
    quantizers = Fp8Quantizers(Float8Recipe.of(config), state, PLACE)

    def scale(x: torch.Tensor) -> float:
        plain, _ = quantizers.matrix("grad", x, transpose=False, records=True)
        return float(plain.scale)

    small, large = torch.full((2, 3), 1e-6), torch.full((2, 3), 1e6)
    assert scale(small) == float(scale_of(torch.tensor(1e-6), E5M2))
    state.update(WORLD, 0)
    assert scale(large) == float(scale_of(torch.tensor(1e-6), E5M2))
    state.update(WORLD, 1)
    assert scale(small) == float(scale_of(torch.tensor(1e6), E5M2))


def test_evaluation_is_not_remembered() -> None:
    config = Float8Config(fp8_format="hybrid")
    state = Float8State(config, Fp8TensorIndex(3), "cpu")
    quantizers = Fp8Quantizers(Float8Recipe.of(config), state, PLACE)
    quantizers.matrix("input", torch.ones(2, 3), transpose=False, records=False)
    quantizers.weight(torch.ones(2, 3), transpose=False, records=False, scale=None)
    assert not state.amax.any()


def test_a_state_goes_back_to_its_snapshot() -> None:
    state = state_after([1.0, 7.0], fp8_amax_history_len=3)
    state.amax[PLACE] = 3.0
    before = state.snapshot()
    kept = [each.clone() for each in before]
    state.update(WORLD, 2)
    state.restore(before)
    for restored, value in zip((state.amax, state.scale, state.expected, state.history), kept, strict=True):
        assert torch.equal(restored, value)


OTHER_AMAX = 48.0
"""The largest value that another rank has."""


@pytest.fixture
def _another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, group: Group, operation: str) -> None:
        assert operation == "max"
        tensor.clamp_(min=OTHER_AMAX)

    monkeypatch.setattr(fp8_quantizers, "all_reduce", all_reduce)
    monkeypatch.setattr(fp8_quantizers, "all_reduce", all_reduce)


@pytest.mark.usefixtures("_another_rank")
def test_the_history_has_the_largest_amax_of_all_ranks() -> None:
    assert state_after([5.0]).history[PLACE][:, 0].tolist() == [OTHER_AMAX] * 3


@pytest.mark.usefixtures("_another_rank")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_ranks_share_a_scale_where_they_hold_parts_of_what_it_scales(recipe: str) -> None:
    """A transposed row lies on all ranks of a sequence-parallel group, a block of 128 on one."""
    quantizers = Fp8Quantizers(Float8Recipe.of(Float8Config(fp8_format="e4m3", fp8_recipe=recipe)))
    x = torch.ones(128, 128)
    _, shared = quantizers.matrix("input", x, transpose=True, records=False, group=WORLD)
    _, own = quantizers.matrix("input", x, transpose=True, records=False)
    assert shared is not None
    assert own is not None
    assert torch.equal(own.scale, scale_of(torch.ones_like(own.scale), E4M3))
    seen = 1.0 if recipe == "blockwise" else OTHER_AMAX
    assert torch.equal(shared.scale, scale_of(torch.full_like(own.scale, seen), E4M3))


@pytest.mark.parametrize(
    ("recipe", "turns", "keeps_weight_scale"),
    [
        ("delayed", True, True),
        ("tensorwise", True, True),
        ("rowwise", False, False),
        ("blockwise", False, True),
        ("mxfp8", False, False),
    ],
)
def test_what_a_recipe_shares_with_the_transpose(recipe: str, turns: bool, keeps_weight_scale: bool) -> None:
    for has_weight_gradients in (True, False):
        config = Float8Config(fp8_format="hybrid", fp8_recipe=recipe, fp8_wgrad=has_weight_gradients)
        quantizers = Fp8Quantizers(Float8Recipe.of(config))
        assert (quantizers.turns, quantizers.keeps_weight_scale) == (turns, keeps_weight_scale)
        assert quantizers.gathers_gradients == (turns and has_weight_gradients)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"fp8_hybrid": True}, "hybrid"),
        ({"fp8_e4m3": True}, "e4m3"),
        ({"fp8_format": "e4m3"}, "e4m3"),
        ({"fp8_format": "e4m3", "fp8_hybrid": True}, "e4m3"),
    ],
)
def test_older_flags_name_the_format(options: dict[str, object], expected: str | None) -> None:
    assert Float8Config(**options).fp8_format == expected  # type: ignore[arg-type]


def test_the_layers_in_fp8() -> None:
    assert not Float8Config().float8_layers(8)
    assert Float8Config(fp8_format="e4m3").float8_layers(8) == range(8)
    ends = Float8Config(
        fp8_format="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1
    )
    # Layers behind the model's, as multi-token prediction has them, are in fp8 too.
    assert [number for number in range(10) if ends.is_in_float8(number, 8)] == [2, 3, 4, 5, 6, 8, 9]
    assert not any(Float8Config().is_in_float8(number, 8) for number in range(10))
