"""Run a check in a process of its own in which Triton's programs are interpreted on the CPU."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron.core.ops import triton_support
from tests.harness.distributed import run_distributed
from tests.harness.triton_interpreter import multiply_bfloat16

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
# In float32 the last places also hold what sums in another order and another exponential leave there.
# The interpreter cuts a float32 down to bfloat16 where a GPU rounds it: one unit of the last place.
ULP = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def interpret(check: Callable[..., Any], *args: Any, world_size: int = 1) -> None:
    """Call a module-level function, which imports programs itself, on some ranks."""
    run_distributed(world_size, check, *args, timeout_s=60.0, settings=(("TRITON_INTERPRET", "1"),))


_multiply_bfloat16_once = functools.cache(multiply_bfloat16)


@contextmanager
def cpu_runs_on_triton() -> Iterator[None]:
    """Let the choice between Triton and torch fall on Triton for tensors on the CPU."""
    _multiply_bfloat16_once()
    triton_support._DEVICE = "cpu"
    try:
        assert triton_support.triton_works()
        yield
    finally:
        triton_support._DEVICE = "cuda"


def close(actual: torch.Tensor, expected: torch.Tensor, units: int = 1) -> None:
    """Compare with more precise values: so many units of the last place of the largest are allowed."""
    error = float((actual.double() - expected.double()).detach().abs().max())
    allowed = units * ULP[actual.dtype] * float(expected.detach().abs().max())
    assert error <= allowed, f"{error} apart, {allowed} allowed"
