"""Optimizer state in fewer than four bytes per number, with stochastic rounding.

An update opens the stored state as float32, updates it, and closes it. Opening and closing without an update changes no
bit. Stochastic rounding keeps the expected value right, so that small changes are not lost. Its random bits are a hash
of the number itself, of its place in its block and of the count of updates: the same at any data-parallel size and
after a resumption. Nothing is drawn from a generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from megatron.core.distributed import PARAM_ALIGNMENT

_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
_LANE_STEP = 0x9E3779B1 - 2**32
_UPDATE_STEP = 0x85EBCA6B - 2**32
_DISCARDED_BITS = 16


def random_words(values: torch.Tensor, num_updates: torch.Tensor | int) -> torch.Tensor:
    """Return 16 random bits for each float32 number, as int32; rows of ``values`` are blocks.

    Shapes: ``values: [blocks, 128]``, ``num_updates: []`` or a number ``-> [blocks, 128]``.
    """
    lanes = torch.arange(PARAM_ALIGNMENT, dtype=torch.int32, device=values.device) * _LANE_STEP
    count = torch.as_tensor(num_updates, device=values.device).to(torch.int32) * _UPDATE_STEP
    words = values.view(torch.int32) ^ (lanes + count)
    for factor in _FACTORS:
        words = (words ^ ((words >> _DISCARDED_BITS) & 0xFFFF)) * factor
    return (words >> _DISCARDED_BITS) & 0xFFFF


def round_to_bfloat16(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return one of the two bfloat16 neighbors of each number, the nearer with the greater chance, as float32.

    Shapes: ``values, words: [blocks, 128] -> [blocks, 128]``.
    """
    return ((values.view(torch.int32) + words) & ~0xFFFF).view(torch.float32)


def round_roots(squares: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return numbers of float8 (e4m3), as float32, whose squares are the given ones on average.

    Shapes: ``squares, words: [blocks, 128] -> [blocks, 128]``; squares from 0 to 2^16.
    """
    roots = squares.sqrt()
    # Of a float32 number without its fraction: the power of two below it. Units of e4m3 are an eighth of that.
    powers = (roots.view(torch.int32) & 0x7F800000).view(torch.float32)
    units = (powers * 2.0**-3).clamp_(min=2.0**-9)
    lower = torch.floor(roots / units) * units
    shares = (squares - lower.square()) / (units * (2.0 * lower + units))
    return lower + units * (words.to(torch.float32) * 2.0**-16 < shares)


STATE_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
"""The types of the command line."""
_LARGEST_EXPONENT = {torch.float16: 15, torch.float8_e4m3fn: 8}
"""The values of a block are brought to two to this power at most, which the type has room for."""
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}
_BIAS, _MANTISSA_BITS = 127, 23
_SMALLEST_EXPONENT_OF_ROOTS = -54
"""Squares of what is stored under a smaller scale would not be normal numbers."""
_HALF_UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}
"""The largest relative error of rounding to the nearest."""


class QuantizedState(ABC):
    """Keep a float32 tensor in fewer bytes; it has its elements between ``open`` and ``close`` only.

    Shapes: ``tensor: [n]`` when open, ``[0]`` when closed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.close()

    def open(self) -> None:
        """Give the tensor its values."""
        self.tensor.data = self.decoded()

    def close(self, num_updates: torch.Tensor | int = 0) -> None:
        """Store the tensor's values, and take its memory away."""
        self.encode(self.tensor, num_updates)
        self.tensor.data = self.tensor.new_empty(0)

    @abstractmethod
    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Store float32 values after so many updates, from which the chance of stochastic rounding follows.

        Shapes: ``values: [n]``.
        """

    @abstractmethod
    def decoded(self) -> torch.Tensor:
        """Return the stored values in float32; shape: ``[n]``."""

    @abstractmethod
    def held(self) -> tuple[torch.Tensor, ...]:
        """Return what is stored."""


class RoundedTensor(QuantizedState):
    """Store values rounded to bfloat16, whose range is that of float32: to the nearest, or ``by_chance``."""

    def __init__(self, tensor: torch.Tensor, *, by_chance: bool = False) -> None:
        self._by_chance = by_chance
        super().__init__(tensor)

    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Round the values."""
        if self._by_chance:
            blocks = _in_blocks(values)
            rounded = round_to_bfloat16(blocks, random_words(blocks, num_updates))
            values = rounded.view(-1)[: values.numel()]
        self._stored = values.to(torch.bfloat16)

    def decoded(self) -> torch.Tensor:
        return self._stored.float()

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the rounded values."""
        return (self._stored,)


class ScaledTensor(QuantizedState):
    """Store values in float16 or float8, each block of 128 with a power of two as its scale (one byte).

    The scale of a block follows from its largest value. Blocks begin where a parameter does, so that what is stored
    does not depend on the data-parallel size. ``keeps_positive`` rounds no positive value down to zero: a second
    moment of zero would be divided by.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, *, keeps_positive: bool = False) -> None:
        self._dtype = dtype
        self._keeps_positive = keeps_positive
        super().__init__(tensor)

    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Scale and round the values to the nearest."""
        num_elements = values.numel()
        blocks = _in_blocks(values)
        exponents = _exponents(blocks.abs(), self._dtype).clamp(1 - _BIAS, _BIAS - 1)
        scaled = blocks * _power_of_two(-exponents)
        if self._keeps_positive:
            scaled = torch.where(blocks > 0, scaled.clamp(min=_SMALLEST[self._dtype]), scaled)
        self._stored = scaled.view(-1)[:num_elements].to(self._dtype)
        self._exponents = exponents.to(torch.int8)

    def decoded(self) -> torch.Tensor:
        """Return the stored values times their scales."""
        num_elements = self._stored.numel()
        scales = _power_of_two(self._exponents.to(torch.int32)).expand(-1, PARAM_ALIGNMENT)
        return self._stored.float() * scales.reshape(-1)[:num_elements]

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the scaled values and the exponents of the scales."""
        return self._stored, self._exponents


class RootTensor(QuantizedState):
    """Store the roots of second moments in float8, with scales as `ScaledTensor` has them, and rounded by chance.

    The mean of what may be stored is the second moment itself. No positive value is rounded down to zero.
    """

    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Take the roots, scale and round them."""
        blocks = _in_blocks(values)
        exponents = _exponents(blocks.sqrt(), torch.float8_e4m3fn).clamp(_SMALLEST_EXPONENT_OF_ROOTS, _BIAS - 1)
        inverse = _power_of_two(-exponents)
        roots = round_roots(blocks * inverse * inverse, random_words(blocks, num_updates))
        roots = torch.where(blocks > 0, roots.clamp(min=_SMALLEST[torch.float8_e4m3fn]), roots)
        self._stored = roots.view(-1)[: values.numel()].to(torch.float8_e4m3fn)
        self._exponents = exponents.to(torch.int8)

    def decoded(self) -> torch.Tensor:
        """Return the squares of the stored values times their scales."""
        scales = _power_of_two(self._exponents.to(torch.int32)).expand(-1, PARAM_ALIGNMENT)
        return (self._stored.float() * scales.reshape(-1)[: self._stored.numel()]).square_()

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the scaled roots and the exponents of the scales."""
        return self._stored, self._exponents


class RemainderTensor(QuantizedState):
    """Store of main parameters what their bfloat16 weights lack of float32: 16 bits each.

    A float32 number is its bfloat16 neighbor and a signed distance in units of its last place. Nothing is lost but
    one unit where a number lies in the very middle of two neighbors and is rounded down.

    Shapes: ``weights: [n]``, the model's own.
    """

    def __init__(self, tensor: torch.Tensor, weights: torch.Tensor) -> None:
        self._weights = weights
        super().__init__(tensor)

    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Round the values into the model, and store the distances."""
        self._weights.copy_(values)
        distances = values.view(torch.int32) - self._high_bits()
        self._stored = distances.clamp(-(2**15), 2**15 - 1).to(torch.int16)

    def decoded(self) -> torch.Tensor:
        """Return the main parameters."""
        return (self._high_bits() + self._stored.to(torch.int32)).view(torch.float32)

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the distances."""
        return (self._stored,)

    def _high_bits(self) -> torch.Tensor:
        return self._weights.view(torch.int16).to(torch.int32) << 16


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two, exactly; shapes: ``[m] -> [m, 1]``."""
    return ((exponents + _BIAS) << _MANTISSA_BITS).view(torch.float32).unsqueeze(1)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return values in rows of a block each, zeros after the last; shapes: ``[n] -> [blocks, 128]``."""
    padding = -values.numel() % PARAM_ALIGNMENT
    return torch.nn.functional.pad(values, (0, padding)).view(-1, PARAM_ALIGNMENT)


def _exponents(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the exponents of the blocks' scales, from values without sign; shapes: ``[blocks, 128] -> [blocks]``."""
    # The smallest power of two that the block's largest value does not exceed, out of its bits: the value may be
    # rounded up to it, and then has the same scale when it is stored again.
    largest = ((sizes.amax(dim=1).view(torch.int32) - 1) >> _MANTISSA_BITS) - _BIAS + 1
    return largest - _LARGEST_EXPONENT[dtype]


def make_moment(tensor: torch.Tensor, dtype_name: str, decay: float, *, is_second: bool) -> QuantizedState | None:
    """Return the storage of a moment in a type by name, or None for fp32, which is stored as it is.

    Where an update moves the moment by less than half a unit of the type, rounding to the nearest would hold it where
    it is: a bfloat16 moment that keeps more than 99.6 % (``decay``) is rounded by chance, and any second moment in fp8.
    """
    dtype = STATE_DTYPES[dtype_name]
    if dtype is torch.float32:
        return None
    if dtype is torch.bfloat16:
        return RoundedTensor(tensor, by_chance=1.0 - decay < _HALF_UNIT[dtype])
    if dtype is torch.float8_e4m3fn and is_second:
        return RootTensor(tensor)
    return ScaledTensor(tensor, dtype, keeps_positive=is_second)
