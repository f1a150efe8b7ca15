"""megatron-core's decorator of functions that it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def jit_fuser(function: Function) -> Function:
    """Return the function unchanged: it runs without compilation, with the same results."""
    return function
