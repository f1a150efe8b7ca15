"""Matmuls of bfloat16 in Triton's interpreter, which multiplies the bits of such numbers as integers."""

from __future__ import annotations

from typing import Any

import numpy as np


def multiply_bfloat16() -> None:
    """Let ``tl.dot`` take bfloat16 operands, of which the interpreter has the 16 bits. Call it once per process."""
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def multiply_widened(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        return multiply(builder, _widened(left), _widened(right), *others)

    InterpreterBuilder.create_dot = multiply_widened


def _widened(handle: Any) -> Any:
    """Return an operand in float32, which has the bits of bfloat16 in its upper half."""
    from triton.language import float32
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar.name != "bf16":
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)
