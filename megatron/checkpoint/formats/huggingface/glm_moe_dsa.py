"""GLM-5: DeepSeek-V3.2 with indexers in some layers, which rotate pairs of channels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import layer_frequency
from megatron.checkpoint.formats.huggingface.deepseek_v32 import DeepseekV32Family
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_FULL, _SHARED = "full", "shared"


class GlmMoeDsaFamily(DeepseekV32Family):
    """GLM-5 (``GlmMoeDsaForCausalLM``)."""

    model_type = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    default_positions = 202752
    default_epsilon = 1e-5
    default_index_heads = 32
    interleaves_index = True
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        }
    )
    latent_defaults: Mapping[str, Any] = MappingProxyType(
        {"q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "v_head_dim": 256}
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MLA, its indexers, MoE and MTP; reject unsupported settings."""
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        kinds = settings.values.get("indexer_types")
        if kinds is None:
            kinds = _kinds_of_schedule(settings, layers)
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {_FULL, _SHARED}:
            settings.refuse(
                f"indexer_types is {kinds!r:.40}; {_FULL} or {_SHARED} for each of the {layers} layers is expected"
            )
        elif kinds[0] != _FULL:
            settings.refuse(
                f"the first of indexer_types is {_SHARED}; {_FULL} is expected, since no layer is before it"
            )
        else:
            is_full = [kind == _FULL for kind in kinds]
            return super().own_fields(settings) | {"dsa_indexer_layer_freq": layer_frequency(is_full)}
        return super().own_fields(settings)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        kinds = [_FULL if has_indexer else _SHARED for has_indexer in config.layers_with_indexer]
        return super().write_settings(config) | {"indexer_types": kinds}


def _kinds_of_schedule(settings: Settings, layers: int) -> Any:
    """Return the kinds of the layers by a pattern, such as FSSF, or by a number of layers per indexer."""
    pattern = settings.values.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [{"F": _FULL, "S": _SHARED}.get(symbol, symbol) for symbol in pattern]
    if pattern is not None:
        return pattern
    every, offset = settings.values.get("index_topk_freq", 1), settings.values.get("index_skip_topk_offset", 2)
    if type(every) is not int or type(offset) is not int:
        settings.refuse(f"index_topk_freq {every!r} and index_skip_topk_offset {offset!r} must be integers")
        return [_FULL] * layers
    return [_FULL if max(layer - offset + 1, 0) % max(every, 1) == 0 else _SHARED for layer in range(layers)]
