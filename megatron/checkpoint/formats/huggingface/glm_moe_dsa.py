"""GLM-5: DeepSeek-V3.2 with an indexer that rotates pairs of channels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.deepseek_v32 import DeepseekV32Family


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
