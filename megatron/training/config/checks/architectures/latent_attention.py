"""Checks of latent attention: its widths, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config_base import field_specs
from megatron.core.models.gpt.gpt_config import STRETCH_FIELDS, GPTConfig
from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig


def _check_shape(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.stretches_positions and model.rotary_base <= 1:
        yield f"--rotary-base {model.rotary_base} has no frequencies that YaRN can stretch; give 2 or more"
    if not model.multi_latent_attention:
        if "mla_up_proj" in model.recomputed_modules:
            yield "--recompute-modules mla_up_proj has no effect without --multi-latent-attention; leave it out"
        return
    given = "--multi-latent-attention"
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.qk_pos_emb_head_dim
    if groups != heads:
        yield (
            f"{given} has keys and values for every head, and --num-query-groups {groups} shares them; leave it out, "
            f"or give --num-query-groups {heads}"
        )
    if model.position_embedding_type != "rope":
        yield (
            f"{given} has rotary positions, not --position-embedding-type {model.position_embedding_type}; use "
            "--position-embedding-type rope"
        )
    if width % 2:
        yield f"--qk-pos-emb-head-dim {width}: rotary positions turn pairs of channels; give {width + 1}"


def _check_yarn(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.multi_latent_attention:
        return
    if model.rope_type != "yarn":
        for spec in field_specs(GPTConfig):
            value = getattr(model, spec.name)
            if spec.name in STRETCH_FIELDS and value != spec.default:
                yield f"{spec.typed(value)} has no effect without --rope-type yarn or --multi-latent-attention; add one"
        return
    if model.position_embedding_type != "rope":
        yield (
            f"--rope-type yarn stretches rotary positions, and --position-embedding-type is "
            f"{model.position_embedding_type}; use --position-embedding-type rope, or leave --rope-type out"
        )
    others = {
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
    }
    for name, is_given in others.items():
        if is_given:
            yield f"--rope-type yarn and {name} both scale rotary frequencies; leave one of them out"


def _check_beside(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.multi_latent_attention:
        return
    others = {
        "--lora-rank": model.lora_rank > 0,
        "--query-pre-attn-scalar": model.query_pre_attn_scalar is not None,
        "--qk-layernorm-across-heads": model.qk_layernorm_across_heads,
        "--add-qkv-bias": model.add_qkv_bias,
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-percent": model.rotary_percent != 1.0,
        "--rotary-interleaved": model.rotary_interleaved,
        "--rotary-base-local": model.rotary_base_local is not None,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
        "--tp-comm-overlap": model.tp_comm_overlap,
    }
    for name, is_given in others.items():
        if is_given:
            yield f"--multi-latent-attention beside {name} is not built; leave {name} out"
    if config.training.cuda_graph_impl == "local":
        yield ("--multi-latent-attention beside --cuda-graph-impl local is not built; use --cuda-graph-impl none")


CHECKS = (
    Check(
        (
            *("multi_latent_attention", "rope_type", "position_embedding_type", "use_rope_scaling"),
            "rotary_seq_len_interpolation_factor",
        ),
        _check_yarn,
    ),
    Check(
        (
            *("multi_latent_attention", "num_attention_heads", "num_query_groups", "position_embedding_type"),
            *("qk_pos_emb_head_dim", "rope_type", "rotary_base", "rotary_scaling_factor"),
        ),
        _check_shape,
    ),
    Check(
        (
            *("multi_latent_attention", "lora_rank", "query_pre_attn_scalar", "cuda_graph_impl"),
            *("qk_layernorm_across_heads", "add_qkv_bias", "use_rope_scaling", "rotary_base_local"),
            *("rotary_seq_len_interpolation_factor", "rotary_percent", "rotary_interleaved", "tp_comm_overlap"),
        ),
        _check_beside,
    ),
)
