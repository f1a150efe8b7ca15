"""State of the optimizer in fewer than four bytes a number: what is stored between two steps.

A step opens it as float32, updates that, and closes it. Opening and closing without an update changes no bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from megatron.core.distributed.param_layout import PARAM_ALIGNMENT

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


class CompactTensor(ABC):
    """Keep a float32 tensor in fewer bytes; it has its elements between ``open`` and ``close`` only.

    Shapes: ``tensor: [n]`` when open, ``[0]`` when closed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.close()

    def open(self) -> None:
        """Give the tensor its values."""
        self.tensor.data = self.decoded()

    def close(self) -> None:
        """Store the tensor's values, and take its memory away."""
        self.encode(self.tensor)
        self.tensor.data = self.tensor.new_empty(0)

    @abstractmethod
    def encode(self, values: torch.Tensor) -> None:
        """Store float32 values; shape: ``[n]``."""

    @abstractmethod
    def decoded(self) -> torch.Tensor:
        """Return the stored values in float32; shape: ``[n]``."""

    @abstractmethod
    def held(self) -> tuple[torch.Tensor, ...]:
        """Return what is stored."""


class RoundedTensor(CompactTensor):
    """Store values rounded to bfloat16, whose range is that of float32."""

    def encode(self, values: torch.Tensor) -> None:
        """Round the values to the nearest."""
        self._stored = values.to(torch.bfloat16)

    def decoded(self) -> torch.Tensor:
        """Return the rounded values."""
        return self._stored.float()

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the rounded values."""
        return (self._stored,)


class ScaledTensor(CompactTensor):
    """Store values in float16 or float8, each block of 128 with a power of two as its scale (one byte).

    The scale of a block follows from its largest value. Blocks begin where a parameter does, so that what is stored
    does not depend on the data-parallel size. ``keeps_positive`` rounds no positive value down to zero: a second
    moment of zero would be divided by.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, *, keeps_positive: bool = False) -> None:
        self._dtype = dtype
        self._keeps_positive = keeps_positive
        super().__init__(tensor)

    def encode(self, values: torch.Tensor) -> None:
        """Scale and round the values to the nearest."""
        num_elements = values.numel()
        padding = -num_elements % PARAM_ALIGNMENT
        blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, PARAM_ALIGNMENT)
        # The smallest power of two that the block's largest value does not exceed, out of its bits: the value may be
        # rounded up to it, and then has the same scale when it is stored again.
        largest = ((blocks.abs().amax(dim=1).view(torch.int32) - 1) >> _MANTISSA_BITS) - _BIAS + 1
        exponents = (largest - _LARGEST_EXPONENT[self._dtype]).clamp(1 - _BIAS, _BIAS - 1)
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


class RemainderTensor(CompactTensor):
    """Store of main parameters what their bfloat16 weights lack of float32: 16 bits each.

    A float32 number is its bfloat16 neighbour and a signed distance in units of its last place. Nothing is lost but
    one unit where a number lies in the very middle of two neighbours and is rounded down.

    Shapes: ``weights: [n]``, the model's own.
    """

    def __init__(self, tensor: torch.Tensor, weights: torch.Tensor) -> None:
        self._weights = weights
        super().__init__(tensor)

    def encode(self, values: torch.Tensor) -> None:
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


def make_compact(tensor: torch.Tensor, dtype_name: str, *, keeps_positive: bool = False) -> CompactTensor | None:
    """Return the storage of a moment in a type by name, or None for fp32, which is stored as it is."""
    dtype = STATE_DTYPES[dtype_name]
    if dtype is torch.float32:
        return None
    if dtype is torch.bfloat16:
        return RoundedTensor(tensor)
    return ScaledTensor(tensor, dtype, keeps_positive=keeps_positive)
