"""Matrices in NVFP4: codes, scales, rounding to nearest and at random, the Hadamard transform, and GEMMs in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from megatron.core.ops import nvfp4_tensor
from megatron.core.ops.dropout import DropoutKeys, DropoutSamples, RowKeys, drop_elements, keyed_words
from megatron.core.ops.fp8_tensor import SEGMENTS_OF_16, SQUARES_OF_16, Blocks, scaled_product
from megatron.core.ops.nvfp4_tensor import (
    SIGNS,
    Nvfp4Matrix,
    hadamard,
    has_nvfp4_products,
    pack,
    quantize_nvfp4,
    tensor_scale_of,
    unpack,
)

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SCALES = sorted(float(x) for x in torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn))


def nearest(x: float, values: list[float]) -> float:
    """Return the nearest value, of two the one with an even index, which has an even mantissa."""
    return min(values, key=lambda value: (abs(value - x), values.index(value) % 2))


def oracle(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the dequantized matrix in float64, block by block and element by element."""
    largest = float(x.abs().max())
    tensor_scale = 2.0 ** math.ceil(math.log2(largest / (6 * 448))) if largest else 1.0
    result = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(0, x.shape[0], blocks.rows):
        for column in range(0, x.shape[1], blocks.columns):
            at = slice(row, row + blocks.rows), slice(column, column + blocks.columns)
            scale = nearest(float(x[at].abs().max()) / tensor_scale / 6, SCALES)
            found = [
                math.copysign(nearest(min(abs(each) / tensor_scale / scale, 6.0), VALUES), each) if scale else 0.0
                for each in x[at].flatten().tolist()
            ]
            result[at] = torch.tensor(found, dtype=torch.float64).view(x[at].shape) * scale * tensor_scale
    return result


def test_each_value_has_its_code() -> None:
    x = torch.tensor([[*VALUES, *(-value for value in VALUES)]])
    quantized = quantize_nvfp4(x * 448, SEGMENTS_OF_16)
    assert unpack(quantized.data).flatten().tolist() == list(range(16))
    assert quantized.data[0, 0] == 1 << 4, "the first code of a byte is in the low bits"
    assert (float(quantized.scale), float(quantized.tensor_scale)) == (448, 1)
    assert torch.equal(quantized.values(), x * 448)
    codes = torch.randint(16, (3, 8), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)


def test_ties_go_to_the_even_mantissa_and_large_values_saturate() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    # 6.1 / 6 is rounded to a scale of 1, so that the largest element is out of range.
    x = torch.tensor([[*ties, *(-each for each in ties), 6.1, 0.0]])
    found = quantize_nvfp4(x, SEGMENTS_OF_16, torch.ones(1, 1))
    assert float(found.scale) == 1
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert found.values().flatten().tolist() == [*expected, *(-each for each in expected), 6.0, 0.0]
    # With a given tensor scale the scale of a block can be out of range.
    assert quantize_nvfp4(5000 * torch.ones(1, 16), SEGMENTS_OF_16, torch.ones(1, 1)).values().eq(6 * 448).all()


@pytest.mark.parametrize("blocks", [SEGMENTS_OF_16, SQUARES_OF_16])
def test_values_are_those_of_a_slow_oracle(blocks: Blocks) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(48, 64, generator=generator) * torch.logspace(-6, 3, 48).unsqueeze(1)
    x[16:32, 32:48] = 0.0
    x = x.bfloat16().float()
    quantized = quantize_nvfp4(x, blocks)
    assert quantized.scale.shape == (48 // blocks.rows, 4)
    # The scale of a block, and quotients, are computed in float32.
    wrong = quantized.values(torch.float64) != oracle(x, blocks)
    assert int(wrong.sum()) == 0


@pytest.mark.parametrize(("amax", "expected"), [(2688.0, 1.0), (2689.0, 2.0), (0.0, 1.0), (1344.0, 0.5)])
def test_the_tensor_scale_is_the_smallest_power_of_two_that_fits(amax: float, expected: float) -> None:
    assert float(tensor_scale_of(torch.tensor(amax))) == expected


def test_values_do_not_depend_on_the_part_of_the_matrix() -> None:
    x = torch.randn(32, 64) * torch.logspace(0, 2, 32).unsqueeze(1)
    whole = quantize_nvfp4(x, SEGMENTS_OF_16).values()
    parts = [quantize_nvfp4(part, SEGMENTS_OF_16) for part in x.chunk(4)]
    assert len({float(part.tensor_scale) for part in parts}) > 1
    assert torch.equal(torch.cat([part.values() for part in parts]), whole)


def test_blocks_far_below_the_largest_value_are_less_precise_and_then_zero() -> None:
    # The first block has the scale 225, so that the tensor scale is 1: a scale below 2**-6 is subnormal.
    amax = torch.tensor([6 * 225.0, 6 * 2**-6, 6 * 1.4 * 2**-9, 6 * 1.6 * 2**-9, 5.9 * 2**-10])
    found = quantize_nvfp4(amax.unsqueeze(1).expand(-1, 16), SEGMENTS_OF_16)
    assert float(found.tensor_scale) == 1
    assert found.scale.flatten().tolist() == [224, 2**-6, 2**-9, 2**-8, 0]
    assert found.values()[:, 0].tolist() == [6 * 224, 6 * 2**-6, 6 * 2**-9, 4 * 2**-8, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_hidden(value: float) -> None:
    x = torch.ones(16, 32)
    x[3, 20] = value
    for blocks in (SEGMENTS_OF_16, SQUARES_OF_16):
        assert quantize_nvfp4(x, blocks).values().isnan().all()
        # The ranks that share a scale may have found one before this value.
        values = quantize_nvfp4(x, blocks, torch.ones(1, 1)).values()
        assert values[3, 16:].isnan().all()
        assert values[:, :16].isfinite().all()


def test_a_weight_has_the_same_values_transposed() -> None:
    x = torch.randn(48, 32)
    quantized = quantize_nvfp4(x, SQUARES_OF_16)
    turned = quantized.transposed()
    assert turned.data.shape == (32, 24)
    assert torch.equal(turned.values(), quantized.values().t())
    assert torch.equal(turned.values(), quantize_nvfp4(x.t(), SQUARES_OF_16).values())


def words_of(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def test_stochastic_rounding_is_unbiased() -> None:
    x = torch.linspace(-6, 6, 256).view(16, 16)
    x[:, 0] = 6.0
    draws = 2000
    words = words_of(9, (draws * 16, 16))
    values = quantize_nvfp4(x.repeat(draws, 1), SEGMENTS_OF_16, torch.ones(1, 1), words).values(torch.float64)
    values = values.view(draws, 16, 16)
    distance = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    assert bool(((values - x).abs() < distance).all()), "an element becomes one of its two neighbors"
    # The standard deviation of an element is at most half of the distance of its neighbors.
    error = (values.mean(0) - x).abs() / (distance / 2 / draws**0.5)
    assert error.max() < 4.5
    assert error.square().mean() < 1.1


def test_stochastic_rounding_is_unbiased_but_for_values_that_saturate() -> None:
    """The scale of a block is rounded to nearest: if it is rounded down, its largest elements are out of range."""
    draws, x = 2000, torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    words = words_of(10, (draws * 8, 32))
    quantized = quantize_nvfp4(x.repeat(draws, 1), SEGMENTS_OF_16, words=words)
    step = (quantized.scale.double() * float(quantized.tensor_scale))[:8].repeat_interleave(16, 1)
    error = quantized.values(torch.float64).view(draws, 8, 32).mean(0) - x
    saturates = x.abs() > 6 * step
    assert 0 < int(saturates.sum()) < 16
    assert torch.allclose(-(error * x.sign())[saturates], (x.abs() - 6 * step)[saturates], atol=1e-6)
    # Half of the distance of E4M3's neighbors, relative to the larger one.
    assert float((error / x).abs()[saturates].max()) <= 1 / 17
    # The standard deviation of an element is at most half of the largest distance of neighbors, 2 steps.
    assert float((error / step)[~saturates].abs().max()) < 4.5 / draws**0.5


def test_stochastic_rounding_keeps_values_that_need_no_rounding() -> None:
    x = torch.tensor([[*VALUES, *(-value for value in VALUES)]])
    for word in (0, -1, 2**31 - 1, -(2**31)):
        words = torch.full((1, 16), word, dtype=torch.int32)
        assert torch.equal(quantize_nvfp4(x, SEGMENTS_OF_16, torch.ones(1, 1), words).values(), x)


def test_words_are_those_of_dropout() -> None:
    keys = RowKeys(*(words_of(seed, (1, 40)).flatten() for seed in (1, 2)))
    words = keyed_words(keys, torch.arange(64))
    dropped = drop_elements(torch.ones(40, 64), keys, 0.3)
    assert torch.equal((words >> 8) & 0xFFFFFF >= round(0.3 * 2**24), dropped != 0)
    assert torch.equal(keyed_words(keys, torch.arange(8, 24)), words[:, 8:24])


def test_keys_of_rounding_follow_the_sample_and_the_position() -> None:
    samples = DropoutSamples.at(1, 5, 8, 2, "cpu")
    whole = DropoutKeys(samples, torch.arange(12), slice(None), range(4))
    keys = whole.of_rounding(range(3, 4), 24)
    part = DropoutKeys(samples, torch.arange(12), slice(4, 8), range(4)).of_rounding(range(3, 4), 8)
    for one, other in zip(keys, part):
        assert torch.equal(one[:, 8:16], other)
    second = DropoutKeys(DropoutSamples.at(1, 5, 9, 1, "cpu"), torch.arange(12), slice(None), range(4))
    assert torch.equal(second.of_rounding(range(3, 4), 12).k0, keys.k0[:, 1::2])
    later = DropoutKeys(DropoutSamples.at(1, 6, 8, 2, "cpu"), torch.arange(12), slice(None), range(4))
    for other in (whole.of_rounding(range(4, 5), 24), later.of_rounding(range(3, 4), 24)):
        assert not bool((other.k0 == keys.k0).any())


def test_the_hadamard_transform_is_orthogonal() -> None:
    matrix = hadamard(torch.eye(16)).double()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25, dtype=torch.float64))
    x, y = torch.randn(24, 48), torch.randn(40, 48)
    exact = x.double() @ y.double().t()
    torch.testing.assert_close(hadamard(x).double() @ hadamard(y).double().t(), exact, rtol=0, atol=1e-5)
    spread = hadamard(torch.eye(32)[5:6])
    assert spread[0, :16].abs().tolist() == [0.25] * 16
    assert not spread[0, 16:].any()


def test_random_signs_spread_a_constant() -> None:
    """Without signs, equal values along the tokens would be added up in one element, 4 times as large."""
    assert float(hadamard(torch.ones(1, 16)).abs().max()) <= 2
    assert bin(SIGNS).count("1") == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_quantized_operands(dtype: torch.dtype) -> None:
    left = quantize_nvfp4(torch.randn(48, 96) * torch.logspace(-2, 2, 48).unsqueeze(1), SEGMENTS_OF_16)
    right = quantize_nvfp4(torch.randn(32, 96), SQUARES_OF_16)
    bias = torch.randn(32)
    exact = left.values(torch.float64) @ right.values(torch.float64).t() + bias
    found = scaled_product(left, right, dtype, bias).double()
    torch.testing.assert_close(
        found, exact, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=1e-5 * float(exact.abs().max())
    )


def unswizzled(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    tiles = -(-rows // 128), -(-columns // 4)
    ordered = scale.view(torch.uint8).view(*tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return ordered.reshape(128 * tiles[0], 4 * tiles[1])[:rows, :columns].view(torch.float8_e4m3fn)


def test_the_device_is_given_packed_codes_and_both_levels_of_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands and scales are dequantized from what torch's scaled GEMM receives, in the layout of cuBLAS."""

    def multiply(
        a: torch.Tensor, b: torch.Tensor, a_scales: Any, a_scaling: Any, b_scales: Any, b_scaling: Any, **more: Any
    ) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a_scaling == b_scaling == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        layout = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        assert more == {"swizzle_a": layout, "swizzle_b": layout, "output_dtype": torch.bfloat16}
        values = []
        for data, (scale, tensor_scale) in ((a, a_scales), (b.t(), b_scales)):
            rows, width = data.shape
            found = unswizzled(scale, rows, width // 8)
            values.append(
                Nvfp4Matrix(data.view(torch.uint8), found, SEGMENTS_OF_16, tensor_scale).values(torch.float64)
            )
        return (values[0] @ values[1].t()).bfloat16()

    monkeypatch.setattr(nvfp4_tensor.F, "scaled_mm", multiply)
    left = quantize_nvfp4(torch.randn(160, 96), SEGMENTS_OF_16)
    right = quantize_nvfp4(torch.randn(32, 96), SQUARES_OF_16)
    exact = left.values(torch.float64) @ right.values(torch.float64).t()
    for one, other in ((left, right), (right.transposed(), quantize_nvfp4(torch.randn(64, 32), SEGMENTS_OF_16))):
        exact = one.values(torch.float64) @ other.values(torch.float64).t()
        torch.testing.assert_close(one.device_product(other, torch.float32).double(), exact, rtol=2**-8, atol=1e-6)
    assert left._device_scales().numel() == 256 * 8


def test_a_cpu_has_no_native_products() -> None:
    assert not has_nvfp4_products("cpu")
