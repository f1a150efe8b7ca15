"""Names of Megatron-LM's former ``megatron.mpu``: process groups, tensor-parallel layers, regions and RNG states.

They have the signatures of megatron-core 0.16.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Return a name of `megatron.core.tensor_parallel` or `megatron.core.parallel_state`."""
    for module in ("tensor_parallel", "parallel_state"):
        try:
            return getattr(importlib.import_module(f"megatron.core.{module}"), name)
        except AttributeError:
            continue
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
