"""Checks of hybrid models: the pattern of layers, the shapes of recurrent layers, and unsupported combinations."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from megatron.config import RunConfig
from megatron.config.checks.parallelism import LAYOUT_FIELDS, Check
from megatron.core.config_base import field_specs
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import (
    ATTENTION_AND_MAMBA,
    GATED_ACTIVATIONS,
    LINEAR_ATTENTION,
    MOE,
    RECURRENT_KINDS,
    SPARSE_ATTENTION,
    HybridConfig,
    LayerParts,
    MLAConfig,
    RotaryConfig,
    recurrent_kinds_of,
)

_OF_ATTENTION = (
    *("attention_output_gate", "multi_latent_attention", "qk_layernorm", "window_size", "softmax_type"),
    *("attn_logit_softcapping", "no_rope_freq", "qk_clip", "clip_qkv", "log_max_attention_logit"),
    *("v_layernorm", "attention_k_eq_v", "global_kv_channels", "global_num_query_groups"),
    *("add_qkv_bias", "disable_qkv_bias", "add_proj_bias", "disable_proj_bias"),
)
_OF_FEED_FORWARD = (*GATED_ACTIVATIONS, "xielu", "mlp_output_multiplier", "gemm_activation_fusion")
_GIVEN_FOR_ATTENTION = (
    *("softmax_scale", "query_pre_attn_scalar", "use_rotary_position_embeddings", "rotary_base", "rotary_base_local"),
    *("rotary_ntk_alpha", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rope_scaling_factor", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
    "rope_scaling_original_max_position_embeddings",
    *(spec.name for spec in field_specs(RotaryConfig)),
)
_GIVEN_FOR_FEED_FORWARD = ("squared_relu", "openai_gelu", "activation_func")
"""Fields that checkpoints of Megatron-LM contain for every model, so that only given flags are rejected."""


def _given(model: GPTConfig) -> str:
    """Return the flag that makes the model hybrid, as typed."""
    hybrid = model.hybrid
    if hybrid.hybrid_override_pattern is not None:
        return f"--hybrid-override-pattern {hybrid.hybrid_override_pattern}"
    return f"--experimental-attention-variant {hybrid.experimental_attention_variant}"


def _parts(model: GPTConfig) -> tuple[LayerParts, ...]:
    """Return the parts of the layers, or nothing if another check reports an invalid pattern."""
    try:
        return model.layer_parts
    except ValueError:
        return ()


def _check_pattern(config: RunConfig) -> Iterator[str]:
    model, hybrid = config.model, config.model.hybrid
    if not hybrid.is_hybrid:
        return
    if hybrid.has_linear_attention:
        if hybrid.hybrid_override_pattern is not None:
            kinds = [RECURRENT_KINDS[name] for name in LINEAR_ATTENTION]
            *most, last = (f"{kind.symbol} for {kind.title}" for kind in kinds)
            symbols = f"{', '.join(most)} and {last}"
            yield (
                f"--experimental-attention-variant {hybrid.experimental_attention_variant} and "
                f"--hybrid-override-pattern exclude each other; omit one of them (the pattern's symbols are {symbols})"
            )
            return
        if hybrid.linear_attention_freq is None:
            yield (
                f"{_given(model)} needs --linear-attention-freq; pass 4 for attention in every 4th layer, or a list "
                "with 1 for layers with linear attention"
            )
            return
    try:
        parts = model.layer_parts
    except ValueError as error:
        # An invalid list of experts has its own check.
        if hybrid.hybrid_override_pattern is not None:
            yield f"{_given(model)}: {error}"
        elif f"{error}" not in _moe_problem(model):
            yield f"--linear-attention-freq {hybrid.linear_attention_freq}: {error}"
        return
    if hybrid.has_linear_attention and not any(each.mixer in LINEAR_ATTENTION for each in parts):
        yield (
            f"--linear-attention-freq {hybrid.linear_attention_freq} gives linear attention to none of the "
            f"{model.num_layers} layers; use a list with a 1, or omit {_given(model)}"
        )
    if hybrid.hybrid_override_pattern is not None:
        yield from _check_single_branches(config)


def _moe_problem(model: GPTConfig) -> str:
    try:
        _ = model.moe_layers
    except ValueError as error:
        return str(error)
    return ""


def _check_single_branches(config: RunConfig) -> Iterator[str]:
    """Reject what needs layers with attention and feed-forward, and experts without layers or layers without them."""
    model = config.model
    given, has_experts = _given(model), any(each.feed_forward == MOE for each in model.layer_parts)
    if has_experts and model.moe.num_experts is None:
        yield f"{given} has layers of experts (E); add --num-experts"
    if model.moe.num_experts is not None and not has_experts:
        yield f"{given} has no layer of experts (E) for --num-experts {model.moe.num_experts}; omit it"
    if model.moe.moe_layer_freq.strip() != "1":
        yield f"{given} determines the layers of experts; omit --moe-layer-freq {model.moe.moe_layer_freq}"
    others = {
        f"--norm-placement {model.norm_placement}": model.norm_placement != "pre",
        "--use-parallel-residual": model.use_parallel_residual,
        "--apply-residual-connection-post-layernorm": model.apply_residual_connection_post_layernorm,
    }
    for name, is_given in others.items():
        if is_given:
            yield f"{given} is not supported with {name}, which needs layers with attention and FFN; omit {name}"
    layers = model.layer_parts
    has_both = any(each.has_attention for each in layers) and any(each.feed_forward for each in layers)
    if model.mtp.mtp_num_layers is not None and not has_both:
        yield (
            f"--mtp-num-layers {model.mtp.mtp_num_layers}: the layer of an MTP module has attention and experts or an "
            f"MLP, which {given} does not have; use a pattern with * and with E or -"
        )


def _check_shapes(config: RunConfig) -> Iterator[str]:
    model, hybrid = config.model, config.model.hybrid
    parts = _parts(model)
    if not parts:
        return
    kinds, has_attention = recurrent_kinds_of(parts), any(each.has_attention for each in parts)
    has_both = any(each.mixer == ATTENTION_AND_MAMBA for each in parts)
    for spec in field_specs(HybridConfig):
        name, value = spec.name, getattr(hybrid, spec.name)
        # Another check reports flags that need a pattern.
        is_checked = spec.options.needs == "hybrid_override_pattern" and hybrid.hybrid_override_pattern is None
        if value == spec.default or is_checked:
            continue
        readers = [kind for kind in RECURRENT_KINDS.values() if kind.reads(name)]
        is_read, layers = any(kind in kinds for kind in readers), " or ".join(kind.title for kind in readers) + " layer"
        if name.startswith("parallel_"):
            is_read, layers = has_both, "layer of attention and Mamba-2"
        elif not readers:
            continue
        if not is_read:
            yield f"{spec.typed(value)} has no effect: the model has no {layers}; omit it"
    absent = {} if has_attention else dict.fromkeys(_OF_ATTENTION, "attention")
    if not any(each.feed_forward for each in parts):
        absent |= dict.fromkeys(_OF_FEED_FORWARD, "feed-forward")
    for name, part in absent.items():
        found = config.flag(name)
        if found is not None and found[1] != found[0].default:
            yield f"{found[0].typed(found[1])} has no effect: the model has no {part} layer; omit it"
    if not has_attention and model.position_embedding_type == "alibi":
        yield "--position-embedding-type alibi has no effect: the model has no attention layer; use none"
    # Kinds of linear attention have the same checks.
    problems = (kind.check_shapes(hybrid, model.hidden_size, model) for kind in kinds)
    yield from dict.fromkeys(itertools.chain.from_iterable(problems))


def flags_of_absent_layers(config: RunConfig, given: Collection[str]) -> Iterator[str]:
    """Yield a problem for each given flag of attention or feed-forward in a hybrid model without such layers.

    ``given`` are the names of the fields that the command line sets. A checkpoint's arguments may set them.
    """
    model, parts = config.model, _parts(config.model)
    if not model.hybrid.is_hybrid or not parts:
        return
    absent: dict[str, str] = {}
    if not any(each.has_attention for each in parts):
        absent = dict.fromkeys(_GIVEN_FOR_ATTENTION, "attention")
        if model.position_embedding_type == "rope" and "position_embedding_type" in given:
            yield "--position-embedding-type rope has no effect: the model has no attention layer; use none"
    if not any(each.feed_forward for each in parts):
        absent |= dict.fromkeys(_GIVEN_FOR_FEED_FORWARD, "feed-forward")
    for name, part in absent.items():
        found = config.flag(name) if name in given else None
        if found is None:
            continue
        spec, value = found
        # A known function becomes a field of its own.
        typed = f"--activation-func {model.activation}" if name == "activation_func" else spec.typed(value)
        if value != spec.default or name == "activation_func":
            yield f"{typed} has no effect: the model has no {part} layer; omit it"


def _check_exchanges(config: RunConfig) -> Iterator[str]:
    """Reject communication types of context parallelism that the layers do not have.

    In a list of communication types, all recurrent layers have the same type.
    """
    model, parts = config.model, _parts(config.model)
    exchanges, own, context = model.cp_comm_type, model.recurrent_cp_comm_type, model.context_parallel_size
    if context <= 1 or not parts:
        return
    if not any(each.recurrence for each in parts):
        if own != "a2a":
            yield f"--recurrent-cp-comm-type {own} has no effect: the model has no recurrent layer; omit it"
        return
    has_attention = any(each.has_attention for each in parts)
    if len(exchanges) == 1 and not has_attention and exchanges[0] not in ("p2p", own):
        yield (
            f"--cp-comm-type {exchanges[0]} has no effect: the model has no attention layer, and recurrent layers "
            f"have --recurrent-cp-comm-type {own}; omit it"
        )
    for number, (each, exchange) in enumerate(zip(parts, exchanges, strict=False)):
        if len(exchanges) == len(parts) and each.mixer in RECURRENT_KINDS and exchange != own:
            yield (
                f"--cp-comm-type {' '.join(exchanges)}: layer {number + 1} ({RECURRENT_KINDS[each.mixer].title}) "
                f"has --recurrent-cp-comm-type {own}, and not {exchange}; use {own} for it"
            )
            break


def _check_unsupported(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.hybrid.is_hybrid:
        return
    if config.optimizer.optimizer_offload_policy == "auto" and config.optimizer.optimizer_cpu_offload:
        name = "--optimizer-offload-policy auto"
        yield f"{_given(model)} is not supported with {name} yet; omit {name}"


_NEEDED_BY_SPARSE = {"dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048}
"""Flags that DSA needs, with the values of DeepSeek-V3.2."""


def _check_sparse(config: RunConfig) -> Iterator[str]:
    """Reject DSA without its flags, flags of DSA without it, and what its attention does not support."""
    model = config.model
    specs = {spec.name: spec for spec in field_specs(MLAConfig) if spec.name.startswith("dsa_")}
    given = f"--experimental-attention-variant {SPARSE_ATTENTION}"
    if not model.has_sparse_attention:
        for name, spec in specs.items():
            if getattr(model.mla, name) != spec.default and model.hybrid.experimental_attention_variant is not None:
                yield f"{spec.typed(getattr(model.mla, name))} has no effect without {given}; omit it"
        return
    if not model.mla.multi_latent_attention:
        yield f"{given} needs --multi-latent-attention; add it"
    for name, usual in _NEEDED_BY_SPARSE.items():
        if getattr(model.mla, name) is None:
            yield f"{given} needs {specs[name].flags[0]}; DeepSeek-V3.2 has {usual}"
    if model.mla.dsa_indexer_loss_coeff is None and not config.training.skip_train:
        yield (
            f"{given} needs --dsa-indexer-loss-coeff, without which the indexer is not trained; pass 1e-2, or 0 to "
            "keep a trained indexer as it is"
        )
    rotary, width = model.mla.qk_pos_emb_head_dim, model.mla.dsa_indexer_head_dim
    if width is not None and width < rotary and model.position_embedding_type == "rope":
        yield (
            f"--dsa-indexer-head-dim {width} is below --qk-pos-emb-head-dim {rotary}, the channels that are rotated; "
            f"use {rotary} or more"
        )
    yield from _check_indexers(config)
    pattern = model.hybrid.hybrid_override_pattern
    exchanges = " ".join(model.cp_comm_type)
    if model.context_parallel_size > 1 and set(model.cp_comm_type) != {"all_gather"}:
        yield f"{given} does not support --cp-comm-type {exchanges}; use --cp-comm-type all_gather"
    others = {
        f"--window-size {model.window_size}": model.window_size is not None,
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        f"--attn-logit-softcapping {model.attn_logit_softcapping}": model.attn_logit_softcapping is not None,
        f"--attention {model.attention}": model.attention != "self_attention",
        f"--linear-attention-freq {model.hybrid.linear_attention_freq}": model.hybrid.linear_attention_freq is not None,
        f"--hybrid-override-pattern {pattern}": pattern is not None,
    }
    for name, is_given in others.items():
        if is_given:
            yield f"{given} is not supported with {name}; omit {name}"


def _check_indexers(config: RunConfig) -> Iterator[str]:
    """Reject layers without an indexer that do not follow one in their model chunk."""
    model = config.model
    given = f"--dsa-indexer-layer-freq {model.mla.dsa_indexer_layer_freq}"
    try:
        has_indexer = model.layers_with_indexer
    except ValueError as error:
        yield f"{given}: {error}"
        return
    if all(has_indexer):
        return
    try:
        stages = config.stage_layout
    except ConfigurationError:
        return  # The check of the layout reports it.
    for rank in range(model.pipeline_model_parallel_size):
        for chunk in stages.chunks(rank):
            if chunk.layer_numbers and not has_indexer[chunk.layer_numbers[0]]:
                yield (
                    f"{given}: layer {chunk.layer_numbers[0] + 1} has no indexer, but starts a pipeline stage "
                    f"({stages.describe()}), which does not receive the keys that earlier layers selected; use stages "
                    "that start with an indexer"
                )
                return


HYBRID_CHECKS = (
    Check(
        (
            *LAYOUT_FIELDS,
            *("experimental_attention_variant", "hybrid_override_pattern", "linear_attention_freq", "skip_train"),
            *("multi_latent_attention", "qk_pos_emb_head_dim", "position_embedding_type", "context_parallel_size"),
            *(spec.name for spec in field_specs(MLAConfig) if spec.name.startswith("dsa_")),
            *("window_size", "softmax_type", "attn_logit_softcapping", "attention", "cp_comm_type"),
        ),
        _check_sparse,
    ),
    Check(
        (
            *("num_layers", "experimental_attention_variant", "linear_attention_freq", "hybrid_override_pattern"),
            *("num_experts", "moe_layer_freq", "norm_placement", "use_parallel_residual", "mtp_num_layers"),
            "apply_residual_connection_post_layernorm",
        ),
        _check_pattern,
    ),
    Check(
        (
            *(spec.name for spec in field_specs(HybridConfig)),
            *("num_layers", "hidden_size", "tensor_model_parallel_size", "context_parallel_size", *_OF_ATTENTION),
            "recurrent_cp_comm_type",
            *_OF_FEED_FORWARD,
            "position_embedding_type",
        ),
        _check_shapes,
    ),
    Check(
        (
            *("experimental_attention_variant", "linear_attention_freq", "hybrid_override_pattern", "num_layers"),
            *("cp_comm_type", "recurrent_cp_comm_type", "context_parallel_size"),
        ),
        _check_exchanges,
    ),
    Check(
        (
            *("experimental_attention_variant", "hybrid_override_pattern", "optimizer_offload_policy"),
            "optimizer_cpu_offload",
        ),
        _check_unsupported,
    ),
)
