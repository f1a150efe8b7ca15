"""Optimizer state in fewer than four bytes per number, with stochastic rounding.

An update decodes the stored state to float32, updates it, and encodes it again. Decoding and encoding without an update
is exact. Stochastic rounding preserves the expected value, so that small changes are not lost. Its random bits are a
hash of the number itself, its index in its block and the number of updates, and do not come from a generator: they are
the same at any data-parallel size and after resuming.
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
    """Round each number stochastically to one of its two bfloat16 neighbors, returned as float32.

    Shapes: ``values, words: [blocks, 128] -> [blocks, 128]``.
    """
    return ((values.view(torch.int32) + words) & ~0xFFFF).view(torch.float32)


def round_roots(squares: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return float8 (e4m3) numbers, as float32, whose squares have the given values as expectation.

    Shapes: ``squares, words: [blocks, 128] -> [blocks, 128]``; squares from 0 to 2^16.
    """
    roots = squares.sqrt()
    # Clearing the mantissa leaves the power of two below the number. The e4m3 spacing is an eighth of it.
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
"""The state dtypes by their names on the command line."""
_LARGEST_EXPONENT = {torch.float16: 15, torch.float8_e4m3fn: 8}
"""The largest value of a block is scaled to at most two to this power, which the dtype can represent."""
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}
_BIAS, _MANTISSA_BITS = 127, 23
_SMALLEST_EXPONENT_OF_ROOTS = -54
"""With a smaller scale, the squares of the stored values would be subnormal."""
_HALF_UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float8_e4m3fn: 2.0**-4}
"""The largest relative error of rounding to nearest."""


class QuantizedState(ABC):
    """Float32 tensor stored in fewer bytes; the tensor has its elements only between ``open`` and ``close``.

    Shapes: ``tensor: [n]`` when open, ``[0]`` when closed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.close()

    def open(self) -> None:
        """Decode the stored values into the tensor."""
        self.tensor.data = self.decoded()

    def close(self, num_updates: torch.Tensor | int = 0) -> None:
        """Encode the tensor's values and free its memory."""
        self.encode(self.tensor, num_updates)
        self.tensor.data = self.tensor.new_empty(0)

    @abstractmethod
    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Store float32 values; ``num_updates`` seeds the stochastic rounding.

        Shapes: ``values: [n]``.
        """

    @abstractmethod
    def decoded(self) -> torch.Tensor:
        """Return the stored values in float32; shape: ``[n]``."""

    @abstractmethod
    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that are stored."""


class RoundedTensor(QuantizedState):
    """Storage in bfloat16, whose range is that of float32, rounded to nearest or (``by_chance``) stochastically."""

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
    """Storage in float16 or float8, with a power-of-two scale (one byte) per block of 128 elements.

    The scale of a block follows from its largest value. Blocks start at the start of a parameter, so that the stored
    values do not depend on the data-parallel size. ``keeps_positive`` never rounds a positive value down to zero,
    because the update divides by the root of the second moment.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, *, keeps_positive: bool = False) -> None:
        self._dtype = dtype
        self._keeps_positive = keeps_positive
        super().__init__(tensor)

    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Scale the values and round them to nearest."""
        num_elements = values.numel()
        blocks = _in_blocks(values)
        exponents = _exponents(blocks.abs(), self._dtype).clamp(1 - _BIAS, _BIAS - 1)
        scaled = blocks * _power_of_two(-exponents)
        if self._keeps_positive:
            scaled = torch.where(blocks > 0, scaled.clamp(min=_SMALLEST[self._dtype]), scaled)
        self._stored = scaled.view(-1)[:num_elements].to(self._dtype)
        self._exponents = exponents.to(torch.int8)

    def decoded(self) -> torch.Tensor:
        """Return the stored values multiplied by their scales."""
        num_elements = self._stored.numel()
        scales = _power_of_two(self._exponents.to(torch.int32)).expand(-1, PARAM_ALIGNMENT)
        return self._stored.float() * scales.reshape(-1)[:num_elements]

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the scaled values and the exponents of the scales."""
        return self._stored, self._exponents


class RootTensor(QuantizedState):
    """Storage of the square roots of second moments in float8, scaled as in `ScaledTensor` and stochastically rounded.

    The expected value of the stored square is the second moment. No positive value is rounded down to zero.
    """

    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Take the square roots, scale and round them."""
        blocks = _in_blocks(values)
        exponents = _exponents(blocks.sqrt(), torch.float8_e4m3fn).clamp(_SMALLEST_EXPONENT_OF_ROOTS, _BIAS - 1)
        inverse = _power_of_two(-exponents)
        roots = round_roots(blocks * inverse * inverse, random_words(blocks, num_updates))
        roots = torch.where(blocks > 0, roots.clamp(min=_SMALLEST[torch.float8_e4m3fn]), roots)
        self._stored = roots.view(-1)[: values.numel()].to(torch.float8_e4m3fn)
        self._exponents = exponents.to(torch.int8)

    def decoded(self) -> torch.Tensor:
        """Return the squares of the stored values multiplied by their scales."""
        scales = _power_of_two(self._exponents.to(torch.int32)).expand(-1, PARAM_ALIGNMENT)
        return (self._stored.float() * scales.reshape(-1)[: self._stored.numel()]).square_()

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the scaled roots and the exponents of the scales."""
        return self._stored, self._exponents


class RemainderTensor(QuantizedState):
    """Storage of a float32 main parameter as the 16 bits that its bfloat16 weight lacks.

    A float32 number is the sum of its bfloat16 neighbor and a signed distance in units of its last place. This is
    lossless except for an error of one unit if a number lies exactly between two neighbors and is rounded down.

    Shapes: ``weights: [n]``, the model's own.
    """

    def __init__(self, tensor: torch.Tensor, weights: torch.Tensor) -> None:
        self._weights = weights
        super().__init__(tensor)

    def encode(self, values: torch.Tensor, num_updates: torch.Tensor | int = 0) -> None:
        """Round the values into the model's weights, and store the distances."""
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
    """Return exact powers of two; shapes: ``[m] -> [m, 1]``."""
    return ((exponents + _BIAS) << _MANTISSA_BITS).view(torch.float32).unsqueeze(1)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return values in rows of one block each, padded with zeros; shapes: ``[n] -> [blocks, 128]``."""
    padding = -values.numel() % PARAM_ALIGNMENT
    return torch.nn.functional.pad(values, (0, padding)).view(-1, PARAM_ALIGNMENT)


def _exponents(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the exponents of the blocks' scales from absolute values; shapes: ``[blocks, 128] -> [blocks]``."""
    # The smallest power of two that is at least the block's largest value, computed from its bits. The value may be
    # rounded up to it, and then still has the same scale when it is stored again.
    largest = ((sizes.amax(dim=1).view(torch.int32) - 1) >> _MANTISSA_BITS) - _BIAS + 1
    return largest - _LARGEST_EXPONENT[dtype]


def make_moment(tensor: torch.Tensor, dtype_name: str, decay: float, *, is_second: bool) -> QuantizedState | None:
    """Create the storage of a moment for a dtype name; return None for fp32, which needs none.

    If an update changes a moment by less than half a unit of the dtype, rounding to nearest would never change it.
    Therefore a bfloat16 moment with a ``decay`` above 0.996, and any second moment in fp8, are rounded stochastically.
    """
    dtype = STATE_DTYPES[dtype_name]
    if dtype is torch.float32:
        return None
    if dtype is torch.bfloat16:
        return RoundedTensor(tensor, by_chance=1.0 - decay < _HALF_UNIT[dtype])
    if dtype is torch.float8_e4m3fn and is_second:
        return RootTensor(tensor)
    return ScaledTensor(tensor, dtype, keeps_positive=is_second)
