"""Corrections of Triton's interpreter, which multiplies bfloat16 as integers and rounds to it toward zero."""

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


def round_to_bfloat16() -> None:
    """Round float32 to the nearest bfloat16, and to the even one of two, as a GPU does. Call it once per process."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_rounded(data: Any, source: Any, target: Any, *others: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(data, source, target, *others)
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    interpreter._convert_float = convert_rounded


def _widened(handle: Any) -> Any:
    """Return an operand in float32, which has the bits of bfloat16 in its upper half."""
    from triton.language import float32
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar.name != "bf16":
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)
