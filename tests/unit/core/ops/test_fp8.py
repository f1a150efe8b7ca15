"""Matrices in fp8: scales, rounding, products against float64, and delayed scaling by histories of amax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType

from megatron.core.ops import fp8_quantizers, triton_support
from megatron.core.ops import fp8_tensor as fp8_tensor_module
from megatron.core.ops.fp8_quantizers import Float8Recipe, Float8State, Fp8Quantizers, weights_kept
from megatron.core.ops.fp8_tensor import (
    E4M3,
    E5M2,
    ROWS,
    SEGMENTS_OF_32,
    SEGMENTS_OF_128,
    SQUARES_OF_128,
    WHOLE,
    Blocks,
    Quantized,
    amax_of,
    device_product,
    has_scaled_products,
    quantize,
    quantize_whole,
    scale_of,
    scaled_product,
    swizzled,
)
from megatron.core.parallel_config import Fp8Config, Fp8TensorIndex
from megatron.core.process_group import Group, single_rank_group

RECIPES = {
    "tensorwise": (WHOLE, WHOLE),
    "rowwise": (ROWS, ROWS),
    "blockwise": (SEGMENTS_OF_128, SQUARES_OF_128),
    "mxfp8": (SEGMENTS_OF_32, SEGMENTS_OF_32),
}
SHAPES = [(48, 256, 144), (16, 144, 80)]


def operands(recipe: str, shape: tuple[int, int, int], left_dtype: torch.dtype) -> tuple[Quantized, Quantized]:
    torch.manual_seed(3)
    rows, inner, columns = shape
    sizes = torch.logspace(-4, 4, rows).unsqueeze(1)
    left, right = torch.randn(rows, inner) * sizes, torch.randn(columns, inner)
    blocks, weight_blocks = RECIPES[recipe]
    return quantize(left.bfloat16(), left_dtype, blocks), quantize(right.bfloat16(), E4M3, weight_blocks)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_quantized_operands(
    recipe: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    left, right = operands(recipe, shape, dtype)
    expected = left.values(torch.float64) @ right.values(torch.float64).t()
    result = scaled_product(left, right, torch.float32).double()
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()
    bias = torch.randn(shape[2])
    with_bias = scaled_product(left, right, torch.float32, bias).double()
    assert (with_bias - expected - bias).abs().max() <= 1e-5 * expected.abs().max()


def test_a_cpu_multiplies_numbers_in_float32_though_it_has_products_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_scaled_products(WHOLE, WHOLE, "cpu")
    assert not has_scaled_products(SEGMENTS_OF_32, SEGMENTS_OF_32, "cpu")
    monkeypatch.setattr(fp8_tensor_module, "device_product", lambda *given: pytest.fail("a GEMM of the device"))
    assert scaled_product(*operands("tensorwise", SHAPES[0], E4M3), torch.float32).shape == (48, 144)


@pytest.mark.parametrize(
    ("left_size", "right_size", "expected"), [(256, 256, True), (256, 200, False), (200, 256, False), (200, 200, False)]
)
def test_a_device_is_given_whole_blocks_only(
    monkeypatch: pytest.MonkeyPatch, left_size: int, right_size: int, expected: bool
) -> None:
    monkeypatch.setattr(fp8_tensor_module, "_probed", lambda *given: True)
    left, right = (quantize(torch.ones(128, size), E4M3, SEGMENTS_OF_128) for size in (left_size, right_size))
    assert fp8_tensor_module._has_scaled_product(left, right) is expected


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_scales_are_given_to_torch_in_the_form_that_it_asks_for(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    given: list[Any] = []

    def multiply(
        *, input: torch.Tensor, mat2: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert input.is_contiguous()
        assert mat2.t().is_contiguous()
        given[:] = [scale_a, scale_b, out_dtype]
        return (input.float() @ mat2.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    left, right = operands(recipe, (32, 256, 16), E4M3)
    assert device_product(left, right, torch.float32).dtype == torch.float32
    expected = {
        "tensorwise": [left.scale[0, 0], right.scale[0, 0], torch.float32],
        "rowwise": [left.scale, right.scale.t(), torch.float32],
        # Its products are in bfloat16.
        "mxfp8": [*(swizzled(each.scale.to(torch.float8_e8m0fnu)) for each in (left, right)), torch.bfloat16],
    }[recipe]
    assert given.pop() == expected.pop()
    for ours, theirs in zip(given, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize(("on_triton", "casts"), [(False, True), (True, False)])
def test_torch_casts_where_there_is_no_program_for_it(
    monkeypatch: pytest.MonkeyPatch, on_triton: bool, casts: bool
) -> None:
    monkeypatch.setattr(triton_support, "runs_on_triton", lambda x: on_triton)
    monkeypatch.setattr(triton_support, "casts_to_float8", lambda device: casts)
    x = torch.randn(6, 10)
    plain, _ = quantize_whole(x, E4M3, torch.ones(1, 1), None, transpose=False)
    assert plain is not None
    assert torch.equal(plain.values(), quantize(x, E4M3, WHOLE, torch.ones(1, 1)).values())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torch_has_the_same_products_on_a_cpu(recipe: str) -> None:
    left, right = operands(recipe, (32, 48, 16), E5M2)
    expected = left.values(torch.float64) @ right.values(torch.float64).t()
    result = device_product(left, right, torch.float32).double()
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_device_writes_the_result_of_its_gemm_to_a_given_matrix(recipe: str) -> None:
    left, right = operands(recipe, (32, 48, 16), E5M2)
    out = torch.full((32, 16), torch.nan)
    assert device_product(left, right, torch.float32, out=out) is out
    assert torch.equal(out, device_product(left, right, torch.float32))


def test_a_rounded_result_is_not_written_to_a_float32_matrix() -> None:
    # On the CPU the GEMM of MX blocks is missing, so only the shapes are computed.
    left, right = (
        Quantized(each.data.to("meta"), each.scale.to("meta"), each.blocks)
        for each in operands("mxfp8", (128, 128, 128), E4M3)
    )
    out = torch.empty(128, 128, device="meta")
    result = device_product(left, right, torch.float32, narrow=True, out=out)
    assert result is not out
    assert result.dtype == torch.bfloat16


def product_of_squares_as_cublas_reads_it(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor
) -> torch.Tensor:
    """Multiply as cuBLAS does: it is told no distances, and takes those of scales for what its manual asks for."""
    (rows, inner), columns = left.shape, right.shape[1]
    blocks = -(-inner // 128)
    of_left = left_scale.as_strided((rows, blocks), (1, rows))
    of_right = right_scale.as_strided((-(-columns // 128), blocks), (-(-blocks // 4) * 4, 1))
    wide = of_left.double().repeat_interleave(128, 1)[:, :inner] * left.double()
    squares = of_right.double().repeat_interleave(128, 1).repeat_interleave(128, 0)[:columns, :inner]
    return wide @ (squares * right.t().double()).t()


@pytest.mark.parametrize("blocks", [1, 2, 4, 5, 86])
def test_scales_of_squares_lie_where_cublas_looks_for_them(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    left, right = operands("blockwise", (32, 128 * blocks, 384), E5M2)
    expected = left.values(torch.float64) @ right.values(torch.float64).t()

    def unnamed(a: Any, b: Any, left_scale: Any, right_scale: Any, out_dtype: torch.dtype) -> torch.Tensor:
        return product_of_squares_as_cublas_reads_it(a, b, left_scale, right_scale)

    def named(a: Any, b: Any, left_scale: Any, by: Any, right_scale: Any, to: Any, **options: Any) -> torch.Tensor:
        sizes = right_scale.shape, right_scale.stride()
        filled = -(-blocks // 4) * 4
        assert sizes == ((filled, 3), (1, filled))
        assert (by, to) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
        return product_of_squares_as_cublas_reads_it(a, b, left_scale, right_scale)

    monkeypatch.setattr(torch, "_scaled_mm", unnamed)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", named)
    result = device_product(left, right, torch.float64)
    assert (result - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("blocks", [1, 2, 4, 5])
def test_torchs_own_rules_for_squares_are_kept(blocks: int) -> None:
    left, right = (
        Quantized(each.data.to("meta"), each.scale.to("meta"), each.blocks)
        for each in operands("blockwise", (32, 128 * blocks, 384), E4M3)
    )
    assert device_product(left, right, torch.float32).shape == (32, 384)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_is_the_smallest_power_of_two_that_suffices(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    amax = torch.cat((torch.logspace(-12, 12, 97), limit * torch.tensor([1.0, 0.5, 2.0, 1.25])))
    scale = scale_of(amax, dtype)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    assert torch.all(amax / scale <= limit)
    assert torch.all(amax / (scale / 2) > limit)
    assert torch.equal(scale_of(amax, dtype, margin=3), 8 * scale)
    odd = scale_of(torch.tensor([0.0, torch.inf, torch.nan]), dtype)
    assert odd[0] == 1
    assert odd[1:].isnan().all()


def test_numbers_round_alike_at_every_scale() -> None:
    x = torch.randn(32, 48)
    expected = quantize(x, E4M3, WHOLE).values()
    for factor in (2.0**-20, 2.0**20):
        assert torch.equal(quantize(x * factor, E4M3, WHOLE).values(), expected * factor)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_out_of_range_is_cut_off_and_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e30, -1e30, 1.0, torch.inf, -torch.inf, torch.nan]])
    values = quantize(x, dtype, WHOLE, torch.ones(1, 1)).values()[0]
    limit = torch.finfo(dtype).max
    assert values[:3].tolist() == [limit, -limit, 1.0]
    assert values[3:].isnan().all()
    assert quantize(x, dtype, WHOLE).values().isnan().any()


@pytest.mark.parametrize("blocks", [Blocks(2, 3), Blocks(1, 4), Blocks(0, 3), Blocks(3, 0)])
def test_blocks_cut_off_at_the_edges_have_scales_of_their_own(blocks: Blocks) -> None:
    x = torch.randn(5, 7) * torch.logspace(-3, 3, 35).view(5, 7)
    amax, scale = amax_of(x, blocks), quantize(x, E4M3, blocks).scale
    rows, columns = blocks.rows or 5, blocks.columns or 7
    for i in range(amax.shape[0]):
        for j in range(amax.shape[1]):
            block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert amax[i, j] == block.abs().max()
            assert torch.equal(scale[i, j], scale_of(block.abs().max(), E4M3))
    assert amax.shape == (-(-5 // rows), -(-7 // columns))
    assert (quantize(x, E4M3, blocks).values() - x).abs().div(x.abs()).median() < 2**-4


def test_a_whole_matrix_and_its_transpose_have_one_scale_and_raise_the_amax() -> None:
    x, scale, amax = torch.randn(6, 10), torch.full((1, 1), 0.5), torch.tensor(0.25)
    plain, turned = quantize_whole(x, E5M2, scale, amax, transpose=True)
    assert plain is not None
    assert turned is not None
    assert torch.equal(turned.values(), plain.values().t())
    assert amax == x.abs().max()
    quantize_whole(x / 4, E5M2, scale, amax, transpose=False)
    assert amax == x.abs().max()


def test_scales_of_blocks_of_32_lie_as_cublas_reads_them() -> None:
    rows, columns = 200, 7
    exponents = (torch.arange(rows * columns) % 251 + 1).to(torch.uint8).view(rows, columns)
    ordered = swizzled(exponents.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert ordered.numel() == 256 * 8
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * 2 + column // 4
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert ordered[place] == exponents[row, column]


WORLD = single_rank_group(("world",))
PLACE = (1, 2)


def state_after(amaxes: list[float], **config: object) -> Float8State:
    """Return the state after steps in which one operand had these amaxes."""
    state = Float8State(Fp8Config(fp8_format="hybrid", **config), Fp8TensorIndex(3), "cpu")  # type: ignore[arg-type]
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
    config = Fp8Config(fp8_format="hybrid")
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
    config = Fp8Config(fp8_format="hybrid")
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
    config = Fp8Config(fp8_format="hybrid")
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
    quantizers = Fp8Quantizers(Float8Recipe.of(Fp8Config(fp8_format="e4m3", fp8_recipe=recipe)))
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
        config = Fp8Config(fp8_format="hybrid", fp8_recipe=recipe, fp8_wgrad=has_weight_gradients)
        quantizers = Fp8Quantizers(Float8Recipe.of(config))
        assert (quantizers.turns, quantizers.keeps_weight_scale) == (turns, keeps_weight_scale)
        assert quantizers.gathers_gradients == (turns and has_weight_gradients)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_weight_is_quantized_once_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    quantizers = Fp8Quantizers(Float8Recipe.of(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe)))
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    counted = "quantize_whole" if recipe == "tensorwise" else "quantize_both"
    function, calls = getattr(fp8_quantizers, counted), []
    monkeypatch.setattr(fp8_quantizers, counted, lambda *args, **more: (calls.append(1), function(*args, **more))[1])

    def both(scale: torch.Tensor | None) -> list[Quantized]:
        return [
            quantizers.weight(weight, transpose=transpose, records=True, scale=scale if transpose else None)
            for transpose in (False, True)
        ]

    scale = both(None)[0].scale if quantizers.keeps_weight_scale else None
    expected = both(scale)
    calls.clear()
    with weights_kept([quantizers]):
        for _ in range(3):
            for own, other in zip(both(scale), expected, strict=True):
                assert torch.equal(own.data.view(torch.uint8), other.data.view(torch.uint8))
                assert torch.equal(own.scale, other.scale)
                assert own.blocks == other.blocks
    assert len(calls) == 1
    weight *= 2
    assert torch.equal(both(None)[0].values(), 2 * expected[0].values())


def test_a_weight_kept_by_a_pass_that_records_nothing_is_recorded() -> None:
    recipe = Float8Recipe.of(Fp8Config(fp8_format="hybrid"))
    state = Float8State(Fp8Config(fp8_format="hybrid"), Fp8TensorIndex(1, 1, 0), "cpu", 1)
    quantizers = Fp8Quantizers(recipe, state, (0, 0))
    with weights_kept([quantizers]):
        for records in (False, True):
            quantizers.weight(torch.full((16, 16), 3.0), transpose=False, records=records, scale=None)
    assert state.amax[0, 0, 1] == 3.0


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
    assert Fp8Config(**options).fp8_format == expected  # type: ignore[arg-type]


def test_the_layers_in_fp8() -> None:
    assert not Fp8Config().float8_layers(8)
    assert Fp8Config(fp8_format="e4m3").float8_layers(8) == range(8)
    ends = Fp8Config(
        fp8_format="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1
    )
    # Layers behind the model's, as multi-token prediction has them, are in fp8 too.
    assert [number for number in range(10) if ends.is_in_float8(number, 8)] == [2, 3, 4, 5, 6, 8, 9]
    assert not any(Fp8Config().is_in_float8(number, 8) for number in range(10))
