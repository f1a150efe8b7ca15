"""Attention with linear biases (ALiBi): the slope of each head, and the width of heads that carry the biases.

Press et al. 2021, https://arxiv.org/abs/2108.12409. Importing this module does not import torch.
"""

from __future__ import annotations

SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Width of the integers that a dtype represents exactly."""
_USUAL_LENGTH = 2**16
_LARGEST_EXPONENT = 8.0


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head: powers of 2 with equally spaced exponents, for the last head 2^-8.

    If the number of heads is not a power of 2, the slopes are taken from the next power of 2: first every second slope,
    then the others.
    """
    total = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-_LARGEST_EXPONENT * number / total) for number in range(1, total + 1)]
    return tuple(slopes if total == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def num_digits(params_dtype: str, num_positions: int) -> int:
    """Return the number of digits of a position; the dtype represents each digit exactly."""
    return max(1, -(-(num_positions - 1).bit_length() // SIGNIFICANT_BITS[params_dtype]))


def num_parts(params_dtype: str) -> int:
    """Return the number of summands of a slope; their sum has at least the accuracy of float32."""
    return -(-SIGNIFICANT_BITS["float32"] // SIGNIFICANT_BITS[params_dtype])


def extended_head_width(head_width: int, params_dtype: str, num_positions: int = _USUAL_LENGTH) -> int:
    """Return the width of a head with a channel per digit and part, a multiple of 8 as kernels require."""
    return -(-(head_width + num_digits(params_dtype, num_positions) * num_parts(params_dtype)) // 8) * 8
