"""Granite 4: Granite's multipliers, Mamba-2 or attention in each layer, and a shared MLP, with or without experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import expert_fields
from megatron.checkpoint.formats.huggingface.deepseek_v3 import count_of
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.granite import GraniteMoeFamily
from megatron.checkpoint.formats.huggingface.mamba_layers import MambaDecoderFamily, read_mixers, written_mixers
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class GraniteMoeHybridFamily(MambaDecoderFamily, GraniteMoeFamily):
    """Granite 4 (``GraniteMoeHybridForCausalLM``)."""

    model_type = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    mlp_name = "shared_mlp"
    mlp_names = ("input_linear", "output_linear")
    norm_names = GraniteMoeFamily.norm_names
    bias_settings = GraniteMoeFamily.bias_settings

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of multipliers, layers, positions and MoE."""
        experts, shared = count_of(settings, "num_local_experts", 8), settings.integer("shared_intermediate_size", 1024)
        fields = self.multipliers(settings) | self.layers_of(settings, read_mixers(settings), "E" if experts else "-")
        if settings.text("position_embedding_type", "") != "rope":
            fields["position_embedding_type"] = "none"
        if not experts:
            return fields | {"ffn_hidden_size": shared}
        routed = expert_fields(settings, experts, settings.integer("intermediate_size"), 2)
        return fields | routed | {"moe_shared_expert_intermediate_size": shared}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        moe = config.moe
        return super().write_settings(config) | {
            "intermediate_size": moe.moe_ffn_hidden_size or config.ffn_hidden_size,
            "layer_types": written_mixers(config),
            "num_local_experts": moe.num_experts or 0,
            "position_embedding_type": "rope" if config.position_embedding_type == "rope" else None,
            "shared_intermediate_size": moe.moe_shared_expert_intermediate_size or config.ffn_hidden_size,
        }

    def fc1_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the link of a dense layer's gate and up projections, which are one tensor in the files."""
        yield self._gated_link(f"{ours}mlp.", theirs, config, config.ffn_hidden_size)

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's router, experts and shared expert."""
        yield from super().expert_layer_links(config, ours, theirs)
        ffn, ours = config.moe.moe_shared_expert_intermediate_size or 0, f"{ours}mlp.shared_experts."
        yield self._gated_link(ours, theirs, config, ffn)
        yield whole(f"{ours}linear_fc2.weight", f"{theirs}shared_mlp.output_linear.weight", (config.hidden_size, ffn))

    def _gated_link(self, ours: str, theirs: str, config: GPTConfig, ffn: int) -> TensorLink:
        shape = (2 * ffn, config.hidden_size)
        return whole(f"{ours}linear_fc1.weight", f"{theirs}shared_mlp.input_linear.weight", shape)
