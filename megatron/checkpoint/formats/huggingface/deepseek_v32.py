"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with DeepSeek sparse attention (DSA)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.deepseek_v3 import DeepseekV3Family, count_of, typed_layers, written_layers
from megatron.checkpoint.formats.huggingface.family import TensorLink, rotated_rows, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import SPARSE_ATTENTION

_INDEXED = "indexed_attention"


class DeepseekV32Family(DeepseekV3Family):
    """DeepSeek-V3.2 (``DeepseekV32ForCausalLM``), whose indexer rotates the halves of its first channels."""

    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    default_positions = 163840
    default_index_heads = 64
    interleaves_index = False
    """Whether the indexer rotates pairs of adjacent channels."""

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MLA, its indexer, MoE and MTP; reject unsupported settings."""
        settings.require("mlp_bias", False, False, "biases of the feed-forward layer are not supported")
        if settings.values.get("q_lora_rank", 0) is None:
            settings.refuse("q_lora_rank is missing; the indexer's queries are computed from the query's latent vector")
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        settings.require("layer_types", [_INDEXED] * layers, [_INDEXED] * layers, "every layer has an indexer")
        width, rotated = settings.integer("index_head_dim", 128), settings.integer("qk_rope_head_dim", 64)
        if width < rotated:
            settings.refuse(f"index_head_dim is {width}; it contains the {rotated} channels of qk_rope_head_dim")
        return super().own_fields(settings) | {
            "experimental_attention_variant": SPARSE_ATTENTION,
            "dsa_indexer_n_heads": settings.integer("index_n_heads", self.default_index_heads),
            "dsa_indexer_head_dim": width,
            "dsa_indexer_topk": settings.integer("index_topk", 2048),
        }

    def layers_with_experts(self, settings: Settings) -> str:
        """Return the value of ``--moe-layer-freq``; reject a model whose layers are all dense."""
        return typed_layers(settings, count_of(settings, "first_k_dense_replace", 3))

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings, mla = super().write_settings(config), config.mla
        del settings["rope_interleave"]
        return settings | {
            **written_layers(config),
            "index_head_dim": mla.dsa_indexer_head_dim,
            "index_n_heads": mla.dsa_indexer_n_heads,
            "index_topk": mla.dsa_indexer_topk,
        }

    def links(self, config: GPTConfig) -> Iterator[TensorLink]:
        """Yield every link, the links of the indexers last."""
        yield from super().links(config)
        for number in filter(config.has_indexer, range(config.num_layers + config.mtp.mtp_depth)):
            further = number - config.num_layers
            ours = f"decoder.layers.{number}" if further < 0 else f"mtp.layers.{further}.transformer_layer"
            ours = f"model.{ours}.self_attention.core_attention.indexer."
            yield from self.indexer_links(config, ours, f"{self.base_prefix}layers.{number}.self_attn.indexer.")

    def indexer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of an indexer, whose rotated channels are the first, and ours the last, in pairs."""
        mla, width = config.mla, config.hidden_size
        heads, channels, rotated = mla.dsa_indexer_n_heads or 0, mla.dsa_indexer_head_dim or 0, mla.qk_pos_emb_head_dim
        tensors = (
            ("linear_wq_b.weight", "wq_b.weight", heads, (mla.q_lora_rank or 0,)),
            ("linear_wk.weight", "wk.weight", 1, (width,)),
            *((f"k_norm.{kind}", f"k_norm.{kind}", 1, ()) for kind in ("weight", "bias")),
        )
        for native, foreign, number, trailing in tensors:
            names, has_pairs = (f"{ours}{native}", f"{theirs}{foreign}"), self.interleaves_index
            yield from rotated_rows(names, number, channels, rotated, trailing, has_pairs=has_pairs)
        yield whole(f"{ours}linear_weights_proj.weight", f"{theirs}weights_proj.weight", (heads, width))
