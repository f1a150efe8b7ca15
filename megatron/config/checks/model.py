"""Checks of the model: its shape, positions, recomputation, adapters, MLA and multi-token prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.config.checks.base import Check, divisors
from megatron.config.checks.parallelism import LAYOUT_FIELDS
from megatron.config.run_config import RunConfig
from megatron.config.training_config import NATIVE_FORMAT
from megatron.core.config_base import field_specs
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import STRETCH_FIELDS, GPTConfig, flags_without_argument
from megatron.core.parallel_sizes import MODEL_SIZE_NAMES
from megatron.core.transformer.lora_targets import adapted_parts
from megatron.core.transformer.transformer_config import GATED_ACTIVATIONS

_MOST_VALUES = 10**13
"""More than a rank can hold of anything: the memory of twenty GPUs of 2 TB."""


def _check_head_width(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_attention_heads <= 0 or model.multi_latent_attention:
        # Heads of latent attention have widths of their own.
        return
    is_derived = model.kv_channels == model.hidden_size // model.num_attention_heads
    if is_derived and model.hidden_size % model.num_attention_heads != 0:
        yield (
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads "
            f"{model.num_attention_heads}; numbers of heads that work: {divisors(model.hidden_size, 128)} "
            "(or give --kv-channels)"
        )


def _check_feed_forward_width(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.ffn_hidden_size == 0 and model.hidden_size > 0:
        gate = "--geglu" if model.geglu else "--swiglu"
        yield f"--hidden-size {model.hidden_size} is too small for {gate}'s default width; give --ffn-hidden-size"


def _check_gate(config: RunConfig) -> Iterator[str]:
    model = config.model
    offset, limit = model.glu_linear_offset, model.activation_func_clamp_value
    given = {"--glu-linear-offset": offset or None, "--activation-func-clamp-value": limit}
    for name, value in given.items():
        if value is not None and not model.is_gated:
            yield f"{name} {value} is of gated feed-forward layers; add --swiglu, --geglu or --quick-geglu"


def _check_query_groups(config: RunConfig) -> Iterator[str]:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if groups > 0 and heads > 0 and heads % groups != 0:
        yield (
            f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; "
            f"numbers of groups that work: {divisors(heads, heads)}"
        )


def _check_positions(config: RunConfig) -> Iterator[str]:
    length, positions = config.data.seq_length, config.model.max_position_embeddings
    if config.model.position_embedding_type == "learned_absolute" and length > positions:
        yield (
            f"--seq-length {length} is greater than --max-position-embeddings {positions}, and positions are "
            f"learned; give --max-position-embeddings {length} or a shorter sequence"
        )


def _check_sequence_length(config: RunConfig) -> Iterator[str]:
    if config.data.seq_length == 0:
        yield "--seq-length is missing; give the number of tokens of one sample"


def _check_rotary(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.position_embedding_type != "rope":
        if model.use_rope_scaling:
            yield (
                "--use-rope-scaling has no effect with --position-embedding-type "
                f"{model.position_embedding_type}; add --position-embedding-type rope"
            )
        return
    if not 0 < model.rotary_percent <= 1:
        yield f"--rotary-percent {model.rotary_percent}: a value above 0 and up to 1 is expected"
    elif not model.multi_latent_attention and (model.rotary_dim % 2 != 0 or model.rotary_dim == 0):
        yield (
            f"rotary positions turn {model.rotary_dim} of {model.kv_channels} channels of a head, but need "
            "an even number; change --kv-channels or --num-attention-heads, or use --rotary-percent "
            f"{1.0 if model.kv_channels % 2 == 0 else 2 / model.kv_channels}"
        )
    if model.rope_scaling_low_freq_factor >= model.rope_scaling_high_freq_factor:
        yield (
            f"--rope-scaling-low-freq-factor {model.rope_scaling_low_freq_factor} must be smaller than "
            f"--rope-scaling-high-freq-factor {model.rope_scaling_high_freq_factor}"
        )


def _check_windows(config: RunConfig) -> Iterator[str]:
    model = config.model
    try:
        _ = dataclasses.replace(model, window_attn_skip_freq=None).layer_windows
    except ValueError as error:
        yield f"--window-size {model.window_size}: {error}"
        return
    try:
        _ = model.layer_windows
    except ValueError as error:
        yield f"--window-attn-skip-freq {model.window_attn_skip_freq}: {error}"


def _check_norms(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.qk_layernorm_across_heads and model.normalization != "RMSNorm":
        yield (
            f"--qk-layernorm-across-heads is not built for --normalization {model.normalization}; "
            "use --normalization RMSNorm"
        )
    if model.apply_residual_connection_post_layernorm and model.norm_placement != "before":
        yield (
            "--apply-residual-connection-post-layernorm carries the norms before attention and feed-forward on, and "
            f"--norm-placement is {model.norm_placement}; leave one of them out"
        )


def _check_format(config: RunConfig) -> Iterator[str]:
    flags, wanted = flags_without_argument(config.model), config.checkpoint.ckpt_format
    sizes = config.parallel_sizes
    if wanted == "torch" and config.model.num_experts is not None and not _has_files_of_experts(config.model):
        yield (
            f"--ckpt-format torch of a run has no place for --expert-tensor-parallel-size {sizes.expert_tp} beside "
            f"--tensor-model-parallel-size {sizes.tp}, --expert-model-parallel-size {sizes.ep} and "
            f"--num-query-groups {config.model.num_query_groups}; use --ckpt-format torch_dist or {NATIVE_FORMAT}"
        )
    if wanted != NATIVE_FORMAT and flags:
        yield (
            f"--ckpt-format {wanted} cannot hold a model with {', '.join(flags)}, which Megatron's arguments do not "
            f"know; use --ckpt-format {NATIVE_FORMAT}"
        )


def _has_files_of_experts(model: GPTConfig) -> bool:
    """Tell whether the ranks with the first copy of the experts have a file each, and all of what goes into it."""
    tp, ep, etp = model.tensor_model_parallel_size, model.expert_model_parallel_size, model.parallel_sizes.expert_tp
    shares_groups = model.num_query_groups % tp != 0
    return etp == tp or (tp % etp == 0 and ep * etp % tp == 0 and not shares_groups)


def _check_recompute(config: RunConfig) -> Iterator[str]:
    model = config.model
    granularity, method = model.recompute_granularity, model.recompute_method
    selective = {
        "--recompute-activations": model.recompute_activations,
        "--moe-layer-recompute": model.moe_layer_recompute,
    }
    given = [name for name, value in selective.items() if value]
    if given and granularity == "full":
        yield f"{' and '.join(given)} and --recompute-granularity full exclude each other; keep one"
    elif granularity == "full" and method is None:
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if granularity != "full":
        if method is not None:
            yield f"--recompute-method {method} has no effect without --recompute-granularity full; add it"
        return
    layers = model.recompute_num_layers
    if method is not None and layers is None:
        yield f"--recompute-method {method} needs --recompute-num-layers"
    elif layers is not None and layers > model.num_layers:
        yield (
            f"--recompute-num-layers {layers} is greater than --num-layers {model.num_layers}; "
            f"values from 1 to {model.num_layers} work"
        )


def _check_adapted_layers(config: RunConfig) -> Iterator[str]:
    names = config.model.lora_target_modules
    try:
        adapted_parts(names, config.model.is_gated)
    except ValueError as error:
        yield f"--lora-target-modules {' '.join(names)}: {error}"


def _check_adapted_stages(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.lora_rank or min(model.pipeline_model_parallel_size, model.num_layers) < 1:
        return
    try:
        stages = config.stage_layout
    except ConfigurationError:
        return  # Said by the check of the layout.
    chunks = [chunk for rank in range(model.pipeline_model_parallel_size) for chunk in stages.chunks(rank)]
    if not all(chunk.layer_numbers for chunk in chunks):
        yield (
            "--lora-rank trains adapters of layers, and a pipeline stage has none of these "
            f"({stages.describe()}); give each stage a layer"
        )


def _check_beside_adapters(config: RunConfig) -> Iterator[str]:
    if not config.model.lora_rank:
        return
    refused = f"--lora-rank {config.model.lora_rank}:"
    if config.training.cuda_graph_impl == "local":
        yield f"{refused} --cuda-graph-impl local records layers behind trained ones; use --cuda-graph-impl none"
    if config.checkpoint.save is not None and config.checkpoint.ckpt_format != NATIVE_FORMAT:
        yield (
            f"{refused} --ckpt-format {config.checkpoint.ckpt_format} has no place for adapters; use --ckpt-format "
            f"{NATIVE_FORMAT}, and merge or export its checkpoints with tools/checkpoint/convert.py"
        )
    if config.optimizer.decoupled_lr is not None:
        yield (
            f"{refused} --decoupled-lr is of the word embedding and the output layer, which are not trained; leave it "
            "out"
        )


def _check_parameters(config: RunConfig) -> Iterator[str]:
    model = config.model
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if ranks < 1:
        return
    attention = model.hidden_size * 2 * (model.query_projection_size + model.kv_projection_size)
    feed_forward = model.hidden_size * model.ffn_hidden_size * (3 if model.is_gated else 2)
    rows = model.vocab_size or config.tokenizer.vocab_size or 0
    if model.position_embedding_type == "learned_absolute":
        rows += model.max_position_embeddings
    total = model.num_layers * (attention + feed_forward) + rows * model.hidden_size
    if total > _MOST_VALUES * ranks:
        yield (
            f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --ffn-hidden-size "
            f"{model.ffn_hidden_size} --num-attention-heads {model.num_attention_heads}: about {total:.1e} parameters, "
            f"{total // ranks:.1e} on each of tensor({model.tensor_model_parallel_size}) x "
            f"pipeline({model.pipeline_model_parallel_size}) ranks; no machine holds more than {_MOST_VALUES:.0e}: "
            "give a smaller model, or more ranks"
        )


def _check_activations(config: RunConfig) -> Iterator[str]:
    model, length, micro = config.model, config.data.seq_length, config.training.micro_batch_size
    values = length * micro * model.hidden_size // max(model.context_parallel_size, 1)
    if values > _MOST_VALUES:
        yield (
            f"--seq-length {length} x --micro-batch-size {micro} x --hidden-size {model.hidden_size} over "
            f"context({model.context_parallel_size}) ranks: {values:.1e} hidden values; no machine holds more than "
            f"{_MOST_VALUES:.0e}: lower one of them"
        )


MODEL_CHECKS = (
    Check(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
            *("vocab_size", "max_position_embeddings", *MODEL_SIZE_NAMES),
        ),
        _check_parameters,
    ),
    Check(("seq_length", "micro_batch_size", "hidden_size", "context_parallel_size"), _check_activations),
    Check(("hidden_size", "num_attention_heads", "kv_channels"), _check_head_width),
    Check(("hidden_size", "ffn_hidden_size"), _check_feed_forward_width),
    Check(("num_attention_heads", "num_query_groups"), _check_query_groups),
    Check(("seq_length", "max_position_embeddings", "position_embedding_type"), _check_positions),
    Check(("seq_length",), _check_sequence_length),
    Check(
        ("hidden_size", "num_attention_heads", "kv_channels", "rotary_percent", "position_embedding_type"),
        _check_rotary,
    ),
    Check(("normalization", "norm_placement"), _check_norms),
    Check(("glu_linear_offset", "activation_func_clamp_value"), _check_gate),
    Check(("ckpt_format", "num_experts", "expert_tensor_parallel_size"), _check_format),
    Check(("num_layers", "window_size", "window_attn_skip_freq"), _check_windows),
    Check(("num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers"), _check_recompute),
    Check(("lora_rank", "lora_target_modules", *GATED_ACTIVATIONS), _check_adapted_layers),
    Check(("lora_rank", *LAYOUT_FIELDS), _check_adapted_stages),
    Check(("lora_rank", "cuda_graph_impl", "save", "ckpt_format", "decoupled_lr"), _check_beside_adapters),
)


def _check_layers_without_rotary(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.no_rope_freq is None:
        return
    given = f"--no-rope-freq {model.no_rope_freq}"
    try:
        _ = model.layers_without_rotary
    except ValueError as error:
        yield f"{given}: {error}"
        return
    if model.position_embedding_type != "rope":
        yield (
            f"{given} has no effect with --position-embedding-type {model.position_embedding_type}; use "
            "--position-embedding-type rope, or leave it out"
        )
    if model.multi_latent_attention:
        yield f"{given} beside --multi-latent-attention is not built; leave --no-rope-freq out"


ATTENTION_CHECKS = (
    Check(
        ("no_rope_freq", "num_layers", "position_embedding_type", "multi_latent_attention"),
        _check_layers_without_rotary,
    ),
)


def _check_mla_shape(config: RunConfig) -> Iterator[str]:
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


def _check_mla_conflicts(config: RunConfig) -> Iterator[str]:
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


MLA_CHECKS = (
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
        _check_mla_shape,
    ),
    Check(
        (
            *("multi_latent_attention", "lora_rank", "query_pre_attn_scalar", "cuda_graph_impl"),
            *("qk_layernorm_across_heads", "add_qkv_bias", "use_rope_scaling", "rotary_base_local"),
            *("rotary_seq_len_interpolation_factor", "rotary_percent", "rotary_interleaved", "tp_comm_overlap"),
        ),
        _check_mla_conflicts,
    ),
)


def _check_mtp_shape(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.data.seq_length
    if model.mtp_num_layers is None or model.mtp_num_layers < 1:
        return
    given = f"--mtp-num-layers {model.mtp_num_layers}"
    if model.mtp_num_layers >= length > 1:
        yield f"{given} predicts tokens beyond the end of --seq-length {length}; values from 1 to {length - 1} work"
    if model.position_embedding_type == "learned_absolute":
        yield (
            f"{given} embeds tokens without learned positions; use --position-embedding-type rope or "
            "--no-position-embedding"
        )
    tensor = model.tensor_model_parallel_size
    if tensor > 0 and model.hidden_size % tensor:
        yield (
            f"{given}: --hidden-size {model.hidden_size} is not divisible by --tensor-model-parallel-size {tensor}; "
            f"sizes that work: {divisors(model.hidden_size, 64)}"
        )


def _check_mtp_conflicts(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.mtp_num_layers is None:
        return
    given = f"--mtp-num-layers {model.mtp_num_layers}:"
    if model.lora_rank:
        yield f"{given} low-rank adapters beside it are not built; leave --lora-rank out, or --mtp-num-layers"
    if config.training.cuda_graph_impl == "local":
        yield f"{given} its layers are not recorded by --cuda-graph-impl local; use --cuda-graph-impl none"


MTP_CHECKS = (
    Check(
        ("mtp_num_layers", "seq_length", "position_embedding_type", "hidden_size", "tensor_model_parallel_size"),
        _check_mtp_shape,
    ),
    Check(("mtp_num_layers", "lora_rank", "cuda_graph_impl"), _check_mtp_conflicts),
)
