"""Rotary positions against the published formulas, written here once more as rotations of complex numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.transformer.rotary_pos_embedding import RotaryEmbedding, apply_rotary

LENGTH, BATCH, HEADS, WIDTH = 9, 3, 2, 12


def llama3_frequency(frequency: float, factor: float, low: float, high: float, original_length: int) -> float:
    """Return one scaled frequency, case by case as the Llama 3.1 release states it."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original_length / high:
        return frequency
    if wavelength > original_length / low:
        return frequency / factor
    smooth = (original_length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def rotated(x: np.ndarray, positions: np.ndarray, frequencies: list[float], interleaved: bool) -> np.ndarray:
    """Turn the pair of channels that belongs to each frequency by position x frequency."""
    result = x.copy()
    half = len(frequencies)
    for index, frequency in enumerate(frequencies):
        a, b = (2 * index, 2 * index + 1) if interleaved else (index, index + half)
        angle = positions.T[:, :, None] * frequency
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle)
        result[..., a], result[..., b] = turned.real, turned.imag
    return result


def heads() -> torch.Tensor:
    return torch.randn(LENGTH, BATCH, HEADS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def positions() -> torch.Tensor:
    """Return other positions in every row, far ones among them."""
    return torch.arange(LENGTH)[None, :] * 37 + torch.tensor([[0], [5], [3000]])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [WIDTH, 8, 2])
@pytest.mark.parametrize("interpolation", [None, 2.5])
def test_plain_rotation(interleaved: bool, rotary_dim: int, interpolation: float | None) -> None:
    rotary = RotaryEmbedding(rotary_dim, 500.0, interleaved=interleaved, interpolation_factor=interpolation)
    x = heads()
    output = apply_rotary(x, rotary.angles(positions(), torch.float64))
    frequencies = [500.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    places = positions().double().numpy() / (interpolation or 1.0)
    expected = rotated(x.numpy(), places, frequencies, interleaved)
    assert output.dtype == torch.float64
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-11, atol=1e-11)
    assert torch.equal(output[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize(
    ("factor", "low", "high", "original_length"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (4.0, 2.0, 3.0, 300)]
)
def test_llama_3_1_scaling(factor: float, low: float, high: float, original_length: int) -> None:
    base, dim = 500_000.0, 64
    rotary = RotaryEmbedding(
        dim,
        base,
        scaling_factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_length=original_length,
    )
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    expected = [llama3_frequency(frequency, factor, low, high, original_length) for frequency in plain]
    np.testing.assert_allclose(rotary.frequencies.numpy(), expected, rtol=1e-12)
    ratios = np.array(expected) / plain
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(1 / factor)
    assert ((ratios > 1 / factor + 1e-6) & (ratios < 1 - 1e-6)).any(), "no frequency is blended"


def test_scores_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(WIDTH, 10_000.0)
    query, key = heads()[:1, :1, :1], heads()[1:2, 1:2, :1]

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rotary(x, rotary.angles(torch.tensor([[place]]), torch.float64))
            for x, place in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(17, 5) == pytest.approx(score(4012, 4000), rel=1e-9)
    assert score(17, 5) != pytest.approx(score(17, 6), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_angles_of_far_positions_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    """Position 100,003 is no bfloat16 number: the angles come from float64 and are kept in float32."""
    angles = RotaryEmbedding(WIDTH, 10_000.0).angles(torch.tensor([[100_003]]), dtype)
    assert angles.cos.dtype == torch.float32
    expected = [100_003 * 10_000.0 ** (-2 * i / WIDTH) for i in range(WIDTH // 2)]
    np.testing.assert_allclose(angles.cos[0, 0, 0, : WIDTH // 2].numpy(), np.cos(expected), atol=1e-6)
    np.testing.assert_allclose(angles.sin[0, 0, 0, WIDTH // 2 :].numpy(), np.sin(expected), atol=1e-6)


def test_low_precision_is_rounded_once() -> None:
    rotary = RotaryEmbedding(WIDTH, 10_000.0)
    x = heads().bfloat16()
    output = apply_rotary(x, rotary.angles(positions(), torch.bfloat16))
    exact = apply_rotary(x.double(), rotary.angles(positions(), torch.float64))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=1.01 * 2**-8, atol=1e-5)


class Operations(TorchDispatchMode):
    """Name the operations that are run, and those of them that bring something from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if isinstance(args[0], torch.Tensor) and args[0].device != result.device:
            self.copies.append(str(func))
        return result


def test_the_same_positions_cost_nothing_the_second_time() -> None:
    rotary = RotaryEmbedding(WIDTH, 500.0)
    places = positions()
    first = rotary.angles(places, torch.float32)
    with Operations() as operations:
        assert rotary.angles(places, torch.float32) is first
    assert operations.names == []


def test_other_positions_need_no_copy_from_the_host() -> None:
    rotary = RotaryEmbedding(WIDTH, 500.0)
    rotary.angles(positions().to("meta"), torch.float32)
    others = positions().to("meta")
    with Operations() as operations:
        assert rotary.angles(others, torch.float32).cos.device.type == "meta"
    assert operations.names
    assert operations.copies == []


def test_kept_angles_are_those_of_the_positions_dtype_and_content() -> None:
    rotary = RotaryEmbedding(WIDTH, 500.0)
    places = positions()
    assert rotary.angles(places, torch.float32).cos.dtype is torch.float32
    assert rotary.angles(places, torch.float64).cos.dtype is torch.float64
    places += 1
    expected = RotaryEmbedding(WIDTH, 500.0).angles(positions() + 1, torch.float64)
    assert torch.equal(rotary.angles(places, torch.float64).sin, expected.sin)


def test_rows_that_share_their_memory_share_their_angles() -> None:
    places = torch.arange(LENGTH)
    shared = RotaryEmbedding(WIDTH, 500.0).angles(places.expand(BATCH, -1), torch.float32)
    single = RotaryEmbedding(WIDTH, 500.0).angles(places.repeat(BATCH, 1), torch.float32)
    assert shared.cos.shape == (LENGTH, 1, 1, WIDTH)
    assert torch.equal(apply_rotary(heads(), shared), apply_rotary(heads(), single))


def test_angles_made_for_inference_do_not_reach_a_backward_pass() -> None:
    rotary = RotaryEmbedding(WIDTH, 500.0)
    places = positions()
    with torch.inference_mode():
        rotary.angles(places, torch.float64)
        rotary.angles(positions(), torch.float64)
    x = heads().requires_grad_()
    apply_rotary(x, rotary.angles(places, torch.float64)).sum().backward()
    assert x.grad is not None


def test_queries_grow_with_the_logarithm_of_whole_lengths() -> None:
    angles = RotaryEmbedding(WIDTH, 10_000.0, temperature=(0.3, 7)).angles(torch.arange(30)[None], torch.float64)
    expected = [1 + 0.3 * math.log(1 + position // 7) for position in range(30)]
    assert angles.query_scale is not None
    assert angles.query_scale.shape == (30, 1, 1, 1)
    np.testing.assert_allclose(angles.query_scale.flatten().numpy(), expected, rtol=1e-14)
    assert RotaryEmbedding(WIDTH, 10_000.0).angles(positions(), torch.float64).query_scale is None
