"""The library, independent of command lines, run folders and logging.

Its modules and the names below can be imported as from megatron-core, whose release it follows (``__version__``).
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.16.1"

_MODULES = {
    "parallel_state": "parallel_state",
    "mpu": "parallel_state",
    "tensor_parallel": "tensor_parallel",
    "utils": "utils",
}


def __getattr__(name: str) -> Any:
    """Import a module or a name of megatron-core when it is first used; ``mpu`` is `parallel_state`."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name == "ModelParallelConfig":
        return importlib.import_module(f"{__name__}.model_parallel_config").ModelParallelConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
