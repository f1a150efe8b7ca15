"""The transformer: configuration, attention, MLP, norms, layers and the block of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.transformer.alibi import alibi_slopes
    from megatron.core.transformer.attention import SelfAttention, SharedGroupQueryKeyValue, describe_attention
    from megatron.core.transformer.cuda_graphs import GraphedLayers, GraphUnit
    from megatron.core.transformer.decoder_config import (
        GATED_ACTIVATIONS,
        INDEPENDENT_SCORES,
        INDEXER_LOSS,
        DecoderConfig,
        MLAConfig,
        MoEConfig,
        MTPConfig,
        RotaryConfig,
        default_ffn_hidden_size,
        further_loss_names,
        key_value_sources,
        moe_layers,
        without_rotary,
    )
    from megatron.core.transformer.dropout import HiddenDropout, keys_of_rank, require_keys
    from megatron.core.transformer.gated_attention import GatedAttention
    from megatron.core.transformer.gated_delta_net_kind import GATED_DELTA_NET
    from megatron.core.transformer.hybrid_config import (
        ATTENTION,
        ATTENTION_AND_MAMBA,
        LINEAR_ATTENTION,
        MOE,
        RECURRENT_KINDS,
        SPARSE_ATTENTION,
        SYMBOLS,
        HybridConfig,
        LayerParts,
        layer_parts,
        pattern_symbols,
        recurrent_kinds_of,
    )
    from megatron.core.transformer.kimi_delta_attention_kind import KIMI_DELTA_ATTENTION
    from megatron.core.transformer.kv_cache import KeyValueCache
    from megatron.core.transformer.layer_pattern import format_layer_pattern, parse_layer_pattern, parse_window
    from megatron.core.transformer.lora import add_adapters, quantize_base
    from megatron.core.transformer.lora_targets import (
        ADAPTERS,
        FOUR_BIT_BLOCK,
        GATE_UP,
        LINEAR_LAYERS,
        PART_OF,
        QUERY_KEY_VALUE,
        TRANSFORMER_LAYERS,
        WHOLE,
        adapted_parts,
        linear_layers_of,
        plain_names,
    )
    from megatron.core.transformer.mamba_kind import MAMBA
    from megatron.core.transformer.mlp import (
        ACTIVATIONS,
        MLP,
        FeedForward,
        MLPSubmodules,
        activation_of,
        megatron_activation,
        with_scaled_gate,
    )
    from megatron.core.transformer.multi_latent_attention import LatentAttention, ReplicatedLinear, join_heads
    from megatron.core.transformer.multi_token_prediction import (
        MTPLayer,
        MultiTokenPrediction,
        further_layer_numbers,
        further_losses,
        mtp_targets,
    )
    from megatron.core.transformer.norm import (
        Norm,
        ResidualNorm,
        ResidualSum,
        add_and_normalize,
        add_branch,
        make_norm,
        normalize,
    )
    from megatron.core.transformer.per_layer_input import PerLayerInputs
    from megatron.core.transformer.qk_clip import QueryKeyClip, largest_logits
    from megatron.core.transformer.recurrent_kind import RecurrentKind
    from megatron.core.transformer.rotary_pos_embedding import (
        RotaryAngles,
        RotaryEmbedding,
        apply_rotary,
        apply_rotary_to_both,
        factor_frequencies,
        proportional_frequencies,
        split_and_rotate,
        yarn_frequencies,
    )
    from megatron.core.transformer.shared_attention import BorrowingAttention
    from megatron.core.transformer.shared_tensors import (
        SharedTensors,
        read_message,
        split_inputs,
        write_message,
    )
    from megatron.core.transformer.sparse_attention import SparseLatentAttention
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.transformer.xielu import XIELU

__getattr__ = lazy_exports(
    __name__,
    {
        "alibi": "alibi_slopes",
        "attention": "SelfAttention SharedGroupQueryKeyValue describe_attention",
        "cuda_graphs": "GraphedLayers GraphUnit",
        "dropout": "HiddenDropout keys_of_rank require_keys",
        "gated_attention": "GatedAttention",
        "gated_delta_net_kind": "GATED_DELTA_NET",
        "hybrid_config": (
            "ATTENTION ATTENTION_AND_MAMBA LINEAR_ATTENTION MOE RECURRENT_KINDS SPARSE_ATTENTION SYMBOLS HybridConfig "
            "LayerParts layer_parts pattern_symbols recurrent_kinds_of"
        ),
        "kimi_delta_attention_kind": "KIMI_DELTA_ATTENTION",
        "kv_cache": "KeyValueCache",
        "layer_pattern": "format_layer_pattern parse_layer_pattern parse_window",
        "lora": "add_adapters quantize_base",
        "lora_targets": (
            "ADAPTERS FOUR_BIT_BLOCK GATE_UP LINEAR_LAYERS PART_OF QUERY_KEY_VALUE TRANSFORMER_LAYERS WHOLE "
            "adapted_parts linear_layers_of plain_names"
        ),
        "mamba_kind": "MAMBA",
        "mlp": "ACTIVATIONS FeedForward MLP MLPSubmodules activation_of megatron_activation with_scaled_gate",
        "multi_latent_attention": "LatentAttention ReplicatedLinear join_heads",
        "multi_token_prediction": "MTPLayer MultiTokenPrediction further_layer_numbers further_losses mtp_targets",
        "norm": "Norm ResidualNorm ResidualSum add_and_normalize add_branch make_norm normalize",
        "per_layer_input": "PerLayerInputs",
        "qk_clip": "QueryKeyClip largest_logits",
        "recurrent_kind": "RecurrentKind",
        "rotary_pos_embedding": (
            "RotaryAngles RotaryEmbedding apply_rotary apply_rotary_to_both factor_frequencies "
            "proportional_frequencies split_and_rotate yarn_frequencies"
        ),
        "shared_attention": "BorrowingAttention",
        "shared_tensors": "SharedTensors read_message split_inputs write_message",
        "sparse_attention": "SparseLatentAttention",
        "spec_utils": "ModuleSpec build_module",
        "transformer_block": "TransformerBlock",
        "decoder_config": (
            "GATED_ACTIVATIONS INDEPENDENT_SCORES INDEXER_LOSS MLAConfig MTPConfig MoEConfig RotaryConfig "
            "DecoderConfig default_ffn_hidden_size further_loss_names key_value_sources moe_layers without_rotary"
        ),
        "transformer_config": "MLATransformerConfig TransformerConfig",
        "transformer_layer": "TransformerLayer",
        "xielu": "XIELU",
    },
)
