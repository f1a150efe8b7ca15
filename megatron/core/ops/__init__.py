"""Operators: attention, GEMMs, activations, dropout, cross-entropy, and FP8 quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.ops.attention_backend import (
        PLAIN_BACKENDS,
        AttentionCall,
        describe_missing_flash,
        select_attention_core,
    )
    from megatron.core.ops.attention_block import AttentionBlocks, BlockMask, merge_block
    from megatron.core.ops.attention_pattern import CAUSAL, AttentionPattern, SelectedKeys
    from megatron.core.ops.attention_sinks import merge_sinks, sinks_gradient
    from megatron.core.ops.cross_entropy import normalizer_and_label_logits, overwrite_with_gradient
    from megatron.core.ops.dot_product_attention import AttentionCore, AttentionInputs
    from megatron.core.ops.dropout import (
        AttentionDropout,
        DropoutKeys,
        DropoutSamples,
        RowKeys,
        drop_hidden,
        hash_numbers,
        keyed_dropout,
    )
    from megatron.core.ops.flash_implementation import (
        FlashShape,
        activate_flash_implementation,
        active_flash_implementation,
    )
    from megatron.core.ops.four_bit import (
        BLOCK_SIZE,
        GROUP_SIZE,
        Tables,
        dequantize_blocks,
        dequantize_scales,
        make_tables,
        quantize_blocks,
        quantize_scales,
    )
    from megatron.core.ops.fp8_groups import (
        PaddedGroups,
        QuantizedGroups,
        grouped_scaled_product,
        has_scaled_groups,
        quantize_activated,
        quantize_activation_gradient,
        quantize_groups,
        quantize_weights,
        unfinished_scaled_gradient,
    )
    from megatron.core.ops.fp8_quantizers import Float8Recipe, Float8State, Fp8Quantizers, weights_kept
    from megatron.core.ops.fp8_tensor import (
        E4M3,
        ROWS,
        WHOLE,
        Blocks,
        Quantized,
        has_scaled_products,
        quantize,
        scale_of,
        scaled_operands,
        scaled_product,
    )
    from megatron.core.ops.gated_activation import gated_kind_of
    from megatron.core.ops.gemm import (
        Groups,
        RowCounts,
        RowEnds,
        add_rows,
        add_wide_product,
        adds_wide_products,
        gradient_library,
        group_gradient,
        grouped_gradient,
        grouped_product,
        has_grouped_kernel,
        has_library,
        lengthened_group,
        linear,
        linear_into,
        product,
        row_counts,
        unfinished_grouped_gradient,
        uses_onednn,
        why_no_wide_products,
    )
    from megatron.core.ops.gemm_activation import (
        FusedActivation,
        activation_input_gradient,
        linear_with_activation,
    )
    from megatron.core.ops.nvfp4_quantizers import Nvfp4Quantizers
    from megatron.core.ops.nvfp4_tensor import has_nvfp4_products
    from megatron.core.ops.sparse_attention import (
        attention_of_all_heads,
        index_scores,
        indexer_divergence,
        select_keys,
    )
    from megatron.core.ops.token_rows import (
        RowOrder,
        add_groups,
        combine_gradients,
        combine_rows,
        gather_rows,
        sum_rows,
        weights_gradient,
    )
    from megatron.core.ops.transformer_engine import (
        TRANSFORMER_ENGINE,
        EngineNorm,
        transformer_engine_for,
        why_no_transformer_engine,
    )
    from megatron.core.ops.triton_support import casts_on_triton, casts_to_float8, runs_on_triton, triton_works

__getattr__ = lazy_exports(
    __name__,
    {
        "attention_backend": "AttentionCall PLAIN_BACKENDS describe_missing_flash select_attention_core",
        "attention_block": "AttentionBlocks BlockMask merge_block",
        "attention_pattern": "AttentionPattern CAUSAL SelectedKeys",
        "attention_sinks": "merge_sinks sinks_gradient",
        "cross_entropy": "normalizer_and_label_logits overwrite_with_gradient",
        "dot_product_attention": "AttentionCore AttentionInputs",
        "dropout": "AttentionDropout DropoutKeys DropoutSamples RowKeys drop_hidden hash_numbers keyed_dropout",
        "four_bit": (
            "BLOCK_SIZE GROUP_SIZE Tables dequantize_blocks dequantize_scales make_tables quantize_blocks "
            "quantize_scales"
        ),
        "flash_implementation": "FlashShape activate_flash_implementation active_flash_implementation",
        "fp8_groups": (
            "PaddedGroups QuantizedGroups grouped_scaled_product has_scaled_groups quantize_activated "
            "quantize_activation_gradient quantize_groups quantize_weights unfinished_scaled_gradient"
        ),
        "fp8_quantizers": "Float8Recipe Float8State Fp8Quantizers weights_kept",
        "fp8_tensor": (
            "Blocks E4M3 Quantized ROWS WHOLE has_scaled_products quantize scale_of scaled_operands scaled_product"
        ),
        "gated_activation": "gated_kind_of",
        "gemm": (
            "Groups RowCounts RowEnds add_rows add_wide_product adds_wide_products gradient_library group_gradient "
            "grouped_gradient grouped_product has_grouped_kernel has_library lengthened_group linear linear_into "
            "product row_counts unfinished_grouped_gradient uses_onednn why_no_wide_products"
        ),
        "gemm_activation": "FusedActivation activation_input_gradient linear_with_activation",
        "nvfp4_quantizers": "Nvfp4Quantizers",
        "nvfp4_tensor": "has_nvfp4_products",
        "sparse_attention": "attention_of_all_heads index_scores indexer_divergence select_keys",
        "token_rows": "RowOrder add_groups combine_gradients combine_rows gather_rows sum_rows weights_gradient",
        "transformer_engine": "EngineNorm TRANSFORMER_ENGINE transformer_engine_for why_no_transformer_engine",
        "triton_support": "casts_on_triton casts_to_float8 runs_on_triton triton_works",
    },
)
