"""Nemotron-H: layers of one part each, Mamba-2, attention without positions, MLP or experts, by a pattern."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import FULL, ExpertNames, norm_links
from megatron.checkpoint.formats.huggingface.deepseek_v3 import SharedExpertFamily, further_layers
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.mamba_layers import LINEAR, MambaFamily, read_kinds
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_KINDS = {LINEAR: "M", "moe": "E", FULL: "*", "mlp": "-"}
_MTP, _PARTS_OF_MTP = "mtp.", [FULL, "moe"]
"""Prefix of the names of the MTP module's tensors, and the kinds of its layers."""
_OTHER_NAMES = {
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


class NemotronHFamily(MambaFamily, SharedExpertFamily):
    """Nemotron-H and Nemotron 3 (``NemotronHForCausalLM``)."""

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    base_prefix = "backbone."
    other_names = (("backbone.", "model."),)
    default_positions, default_groups, default_head_dim = 4096, 8, 128
    default_epsilon, epsilon_name = 1e-5, "layer_norm_epsilon"
    activation = ("mlp_hidden_act", "relu2", "squared_relu")
    embedding_name, final_norm, attention_name, mlp_name = "embeddings", "norm_f", "mixer", "mixer"
    mlp_names = ("up_proj", "down_proj")
    mamba_name = "mixer"
    mamba_sizes: Mapping[str, tuple[str, int]] = MappingProxyType(
        {
            "mamba_num_heads": ("mamba_num_heads", 128),
            "mamba_head_dim": ("mamba_head_dim", 64),
            "n_groups": ("mamba_num_groups", 8),
            "ssm_state_size": ("mamba_state_dim", 128),
            "conv_kernel": ("mamba_conv_kernel_dim", 4),
        }
    )
    mamba_biases = ("use_conv_bias", "use_bias")
    norm_names = (("input_layernorm", "norm"),)
    expert_names = ExpertNames("mixer.gate", "mixer.experts")
    shared_name, bias_name = "mixer.shared_experts", "mixer.gate.e_score_correction_bias"
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 7688,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        }
    )

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration; the number of layers is the number of their kinds."""
        found = {name: settings.values.get(other) for other, name in _OTHER_NAMES.items()}
        settings = settings.replaced({name: value for name, value in found.items() if value is not None})
        kinds = settings.values.get("layers_block_type") or settings.values.get("hybrid_override_pattern")
        symbols = read_kinds(settings, "layers_block_type", kinds or list(_KINDS), _KINDS)
        return super().read_config(
            settings.replaced({"hybrid_override_pattern": symbols, "num_hidden_layers": len(symbols)})
        )

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return no fields: attention has no positions."""
        return {}

    def layers_with_experts(self, settings: Settings) -> str:
        """Return the default of ``--moe-layer-freq``: the pattern says which layers have experts."""
        return "1"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of layers, Mamba-2 and MoE; reject biases and tied weights."""
        for name in ("attention_bias", "mlp_bias"):
            settings.require(name, False, False, "biases of attention and MLP are not supported")
        settings.require("tie_word_embeddings", False, False, "the architecture has an output layer of its own")
        settings.require("mamba_hidden_act", "silu", "silu", "it is the activation of the convolution")
        pattern = settings.text("hybrid_override_pattern", "")
        fields: dict[str, Any] = {"hybrid_override_pattern": pattern, "position_embedding_type": "none"}
        if "M" in pattern:
            # transformers limits the step size in the scan by the least initial one.
            fields |= {"mamba_dt_lower_limit": settings.number("time_step_min", 0.001), **self.mamba_fields(settings)}
        if "E" in pattern:
            shared = settings.integer("moe_shared_expert_intermediate_size", 7688)
            fields |= self.experts_of(settings) | {"moe_shared_expert_intermediate_size": shared}
            if settings.values.get("moe_latent_size") is not None:
                fields["moe_latent_size"] = settings.integer("moe_latent_size")
            fields["mtp_num_layers"] = self.num_modules(settings)
        return fields

    def num_modules(self, settings: Settings) -> int | None:
        """Return the number of MTP modules; reject modules without attention and experts, and more than one."""
        number, name = further_layers(settings, _MTP), "mtp_layers_block_type"
        if not number:
            return None
        if number > 1:
            settings.refuse(f"num_nextn_predict_layers is {number}; published models have one MTP module or none")
        kinds = settings.values.get(name) or settings.values.get("mtp_hybrid_override_pattern")
        if kinds is not None and read_kinds(settings, name, kinds, _KINDS) != "*E":
            settings.refuse(f"{name} is {kinds!r:.60}; only {_PARTS_OF_MTP} is supported")
        return number

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of router, latent projections, experts and shared expert."""
        yield from super().expert_layer_links(config, ours, theirs)
        if config.moe.moe_latent_size is not None:
            shape = (config.moe.moe_latent_size, config.hidden_size)
            for name, own in (("fc1_latent_proj", shape), ("fc2_latent_proj", shape[::-1])):
                yield whole(f"{ours}mlp.{name}.weight", f"{theirs}mixer.{name}.weight", own)

    def mtp_links(self, config: GPTConfig) -> Iterator[TensorLink]:
        """Yield the links of the MTP module, which transformers ignores: two layers, whose parts one layer has here."""
        if not config.mtp.mtp_depth:
            return
        ours, first, second, width = "model.mtp.layers.0.", f"{_MTP}layers.0.", f"{_MTP}layers.1.", config.hidden_size
        within = f"{ours}transformer_layer."
        yield whole(f"{ours}eh_proj.weight", f"{first}eh_proj.weight", (width, 2 * width))
        yield from self.mixer_links(config, within, first, config.parts_of(config.num_layers))
        yield from self.expert_layer_links(config, within, second)
        for native, foreign in (
            *((f"{ours}{name}", f"{first}{name}") for name in ("enorm", "hnorm")),
            *((f"{within}input_layernorm", f"{first}norm"), (f"{within}pre_mlp_layernorm", f"{second}norm")),
            (f"{ours}final_layernorm", f"{second}final_layernorm"),
        ):
            yield from norm_links(config, native, foreign)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        names = {symbol: kind for kind, symbol in _KINDS.items()}
        settings = super().write_settings(config) | {
            "layers_block_type": [names.get(symbol, "mlp") for symbol in config.hybrid_layers.replace(" ", "")],
            "moe_latent_size": config.moe.moe_latent_size,
            "moe_shared_expert_intermediate_size": config.moe.moe_shared_expert_intermediate_size or 1,
            "time_step_min": config.hybrid.mamba_dt_lower_limit,
        }
        if config.mtp.mtp_depth:
            settings["mtp_layers_block_type"] = _PARTS_OF_MTP
        # Without experts, their number is absent; the other settings of experts have no effect.
        return {name: value for name, value in settings.items() if value is not None and not name.startswith("rope_")}
