"""Dtypes by name, and the dtype for arithmetic that must not run in low precision."""

from __future__ import annotations

import torch

from megatron.core.errors import ConfigurationError

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def dtype_from_name(name: str) -> torch.dtype:
    """Return the torch dtype of a name in the configuration, such as ``bfloat16``."""
    return _DTYPES[name]


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in the configuration.

    Raises:
        ConfigurationError: parameters cannot have this dtype.
    """
    for name, known in _DTYPES.items():
        if known == dtype:
            return name
    raise ConfigurationError(f"params_dtype is {dtype}; supported dtypes: {', '.join(map(str, _DTYPES.values()))}")


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for losses, softmax, norms and sums of values stored as ``dtype``.

    float32 for every lower precision. float64 stays float64, so that a float64 run uses float64 throughout.
    """
    return torch.promote_types(dtype, torch.float32)
