"""Triton kernels and the autograd functions that launch them. Only code that uses Triton imports this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.ops.triton.activation import GATED_KINDS, PLAIN_KINDS, activate_with_bias, gated_activation
    from megatron.core.ops.triton.adamw import AdamWNumbers, update_adamw
    from megatron.core.ops.triton.causal_convolution import convolution_gradients, convolve
    from megatron.core.ops.triton.column_sums import MAX_TOTALS, sum_parts
    from megatron.core.ops.triton.cross_entropy import normalizer_and_label_logits, overwrite_with_gradient
    from megatron.core.ops.triton.dropout_keys import keys_of_sites, write_states
    from megatron.core.ops.triton.fp8_cast import cast_and_transpose
    from megatron.core.ops.triton.fp8_gated_cast import cast_gated_gradient_with_scale, cast_gated_with_scale
    from megatron.core.ops.triton.fp8_gated_gradient import cast_gated_gradients
    from megatron.core.ops.triton.fp8_group_cast import cast_groups
    from megatron.core.ops.triton.fp8_scaled_cast import amaxes, cast_rows, cast_segments, cast_squares, scales_of
    from megatron.core.ops.triton.gated_delta_rule import gated_delta_rule_gradients, gated_delta_rule_output
    from megatron.core.ops.triton.gated_norm import MAX_GROUP_WIDTH, gate_and_normalize
    from megatron.core.ops.triton.gemm_activation import activation_input_gradient, linear_with_activation
    from megatron.core.ops.triton.nvfp4_cast import cast_to_nvfp4, nvfp4_amaxes
    from megatron.core.ops.triton.probe import probe_float8
    from megatron.core.ops.triton.query_key_value import rotate_query_and_key, split_and_rotate, split_with_bias
    from megatron.core.ops.triton.residual import MAX_WIDTH, add_and_normalize, drop_hidden
    from megatron.core.ops.triton.selective_scan import scan_chunks, scan_gradients
    from megatron.core.ops.triton.token_rows import add_groups, combine_gradients, gather_rows, sum_rows

__getattr__ = lazy_exports(
    __name__,
    {
        "activation": "GATED_KINDS PLAIN_KINDS activate_with_bias gated_activation",
        "adamw": "AdamWNumbers update_adamw",
        "causal_convolution": "convolution_gradients convolve",
        "column_sums": "MAX_TOTALS sum_parts",
        "cross_entropy": "normalizer_and_label_logits overwrite_with_gradient",
        "dropout_keys": "keys_of_sites write_states",
        "fp8_cast": "cast_and_transpose",
        "fp8_gated_cast": "cast_gated_with_scale cast_gated_gradient_with_scale",
        "fp8_gated_gradient": "cast_gated_gradients",
        "fp8_group_cast": "cast_groups",
        "fp8_scaled_cast": "amaxes cast_rows cast_segments cast_squares scales_of",
        "gated_delta_rule": "gated_delta_rule_gradients gated_delta_rule_output",
        "gated_norm": "MAX_GROUP_WIDTH gate_and_normalize",
        "gemm_activation": "activation_input_gradient linear_with_activation",
        "nvfp4_cast": "cast_to_nvfp4 nvfp4_amaxes",
        "probe": "probe_float8",
        "query_key_value": "rotate_query_and_key split_and_rotate split_with_bias",
        "residual": "MAX_WIDTH add_and_normalize drop_hidden",
        "selective_scan": "scan_chunks scan_gradients",
        "token_rows": "add_groups combine_gradients gather_rows sum_rows",
    },
)
