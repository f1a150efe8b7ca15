"""Kernels in Triton's language and the autograd functions that launch them. Only code that uses Triton imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.ops.triton.activation import PLAIN_KINDS, activate_with_bias
    from megatron.core.ops.triton.column_sums import sum_parts
    from megatron.core.ops.triton.fp8_cast import cast_and_transpose
    from megatron.core.ops.triton.probe import probe_float8
    from megatron.core.ops.triton.query_key_value import split_with_bias

__getattr__ = lazy_exports(
    __name__,
    {
        "activation": "PLAIN_KINDS activate_with_bias",
        "column_sums": "sum_parts",
        "fp8_cast": "cast_and_transpose",
        "probe": "probe_float8",
        "query_key_value": "split_with_bias",
    },
)
