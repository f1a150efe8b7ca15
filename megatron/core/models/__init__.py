"""Complete models built from transformer blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.models.fp8_layers import compute_in_float8, describe_float8, weight_quantizers
    from megatron.core.models.model import Model, wrap_model

__getattr__ = lazy_exports(
    __name__,
    {
        "fp8_layers": "compute_in_float8 describe_float8 weight_quantizers",
        "model": "Model wrap_model",
    },
)
