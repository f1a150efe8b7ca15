"""4-bit quantization: the codes and values of bitsandbytes 0.50.2 (stored here), error bounds, and groups of scales."""

from __future__ import annotations

import zlib

import pytest
import torch

from megatron.core.ops.four_bit import (
    BLOCK_SIZE,
    GROUP_SIZE,
    LEVELS,
    dequantize_blocks,
    dequantize_scales,
    library_dequantize,
    load_bitsandbytes,
    make_tables,
    quantize_blocks,
    quantize_scales,
)
from megatron.core.transformer.lora_targets import FOUR_BIT_BLOCK

CPU = torch.device("cpu")
# quantize_4bit of `small_weight`, and the checksum of what dequantize_4bit makes of it in bfloat16.
CODES = {
    "nf4": (
        "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e2"
        "a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e"
        "2a04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05",
        442123342,
    ),
    "fp4": (
        "bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be5a12d73c5be2a63d4bf5a92d63c4be5a12d73c5be2a12d"
        "7bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be5a12d73c5be2a63d4bf5a92d63c4be5a12d73c5be2a12"
        "d7bf5a92a63c4be5a02d63c4be2a12d73f5a92a63d4bf5a92d63c4be",
        2291020962,
    ),
}
SCALES = [0.78125, 1.5625, 2.34375, 3.125]
# quantize_4bit of `one_group` with compress_statistics: checksums of the scales' codes and of the values in float32.
SCALE_CODES, LARGEST, OFFSET, VALUES = 1587015827, 0.18466424942016602, 0.307523250579834, 1842275676


def small_weight() -> torch.Tensor:
    numbers = torch.arange(2 * 128, dtype=torch.int64)
    values = ((numbers * 37) % 101 - 50).double() / 64 * (1 + numbers // 64).double()
    return values.view(2, 128).to(torch.bfloat16)


def one_group() -> torch.Tensor:
    # The scales are multiples of 2^-13, so that any order of summation gives their exact mean.
    numbers = torch.arange(BLOCK_SIZE * GROUP_SIZE, dtype=torch.int64)
    values = ((numbers * 7919) % 129 - 64).float() / 64 * ((16 + numbers // 64 * 37 % 48).float() / 128)
    return values.view(1, -1)


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_codes_and_values_are_those_of_bitsandbytes(kind: str) -> None:
    codes, scales = quantize_blocks(small_weight(), kind)
    expected, values = CODES[kind]
    assert bytes(codes.view(-1).tolist()).hex() == expected
    assert scales.view(-1).tolist() == SCALES
    assert checksum(dequantize_blocks(codes, scales, make_tables(kind, CPU), torch.bfloat16)) == values


def test_double_quantization_of_one_group_is_that_of_bitsandbytes() -> None:
    tables = make_tables("nf4", CPU)
    codes, absmax = quantize_blocks(one_group(), "nf4")
    scales, largest, mean = quantize_scales(absmax, -1)
    assert checksum(scales) == SCALE_CODES
    assert (largest.item(), mean.item()) == (LARGEST, OFFSET)
    values = dequantize_blocks(codes, dequantize_scales(scales, largest, mean, tables, -1), tables, torch.float32)
    assert checksum(values) == VALUES


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_every_value_is_the_nearest_level_of_its_block(kind: str) -> None:
    weight = torch.randn(48, 192, generator=torch.Generator().manual_seed(5)) * 0.02
    weight[3] = 0.0
    codes, absmax = quantize_blocks(weight, kind)
    values = dequantize_blocks(codes, absmax, make_tables(kind, CPU), torch.float64)
    blocks = weight.double().view(-1, BLOCK_SIZE)
    levels = torch.tensor(LEVELS[kind], dtype=torch.float64) * blocks.abs().amax(dim=1, keepdim=True)
    nearest = (blocks.unsqueeze(-1) - levels.unsqueeze(1)).abs().amin(dim=-1)
    assert torch.allclose((values.view_as(blocks) - blocks).abs(), nearest, rtol=1e-5, atol=1e-8)
    assert not values[3].any()


@pytest.mark.parametrize("dim", [-1, -2])
def test_scales_are_quantized_in_groups_along_a_dim(dim: int) -> None:
    scales = torch.rand(2, 300, 520, generator=torch.Generator().manual_seed(6)) + 0.5
    tables = make_tables("nf4", CPU)
    codes, largest, mean = quantize_scales(scales, dim)
    assert tuple(largest.shape) == tuple(mean.shape) == ((2, 300, 3) if dim == -1 else (2, 2, 520))
    values = dequantize_scales(codes, largest, mean, tables, dim)
    # Half of the largest step of the 8-bit type, of values of at most half a unit around the mean.
    assert (values - scales).abs().max() < 0.5 * 0.9 / 64
    first = scales.narrow(dim, 0, 256).mean(dim=dim, dtype=torch.float64).float()
    assert torch.equal(mean.select(dim, 0), first)
    # A part that starts within a group.
    part = codes.narrow(dim, 270, 20)
    groups = (each.narrow(dim, 1, 1) for each in (largest, mean))
    assert torch.equal(dequantize_scales(part, *groups, tables, dim, 270), values.narrow(dim, 270, 20))


def test_the_flags_check_the_block_size() -> None:
    assert FOUR_BIT_BLOCK == BLOCK_SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_computes_the_same_if_it_is_installed(kind: str, dtype: torch.dtype) -> None:
    if load_bitsandbytes() is None:
        pytest.skip("bitsandbytes is not installed")
    weight = (torch.randn(64, 256, generator=torch.Generator().manual_seed(7)) * 0.02).to(dtype)
    codes, scales = quantize_blocks(weight, kind)
    theirs, state = load_bitsandbytes().quantize_4bit(weight, quant_type=kind, blocksize=BLOCK_SIZE)
    assert torch.equal(theirs.view(-1), codes.view(-1))
    assert torch.equal(state.absmax, scales.view(-1))
    values = dequantize_blocks(codes, scales, make_tables(kind, CPU), dtype)
    assert torch.equal(library_dequantize(codes, scales, kind, dtype), values)
