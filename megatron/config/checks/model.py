"""Checks of the model: its shape, attention, mixture of experts, low-rank adapters, FP8 and NVFP4."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import count

from megatron.config import NATIVE_FORMAT, RunConfig
from megatron.config.checks.parallelism import (
    ATTENTION_SHAPE,
    LAYOUT_FIELDS,
    Check,
    attention_shapes,
    query_groups,
)
from megatron.core.config_base import field_specs, field_value, with_fields
from megatron.core.errors import ConfigurationError, choices, divisors
from megatron.core.models.gpt import STRETCH_FIELDS, GPTConfig, flags_without_argument
from megatron.core.parallel_config import MODEL_SIZE_NAMES
from megatron.core.pipeline_parallel import layout_problems, mtp_modules_per_stage
from megatron.core.registry import is_registered
from megatron.core.transformer import (
    FOUR_BIT_BLOCK,
    GATED_ACTIVATIONS,
    HybridConfig,
    LayerParts,
    RecurrentKind,
    adapted_parts,
    recurrent_kinds_of,
)

_PATTERN = ("num_layers", "experimental_attention_variant", "linear_attention_freq", "hybrid_override_pattern")
_MOST_VALUES = 10**13
"""Upper bound of the memory of a rank in bytes: twenty GPUs of 2 TB."""


def _check_head_width(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_attention_heads <= 0 or model.mla.multi_latent_attention:
        # MLA heads have separate dimensions.
        return
    is_derived = model.kv_channels == model.hidden_size // model.num_attention_heads
    if is_derived and model.hidden_size % model.num_attention_heads != 0:
        yield (
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {model.num_attention_heads}; "
            f"numbers of heads that work: {divisors(model.hidden_size, 128)} (or set --kv-channels)"
        )


def _check_feed_forward_width(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.ffn_hidden_size == 0 and model.hidden_size > 0:
        gate = "--geglu" if model.geglu else "--swiglu"
        if model.activation_func is not None:
            gate = f"--activation-func {model.activation_func}"
        yield (
            f"--hidden-size {model.hidden_size} is too small for the default FFN size with {gate}; set "
            "--ffn-hidden-size"
        )


def _check_gate(config: RunConfig) -> Iterator[str]:
    model = config.model
    offset, limit = model.glu_linear_offset, model.activation_func_clamp_value
    given = {"--glu-linear-offset": offset or None, "--activation-func-clamp-value": limit}
    given["--mlp-gate-multiplier"] = None if model.mlp_gate_multiplier == 1.0 else model.mlp_gate_multiplier
    for name, value in given.items():
        if value is not None and not model.is_gated:
            yield f"{name} {value} applies only to gated FFN layers; add --swiglu, --geglu or --quick-geglu"


_IN_GEMMS = ("gelu_tanh", "gelu", "squared_relu")
"""Activations that the GEMMs of --gemm-activation-fusion compute."""


def _check_gemm_activation(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.gemm_activation_fusion and model.activation not in _IN_GEMMS:
        yield (
            f"--gemm-activation-fusion does not support the activation {model.activation}, only GELU and "
            "--squared-relu; omit it"
        )


def _check_query_groups(config: RunConfig) -> Iterator[str]:
    model = config.model
    heads = model.num_attention_heads
    for flag, groups in query_groups(model).items():
        if groups > 0 and heads > 0 and heads % groups != 0:
            yield (
                f"--num-attention-heads {heads} is not divisible by {flag} {groups}; "
                f"numbers of groups that work: {divisors(heads, heads)}"
            )


def _check_positions(config: RunConfig) -> Iterator[str]:
    length, positions = config.data.seq_length, config.model.max_position_embeddings
    if config.model.position_embedding_type == "learned_absolute" and length > positions:
        yield (
            f"--seq-length {length} is greater than --max-position-embeddings {positions}, but position embeddings are "
            f"learned; use --max-position-embeddings {length}, or a shorter --seq-length"
        )
    kind, offset = config.model.position_embedding_type, config.model.position_embedding_offset
    if offset and kind not in ("learned_absolute", "sinusoidal"):
        yield (
            f"--position-embedding-offset {offset} has no effect with --position-embedding-type {kind}; omit it, or "
            "use learned_absolute or sinusoidal"
        )
    if kind == "sinusoidal" and config.model.hidden_size < 4:
        yield "--position-embedding-type sinusoidal needs two frequencies; use --hidden-size 4 or more"


def _check_sequence_length(config: RunConfig) -> Iterator[str]:
    if config.data.seq_length == 0:
        yield "--seq-length is missing; pass the number of tokens per sample"


def _check_rotary(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.position_embedding_type != "rope":
        if model.use_rope_scaling:
            yield (
                "--use-rope-scaling has no effect with --position-embedding-type "
                f"{model.position_embedding_type}; add --position-embedding-type rope"
            )
        if model.qk_layernorm_after_rope:
            yield (
                "--qk-layernorm-after-rope has no effect with --position-embedding-type "
                f"{model.position_embedding_type}; add --position-embedding-type rope, or omit it"
            )
        if model.longrope_long_factor:
            yield (
                "--longrope-long-factor has no effect with --position-embedding-type "
                f"{model.position_embedding_type}; add --position-embedding-type rope, or omit it"
            )
        return
    for name, factors in (
        ("--longrope-short-factor", model.longrope_short_factor),
        ("--longrope-long-factor", model.longrope_long_factor),
    ):
        if factors and (len(factors) != model.rotary_dim // 2 or min(factors) <= 0):
            yield (
                f"{name} {' '.join(map(str, factors[:8]))}: {model.rotary_dim // 2} numbers greater than 0 are "
                "expected, one per two rotated channels of a head"
            )
    if not 0 < model.rotary_percent <= 1:
        yield f"--rotary-percent {model.rotary_percent}: a value above 0 and up to 1 is expected"
    elif not model.mla.multi_latent_attention:
        for own, flag, _ in attention_shapes(model):
            if own.rotary_dim == 0 or own.rotary_width % 2:
                yield (
                    f"rotary position embeddings rotate {own.rotary_dim} of the {own.kv_channels} channels per head, "
                    f"but need an even number; change {flag} or --num-attention-heads, or use --rotary-percent "
                    f"{1.0 if own.kv_channels % 2 == 0 else 2 / own.kv_channels}"
                )
    if model.rotary_ntk_alpha != 1.0 and model.rotary_dim == 2:
        yield (
            f"--rotary-ntk-alpha {model.rotary_ntk_alpha} scales the frequencies of 4 or more rotated channels per "
            "head, but the heads have 2; increase --kv-channels or --rotary-percent, or omit it"
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
        return
    if all(model.layer_windows):
        given = {
            "--global-kv-channels": model.global_kv_channels is not None,
            "--global-num-query-groups": model.global_num_query_groups is not None,
            "--attention-k-eq-v": model.attention_k_eq_v,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            yield f"{flag} has no effect, because every layer has a window; omit it, or set --window-attn-skip-freq"


def _check_norms(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.qk_layernorm_across_heads and model.normalization != "RMSNorm":
        yield (
            f"--qk-layernorm-across-heads is not supported with --normalization {model.normalization}; "
            "use --normalization RMSNorm"
        )
    if model.apply_layernorm_1p and is_registered("normalization", model.normalization):
        yield (
            f"--apply-layernorm-1p is not supported with --normalization {model.normalization}, which a script "
            "registered; omit it"
        )
    without_weight = {"--v-layernorm": model.v_layernorm, "--moe-router-norm": model.moe.moe_router_norm}
    for flag in (flag for flag, is_given in without_weight.items() if is_given):
        if is_registered("normalization", model.normalization):
            yield (
                f"{flag} is not supported with --normalization {model.normalization}, which a script registered; "
                "omit it"
            )
    if model.norm_parameters != "all" and is_registered("normalization", model.normalization):
        yield (
            f"--norm-parameters {model.norm_parameters} is not supported with --normalization {model.normalization}, "
            "which a script registered; omit it"
        )
    is_whole = len(model.norm_parameter_names) == (2 if model.normalization == "LayerNorm" else 1)
    if model.transformer_impl == "transformer_engine" and not is_whole:
        yield (
            f"--norm-parameters {model.norm_parameters} with --normalization {model.normalization} is not supported by "
            "transformer-engine's norms; use --transformer-impl local"
        )
    if model.norm_parameters == "none" and model.apply_layernorm_1p:
        yield "--apply-layernorm-1p changes the weight of norms, but --norm-parameters is none; omit one of them"
    if model.qk_layernorm_per_head and is_registered("normalization", model.normalization):
        yield (
            f"--qk-layernorm-per-head is not supported with --normalization {model.normalization}, which a script "
            "registered; omit it"
        )
    if model.norm_parameters == "none" and model.qk_layernorm_per_head:
        yield "--qk-layernorm-per-head has weights, but --norm-parameters is none; omit one of them"
    if model.norm_parameters == "none" and model.qk_layernorm_across_heads:
        yield "--qk-layernorm-across-heads has a weight, but --norm-parameters is none; omit one of them"
    if model.shared_parallel_norm and model.norm_placement == "post":
        yield (
            "--shared-parallel-norm needs a norm before attention and FFN, but --norm-placement is post; omit one of "
            "them"
        )
    if model.apply_residual_connection_post_layernorm and model.norm_placement != "pre":
        yield (
            "--apply-residual-connection-post-layernorm needs norms before attention and FFN, but --norm-placement is "
            f"{model.norm_placement}; omit one of them"
        )


def _check_format(config: RunConfig) -> Iterator[str]:
    flags, wanted = flags_without_argument(config.model), config.checkpoint.ckpt_format
    sizes = config.parallel_sizes
    if wanted == "torch" and config.model.moe.num_experts is not None and not _has_files_of_experts(config.model):
        yield (
            "--ckpt-format torch does not support this combination of --expert-tensor-parallel-size "
            f"{sizes.expert_tp}, --tensor-model-parallel-size {sizes.tp}, --expert-model-parallel-size {sizes.ep} and "
            f"--num-query-groups {config.model.num_query_groups}; use --ckpt-format torch_dist or {NATIVE_FORMAT}"
        )
    if wanted != NATIVE_FORMAT and flags:
        yield (
            f"--ckpt-format {wanted} cannot store a model with {', '.join(flags)}, for which Megatron has no "
            f"arguments; use --ckpt-format {NATIVE_FORMAT}"
        )


def _has_files_of_experts(model: GPTConfig) -> bool:
    """Return whether each rank of the first expert replica writes one file, and holds all of its contents."""
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
        yield f"{' and '.join(given)} and --recompute-granularity full exclude each other; omit one of them"
    elif granularity == "full" and method is None:
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if granularity != "full":
        if method is not None:
            yield f"--recompute-method {method} has no effect without --recompute-granularity full; add this flag"
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
    if not names:
        return
    try:
        linear_layers = config.model.linear_layers
    except ValueError:
        return  # The check of the pattern reports it.
    try:
        adapted_parts(names, config.model.is_gated, linear_layers)
    except ValueError as error:
        yield f"--lora-target-modules {' '.join(names)}: {error}"


def _check_adapted_stages(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.lora_rank or min(model.pipeline_model_parallel_size, model.num_layers) < 1:
        return
    try:
        stages = config.stage_layout
    except ConfigurationError:
        return  # The check of the layout reports it.
    chunks = [chunk for rank in range(model.pipeline_model_parallel_size) for chunk in stages.chunks(rank)]
    if not all(chunk.layer_numbers for chunk in chunks):
        yield (
            f"--lora-rank trains adapters of layers, but a pipeline stage has no layer ({stages.describe()}); assign a "
            "layer to each stage"
        )


def _check_beside_adapters(config: RunConfig) -> Iterator[str]:
    if not config.model.lora_rank:
        return
    refused = f"--lora-rank {config.model.lora_rank}:"
    if config.training.cuda_graph_impl == "local":
        yield f"{refused} --cuda-graph-impl local does not support LoRA; use --cuda-graph-impl none"
    if config.checkpoint.save is not None and config.checkpoint.ckpt_format != NATIVE_FORMAT:
        yield (
            f"{refused} --ckpt-format {config.checkpoint.ckpt_format} cannot store LoRA adapters; use --ckpt-format "
            f"{NATIVE_FORMAT}, and merge or export its checkpoints with tools/checkpoint/convert.py"
        )
    if config.optimizer.decoupled_lr is not None:
        yield (
            f"{refused} --decoupled-lr {config.optimizer.decoupled_lr} has no effect under LoRA, because embeddings "
            "and output layer are frozen; omit it"
        )


def _check_quantized_base(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.lora_base_quantization is None:
        return
    refused = f"--lora-base-quantization {model.lora_base_quantization}:"
    if model.fp8.is_quantized:
        yield f"{refused} {_asked(config)} quantizes the same weights to {_kind(config)}; omit one of them"
    if model.cpu_offloading_weights:
        yield f"{refused} --cpu-offloading-weights cannot offload quantized weights; omit it"
    tp, experts = max(model.tensor_model_parallel_size, 1), max(model.parallel_sizes.expert_tp, 1)
    widths = {"--hidden-size": (model.hidden_size, 1)}
    parts = _layer_parts(model)
    if any(each.has_attention for each in parts):
        for own, flag, _ in attention_shapes(model):
            widths[f"--num-attention-heads x {flag}"] = own.context_size, tp
    for kind in recurrent_kinds_of(parts):
        widths |= kind.input_widths(model.hybrid, model.hidden_size, tp)
    if model.moe.num_experts is None or model.moe.moe_layer_freq.strip() != "1":
        widths["--ffn-hidden-size"] = (model.ffn_hidden_size, tp)
    if model.moe.num_experts is not None:
        widths["--moe-ffn-hidden-size"] = (model.moe.moe_ffn_hidden_size, experts)
    if model.moe.moe_latent_size is not None:
        widths["--moe-latent-size"] = (model.moe.moe_latent_size, 1)
    if model.moe.moe_shared_expert_intermediate_size is not None:
        widths["--moe-shared-expert-intermediate-size"] = (model.moe.moe_shared_expert_intermediate_size, tp)
    for name, (width, size) in widths.items():
        if width % (FOUR_BIT_BLOCK * size):
            over = f" over {size} tensor-parallel ranks" if size > 1 else ""
            yield (
                f"{refused} {name} {width}{over} is not a whole number of blocks of {FOUR_BIT_BLOCK} input features"
                + ("; use a smaller --tensor-model-parallel-size" if size > 1 else "; omit it")
            )


def _check_chunked_loss(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.cross_entropy_fusion_impl != "linear":
        return
    refused = "--cross-entropy-fusion-impl linear:"
    if model.loss != "cross_entropy":
        yield f"{refused} --loss {model.loss} gets all logits, which are never all in memory; omit one of them"
    if model.final_logit_softcapping is not None:
        yield (
            f"{refused} --final-logit-softcapping {model.final_logit_softcapping:g} changes the logits, which are "
            f"never all in memory; omit one of them"
        )
    if model.tp_comm_overlap:
        yield f"{refused} --tp-comm-overlap does not overlap with the chunks of the output layer; omit one of them"
    late = {
        "--delay-wgrad-compute": model.delay_wgrad_compute,
        "--defer-embedding-wgrad-compute": model.defer_embedding_wgrad_compute,
        "--pipeline-schedule zero-bubble": config.pipeline_schedule == "zero-bubble",
    }
    for flag in (flag for flag, is_given in late.items() if is_given):
        yield f"{refused} {flag} defers the output layer's weight gradient, which is computed at once; omit one of them"


def _check_parameters(config: RunConfig) -> Iterator[str]:
    model = config.model
    ranks = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if ranks < 1:
        return
    shapes = [shape for shape, _, _ in attention_shapes(model)]
    attention = model.hidden_size * 2 * max(own.query_projection_size + own.kv_projection_size for own in shapes)
    feed_forward = model.hidden_size * model.ffn_hidden_size * (3 if model.is_gated else 2)
    rows = model.vocab_size or config.tokenizer.vocab_size or 0
    if model.position_embedding_type == "learned_absolute":
        rows += model.num_position_embeddings
    total = model.num_layers * (attention + feed_forward) + rows * model.hidden_size
    if total > _MOST_VALUES * ranks:
        yield (
            f"--num-layers {model.num_layers} --hidden-size {model.hidden_size} --ffn-hidden-size "
            f"{model.ffn_hidden_size} --num-attention-heads {model.num_attention_heads}: about {total:.1e} parameters, "
            f"{total // ranks:.1e} on each of tensor({model.tensor_model_parallel_size}) x "
            f"pipeline({model.pipeline_model_parallel_size}) ranks; at most {_MOST_VALUES:.0e} are supported; use a "
            "smaller model, or more ranks"
        )


def _check_activations(config: RunConfig) -> Iterator[str]:
    model, length, micro = config.model, config.data.seq_length, config.training.micro_batch_size
    values = length * micro * model.hidden_size // max(model.context_parallel_size, 1)
    if values > _MOST_VALUES:
        yield (
            f"--seq-length {length} x --micro-batch-size {micro} x --hidden-size {model.hidden_size} over "
            f"context({model.context_parallel_size}) ranks: {values:.1e} hidden values; at most {_MOST_VALUES:.0e} are "
            "supported; lower one of them"
        )


MODEL_CHECKS = (
    Check(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", *ATTENTION_SHAPE),
            *("vocab_size", "max_position_embeddings", *MODEL_SIZE_NAMES),
        ),
        _check_parameters,
    ),
    Check(("seq_length", "micro_batch_size", "hidden_size", "context_parallel_size"), _check_activations),
    Check(("hidden_size", "num_attention_heads", "kv_channels"), _check_head_width),
    Check(("hidden_size", "ffn_hidden_size"), _check_feed_forward_width),
    Check(("num_attention_heads", *ATTENTION_SHAPE), _check_query_groups),
    Check(
        (
            *("seq_length", "max_position_embeddings", "position_embedding_type", "position_embedding_offset"),
            "hidden_size",
        ),
        _check_positions,
    ),
    Check(("seq_length",), _check_sequence_length),
    Check(
        (
            *("hidden_size", "num_attention_heads", "rotary_percent", "position_embedding_type"),
            *("rotary_ntk_alpha", "qk_layernorm_after_rope", *ATTENTION_SHAPE),
            *("longrope_short_factor", "longrope_long_factor"),
        ),
        _check_rotary,
    ),
    Check(("normalization", "norm_placement", "norm_parameters", "transformer_impl", "v_layernorm"), _check_norms),
    Check(
        ("gemm_activation_fusion", "activation_func", "xielu", "squared_relu", *GATED_ACTIVATIONS),
        _check_gemm_activation,
    ),
    Check(("glu_linear_offset", "activation_func_clamp_value", "mlp_gate_multiplier"), _check_gate),
    Check(("ckpt_format", "num_experts", "expert_tensor_parallel_size"), _check_format),
    Check(("num_layers", "window_size", "window_attn_skip_freq", *ATTENTION_SHAPE), _check_windows),
    Check(("num_layers", "recompute_granularity", "recompute_method", "recompute_num_layers"), _check_recompute),
    Check(("lora_rank", "lora_target_modules", *GATED_ACTIVATIONS, *_PATTERN), _check_adapted_layers),
    Check(("lora_rank", *LAYOUT_FIELDS), _check_adapted_stages),
    Check(
        (
            *("cross_entropy_fusion_impl", "loss", "final_logit_softcapping", "tp_comm_overlap", "delay_wgrad_compute"),
            *("defer_embedding_wgrad_compute", "pipeline_schedule"),
        ),
        _check_chunked_loss,
    ),
    Check(("lora_rank", "cuda_graph_impl", "save", "ckpt_format", "decoupled_lr"), _check_beside_adapters),
    Check(
        (
            *(
                "lora_base_quantization",
                "fp8_format",
                "fp4_format",
                "cpu_offloading_weights",
                "hidden_size",
                "num_attention_heads",
            ),
            *("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
            *(*ATTENTION_SHAPE, *LAYOUT_FIELDS),
        ),
        _check_quantized_base,
    ),
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
            "--position-embedding-type rope, or omit it"
        )
    if model.mla.multi_latent_attention:
        yield f"{given} is not supported with --multi-latent-attention; omit --no-rope-freq"


def _check_linear_biases(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.position_embedding_type != "alibi":
        return
    others = {"--softmax-type": model.has_sinks, "--attn-logit-softcapping": model.attn_logit_softcapping is not None}
    for name in (name for name, is_given in others.items() if is_given):
        yield (
            f"--position-embedding-type alibi is not supported with {name}: biases are exact up to a constant per "
            "query, which only a plain softmax ignores; omit one of them"
        )


def _check_flash_version(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.attention_backend not in ("fa3", "fa4"):
        return
    given = f"--attention-backend {model.attention_backend}"
    if model.params_dtype not in ("bfloat16", "float16"):
        yield f"{given} does not support {model.params_dtype}; add --bf16 or --fp16"
    if model.attention_dropout > 0.0:
        yield f"{given} does not support --attention-dropout {model.attention_dropout}; set --attention-dropout 0"
    if model.attn_logit_softcapping is not None:
        yield f"{given} does not support --attn-logit-softcapping; omit it, or use --attention-backend flash"
    if not config.data.reset_attention_mask:
        return
    others = {
        "--context-parallel-size": model.context_parallel_size > 1,
        "--softmax-type": model.has_sinks,
        "--deterministic-mode": config.initialization.deterministic_mode,
        "--multi-latent-attention": model.mla.multi_latent_attention,
    }
    if model.attention_backend == "fa3":
        yield f"{given} does not support --reset-attention-mask; omit it, or use --attention-backend flash"
    elif config.data.seq_length % 256:
        yield f"{given} with --reset-attention-mask needs a --seq-length that is a multiple of 256"
    else:
        for name, is_given in others.items():
            if is_given:
                yield (
                    f"{given} with --reset-attention-mask does not support {name}; omit one of them, or use "
                    "--attention-backend flash"
                )


def _check_shared_key_values(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.num_kv_shared_layers:
        return
    given = f"--num-kv-shared-layers {model.num_kv_shared_layers}"
    try:
        _ = model.layer_windows, model.layers_without_rotary, model.moe_layers
    except ValueError:
        return  # Other checks report the pattern.
    try:
        sources = model.key_value_sources
    except ValueError as error:
        yield f"{given}: {error}"
        return
    is_dense = (source is not None and not has for source, has in zip(sources, model.moe_layers, strict=True))
    if model.use_double_wide_mlp and not any(is_dense):
        yield f"--use-double-wide-mlp has no effect: all of the last {model.num_kv_shared_layers} layers have experts"
    if config.training.cuda_graph_impl == "local":
        yield f"{given} is not supported with --cuda-graph-impl local; use --cuda-graph-impl none"


def _check_per_layer_inputs(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.hidden_size_per_layer_input:
        return
    given = f"--hidden-size-per-layer-input {model.hidden_size_per_layer_input}"
    if model.activation not in GATED_ACTIVATIONS:
        yield (
            f"{given} uses the activation of gated FFN layers, but the activation is {model.activation}; add --swiglu, "
            "--geglu or --quick-geglu"
        )
    if config.training.cuda_graph_impl == "local":
        yield f"{given} is not supported with --cuda-graph-impl local; use --cuda-graph-impl none"


ATTENTION_CHECKS = (
    Check(
        (
            *("num_kv_shared_layers", "num_layers", "window_size", "window_attn_skip_freq", "no_rope_freq"),
            *("use_double_wide_mlp", "num_experts", "moe_layer_freq", "cuda_graph_impl"),
        ),
        _check_shared_key_values,
    ),
    Check(
        ("hidden_size_per_layer_input", *GATED_ACTIVATIONS, "activation_func", "cuda_graph_impl"),
        _check_per_layer_inputs,
    ),
    Check(("position_embedding_type", "softmax_type", "attn_logit_softcapping"), _check_linear_biases),
    Check(
        (
            *("attention_backend", "attention_dropout", "attn_logit_softcapping", "reset_attention_mask", "seq_length"),
            *("params_dtype", "context_parallel_size", "softmax_type", "multi_latent_attention", "deterministic_mode"),
        ),
        _check_flash_version,
    ),
    Check(
        ("no_rope_freq", "num_layers", "position_embedding_type", "multi_latent_attention"),
        _check_layers_without_rotary,
    ),
)


def _check_mla_shape(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.stretches_positions and model.rotary_base <= 1:
        yield f"--rotary-base {model.rotary_base} has no frequencies that YaRN can scale; use 2 or more"
    if not model.mla.multi_latent_attention:
        if "mla_up_proj" in model.recomputed_modules:
            yield "--recompute-modules mla_up_proj has no effect without --multi-latent-attention; omit it"
        return
    given = "--multi-latent-attention"
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.mla.qk_pos_emb_head_dim
    if groups != heads:
        yield (
            f"{given} has keys and values per head, but --num-query-groups {groups} shares them; omit "
            f"--num-query-groups, or use --num-query-groups {heads}"
        )
    if model.position_embedding_type not in ("rope", "none"):
        yield (
            f"{given} requires rotary position embeddings or none, but --position-embedding-type is "
            f"{model.position_embedding_type}; use --position-embedding-type rope"
        )
    if width % 2 and model.position_embedding_type == "rope":
        yield f"--qk-pos-emb-head-dim {width}: rotary position embeddings need an even number; use {width + 1}"


def _check_yarn(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.rope.rope_type == "proportional":
        yield from _check_proportional(model)
    if model.mla.multi_latent_attention:
        for spec in field_specs(GPTConfig) if model.position_embedding_type == "none" else ():
            value = field_value(model, spec.name)
            if spec.name in ("rope_type", *STRETCH_FIELDS) and value != spec.default:
                yield f"{spec.typed(value)} has no effect with --position-embedding-type none; omit it"
        return
    if model.rope.rope_type != "yarn":
        for spec in field_specs(GPTConfig):
            value = field_value(model, spec.name)
            if spec.name in STRETCH_FIELDS and value != spec.default:
                yield (
                    f"{spec.typed(value)} has no effect without --rope-type yarn or --multi-latent-attention; add one "
                    "of them"
                )
        if model.rope.attention_temperature_beta:
            yield (
                f"--attention-temperature-beta {model.rope.attention_temperature_beta} starts at YaRN's "
                "--original-max-position-embeddings; add --rope-type yarn"
            )
        return
    if model.position_embedding_type != "rope":
        yield (
            "--rope-type yarn scales rotary position embeddings, but --position-embedding-type is "
            f"{model.position_embedding_type}; use --position-embedding-type rope, or omit --rope-type"
        )
    others = {
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
    }
    for name, is_given in others.items():
        if is_given:
            yield f"--rope-type yarn and {name} both scale rotary frequencies; omit one of them"


def _check_proportional(model: GPTConfig) -> Iterator[str]:
    given = "--rope-type proportional"
    if model.position_embedding_type != "rope":
        yield (
            f"{given} has no effect with --position-embedding-type {model.position_embedding_type}; use "
            "--position-embedding-type rope, or omit it"
        )
    others = {
        "--multi-latent-attention": model.mla.multi_latent_attention,
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-ntk-alpha": model.rotary_ntk_alpha != 1.0,
    }
    for name in (name for name, is_given in others.items() if is_given):
        yield f"{given} is not supported with {name}; omit one of them"


def _check_clipped_logits(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.qk_clip:
        return
    if model.qk_layernorm and not model.mla.multi_latent_attention:
        yield "--qk-clip has no effect with --qk-layernorm, which normalizes queries and keys; omit one of them"
    if config.optimizer.optimizer_cpu_offload:
        yield "--qk-clip is not supported with --optimizer-cpu-offload; omit one of them"
    if config.ddp.overlap_param_gather_with_optimizer_step:
        yield (
            "--qk-clip changes weights after the update of all of them, but --overlap-param-gather-with-optimizer-step "
            "gathers weights before; omit one of them"
        )


def _check_mla_conflicts(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.mla.multi_latent_attention:
        return
    others = {
        "--lora-rank": model.lora_rank > 0,
        "--query-pre-attn-scalar": model.query_pre_attn_scalar is not None,
        "--softmax-scale": model.softmax_scale is not None,
        "--clip-qkv": model.clip_qkv is not None,
        "--qk-layernorm-across-heads": model.qk_layernorm_across_heads,
        "--add-qkv-bias": model.add_qkv_bias,
        "--disable-qkv-bias": model.disable_qkv_bias,
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-percent": model.rotary_percent != 1.0,
        "--rotary-interleaved": model.rotary_interleaved,
        "--rotary-base-local": model.rotary_base_local is not None,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
        "--tp-comm-overlap": model.tp_comm_overlap,
    }
    for name, is_given in others.items():
        if is_given:
            yield f"--multi-latent-attention is not supported with {name}; omit {name}"
    if config.training.cuda_graph_impl == "local":
        yield ("--multi-latent-attention is not supported with --cuda-graph-impl local; use --cuda-graph-impl none")


MLA_CHECKS = (
    Check(
        (
            *("qk_clip", "qk_layernorm", "multi_latent_attention", "optimizer_cpu_offload"),
            "overlap_param_gather_with_optimizer_step",
        ),
        _check_clipped_logits,
    ),
    Check(
        (
            *("multi_latent_attention", "rope_type", "position_embedding_type", "use_rope_scaling"),
            *("rotary_seq_len_interpolation_factor", "attention_temperature_beta", *STRETCH_FIELDS, "rotary_ntk_alpha"),
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
            *("multi_latent_attention", "lora_rank", "query_pre_attn_scalar", "softmax_scale", "cuda_graph_impl"),
            "clip_qkv",
            *("qk_layernorm_across_heads", "add_qkv_bias", "disable_qkv_bias", "use_rope_scaling", "rotary_base_local"),
            *("rotary_seq_len_interpolation_factor", "rotary_percent", "rotary_interleaved", "tp_comm_overlap"),
        ),
        _check_mla_conflicts,
    ),
)


def _check_mtp_shape(config: RunConfig) -> Iterator[str]:
    model, length = config.model, config.data.seq_length
    if model.mtp.mtp_num_layers is None or model.mtp.mtp_num_layers < 1:
        return
    given = f"--mtp-num-layers {model.mtp.mtp_num_layers}"
    if model.mtp.mtp_num_layers >= length > 1:
        yield f"{given} predicts tokens beyond the end of --seq-length {length}; values from 1 to {length - 1} work"
    if model.position_embedding_type in ("learned_absolute", "sinusoidal"):
        yield (
            f"{given} does not support learned or sinusoidal position embeddings; use --position-embedding-type rope "
            "or --no-position-embedding"
        )
    tensor = model.tensor_model_parallel_size
    if tensor > 0 and model.hidden_size % tensor:
        yield (
            f"{given}: --hidden-size {model.hidden_size} is not divisible by --tensor-model-parallel-size {tensor}; "
            f"sizes that work: {divisors(model.hidden_size, 64)}"
        )


def _check_mtp_conflicts(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.mtp.mtp_num_layers is None:
        return
    given = f"--mtp-num-layers {model.mtp.mtp_num_layers}:"
    if model.lora_rank:
        yield f"{given} LoRA does not support MTP; omit --lora-rank or --mtp-num-layers"
    if config.training.cuda_graph_impl == "local":
        yield f"{given} --cuda-graph-impl local does not support MTP; use --cuda-graph-impl none"


def _check_mtp_layout(config: RunConfig) -> Iterator[str]:
    model = config.model
    layout, depth = model.pipeline_model_parallel_layout, model.mtp.mtp_depth
    if layout is None or layout_problems(model, model.num_layers, layout):
        return
    named = sum(mtp_modules_per_stage(layout))
    given = f"--pipeline-model-parallel-layout {layout!r} has {named} m (MTP modules)"
    if named and not depth:
        yield f"{given}, and the model has none; add --mtp-num-layers {named}"
    elif named not in (0, depth):
        yield f"{given}, and --mtp-num-layers is {depth}; write m*{depth}, or omit m"


MTP_CHECKS = (
    Check(
        ("mtp_num_layers", "seq_length", "position_embedding_type", "hidden_size", "tensor_model_parallel_size"),
        _check_mtp_shape,
    ),
    Check(("mtp_num_layers", "lora_rank", "cuda_graph_impl"), _check_mtp_conflicts),
    Check(("mtp_num_layers", *LAYOUT_FIELDS), _check_mtp_layout),
)


def _check_moe_layers(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.hybrid.hybrid_override_pattern is not None:
        return  # The checks of hybrid models report it.
    try:
        layers = model.moe_layers
    except ValueError as error:
        yield f"--moe-layer-freq {model.moe.moe_layer_freq}: {error}"
        return
    if model.moe.num_experts is not None and not any(layers):
        yield (
            f"--moe-layer-freq {model.moe.moe_layer_freq} gives experts to none of the {model.num_layers} layers; omit "
            "--num-experts, or use a list with a 1"
        )


def _check_spread(config: RunConfig) -> Iterator[str]:
    model = config.model
    experts, size = model.moe.num_experts, model.expert_model_parallel_size
    if experts is None or size < 1:
        return
    tensor, sizes = model.parallel_sizes.expert_tp, config.parallel_sizes
    if experts % size:
        most = math.gcd(experts, sizes.dp * sizes.cp * sizes.tp // max(tensor, 1))
        yield (
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {size}; "
            f"expert-parallel sizes that work: {divisors(most, 64)}"
        )
    if tensor > 0 and model.moe.moe_ffn_hidden_size % tensor:
        yield (
            f"--moe-ffn-hidden-size {model.moe.moe_ffn_hidden_size} is not divisible by --expert-tensor-parallel-size "
            f"{tensor} (by default the tensor-parallel size); sizes that work: "
            f"{divisors(model.moe.moe_ffn_hidden_size, 64)}"
        )
    shared, tensor = model.moe.moe_shared_expert_intermediate_size, model.tensor_model_parallel_size
    if shared is not None and tensor > 0 and shared % tensor:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by --tensor-model-parallel-size "
            f"{tensor}; tensor-parallel sizes that work: {divisors(shared, 64)}"
        )


def _check_choice(config: RunConfig) -> Iterator[str]:
    moe = config.model.moe
    experts, topk = moe.num_experts, moe.moe_router_topk
    if experts is None or experts < 1:
        return
    if topk > experts:
        yield f"--moe-router-topk {topk} is greater than --num-experts {experts}; values from 1 to {experts} work"
    is_softmax = moe.moe_router_score_function == "softmax" and not moe.routes_by_sinkhorn
    if topk == 1 and is_softmax and not moe.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1: a softmax over one expert is always 1, so the router cannot learn; add "
            "--moe-router-pre-softmax"
        )
    is_sparsemixer = moe.moe_router_score_function == "sparsemixer"
    others = {
        "--moe-router-pre-softmax": moe.moe_router_pre_softmax,
        "--moe-router-num-groups": moe.moe_router_num_groups is not None,
        "--moe-router-enable-expert-bias": moe.moe_router_enable_expert_bias,
    }
    for name, is_given in others.items():
        if is_given and is_sparsemixer:
            yield f"--moe-router-score-function sparsemixer is not supported with {name}; omit {name}"
    groups, group_topk = moe.moe_router_num_groups, moe.moe_router_group_topk
    if groups is None or group_topk is None or min(groups, group_topk) < 1:
        return
    ranked_by, size = moe.moe_router_group_score_topk, experts // groups
    if experts % groups:
        yield (
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}; numbers of groups that "
            f"work: {divisors(experts, 64)}"
        )
    elif group_topk > groups:
        yield (
            f"--moe-router-group-topk {group_topk} is greater than --moe-router-num-groups {groups}; values from 1 to "
            f"{groups} work"
        )
    elif ranked_by is not None and ranked_by > size:
        yield (
            f"--moe-router-group-score-topk {ranked_by} is greater than {size}, the number of experts per group; "
            f"values from 1 to {size} work"
        )
    elif not (group_topk if ranked_by is None else 1) <= topk <= group_topk * size:
        works = [n for n in range(1, groups + 1) if (n if ranked_by is None else 1) <= topk <= n * size]
        yield (
            f"--moe-router-topk {topk} experts cannot be selected from --moe-router-group-topk {group_topk} groups "
            f"with {size} experts each; numbers of groups that work: {choices(works)}"
        )


_NOT_WITH_SINKHORN = (
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_expert_capacity_factor"),
)


def _check_sinkhorn(config: RunConfig) -> Iterator[str]:
    flags = map(config.flag, _NOT_WITH_SINKHORN)
    given = [spec.typed(value) for spec, value in filter(None, flags) if value != spec.default]
    coefficients = config.model.moe.moe_aux_loss_coeff
    if any(coefficients):
        given.append(f"--moe-aux-loss-coeff {' '.join(map(str, coefficients))}")
    for words in given:
        yield f"--moe-router-load-balancing-type sinkhorn does not support {words}; omit it, or use aux_loss"


def _check_balancing(config: RunConfig) -> Iterator[str]:
    model = config.model
    kinds, coefficients = model.moe.moe_router_load_balancing_type, model.moe.moe_aux_loss_coeff
    words, numbers = " ".join(kinds), " ".join(map(str, coefficients))
    if len(set(kinds)) < len(kinds) or ({"none", "sinkhorn"} & set(kinds) and len(kinds) > 1):
        alone = next((kind for kind in ("sinkhorn", "none") if kind in kinds), "none")
        yield f"--moe-router-load-balancing-type {words}: use each type at most once, and {alone} only by itself"
    elif len(coefficients) not in (1, len(kinds)):
        yield (
            f"--moe-aux-loss-coeff {numbers}: {len(kinds)} numbers are expected, one per type of "
            f"--moe-router-load-balancing-type {words}, or one for all"
        )
    if any(not 0 <= value < float("inf") for value in coefficients):
        yield f"--moe-aux-loss-coeff {numbers}: values of 0 or more are expected"
    if model.moe.routes_by_sinkhorn:
        yield from _check_sinkhorn(config)
    again = model.recompute_granularity == "full" or "moe" in model.recomputed_modules
    if model.moe.num_experts is not None and model.moe.moe_aux_losses.get("global_aux_loss") and again:
        yield (
            "--moe-router-load-balancing-type global_aux_loss is incompatible with recomputed MoE layers; use "
            "aux_loss, or --recompute-granularity selective without moe"
        )


def _check_dispatch(config: RunConfig) -> Iterator[str]:
    moe = config.model.moe
    if moe.asks_for_deepep and moe.num_experts is not None and moe.moe_deepep_num_sms % 2:
        number = moe.moe_deepep_num_sms
        yield f"--moe-deepep-num-sms {number}: an even number is expected; use {number + 1}"
    if moe.moe_token_dispatcher_type != "allgather" or moe.num_experts is None:
        return
    given = f"--moe-token-dispatcher-type {moe.moe_token_dispatcher_type}"
    if moe.moe_expert_capacity_factor is not None:
        yield (
            f"{given} sends all tokens to every rank and does not support --moe-expert-capacity-factor "
            f"{moe.moe_expert_capacity_factor}; use --moe-token-dispatcher-type alltoall"
        )
    if moe.moe_shared_expert_overlap:
        yield (f"{given} cannot be overlapped by --moe-shared-expert-overlap; use --moe-token-dispatcher-type alltoall")


def _check_float8(config: RunConfig) -> Iterator[str]:
    model = config.model
    tensor, width = model.parallel_sizes.expert_tp, model.moe.moe_ffn_hidden_size
    if tensor > 0 and width % tensor == 0 and width // tensor % 16:
        yield (
            f"--moe-ffn-hidden-size {width} is {width // tensor} on each expert-tensor-parallel rank, but FP8 needs a "
            f"multiple of 16; use {-(-width // (16 * tensor)) * 16 * tensor}"
        )
    latent = model.moe.moe_latent_size
    if latent is not None and latent % 16:
        yield f"--moe-latent-size {latent}, but FP8 needs a multiple of 16; use {_rounded(latent, 16)}"
    tensor, shared = model.tensor_model_parallel_size, model.moe.moe_shared_expert_intermediate_size
    if shared is not None and tensor > 0 and shared % tensor == 0 and shared // tensor % 16:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is {shared // tensor} on each tensor-parallel rank, but "
            f"FP8 needs a multiple of 16; use {-(-shared // (16 * tensor)) * 16 * tensor}"
        )


def _check_moe_recompute(config: RunConfig) -> Iterator[str]:
    model = config.model
    of_experts = [name for name in model.recomputed_modules if name in ("moe", "moe_act", "shared_experts")]
    if of_experts and model.moe.num_experts is None:
        yield f"--recompute-modules {' '.join(of_experts)} has no effect without --num-experts; omit it"
    elif "shared_experts" in of_experts:
        if model.moe.moe_shared_expert_intermediate_size is None:
            yield (
                "--recompute-modules shared_experts has no effect without --moe-shared-expert-intermediate-size; omit "
                "it"
            )
        elif model.moe.moe_shared_expert_overlap:
            yield (
                "--recompute-modules shared_experts and --moe-shared-expert-overlap exclude each other: activations "
                "that are computed during the token dispatch are kept; omit one of them"
            )


def _check_adapters(config: RunConfig, given: str) -> Iterator[str]:
    """Reject LoRA of experts with dropout or unsupported sharding, and LoRA with an expert bias that is updated."""
    model = config.model
    try:
        parts = model.adapted_parts
    except ValueError:
        return  # The check of the names reports it.
    adapted = " ".join(linear for linear in parts if linear in ("linear_fc1", "linear_fc2"))
    if adapted and model.lora_dropout:
        yield (
            f"{given} --lora-dropout {model.lora_dropout} is not supported for LoRA of experts ({adapted}); use "
            "--lora-dropout 0, or --lora-target-modules linear_qkv linear_proj"
        )
    tp, etp = model.tensor_model_parallel_size, model.parallel_sizes.expert_tp
    if adapted and etp not in (1, tp):
        yield (
            f"{given} LoRA of experts ({adapted}) does not support --expert-tensor-parallel-size {etp} with "
            f"--tensor-model-parallel-size {tp}; use --expert-tensor-parallel-size 1 or {tp}, or "
            "--lora-target-modules linear_qkv linear_proj"
        )
    if model.moe.moe_router_enable_expert_bias and model.moe.moe_router_bias_update_rate:
        yield (
            f"{given} --lora-rank {model.lora_rank} freezes the base weights, but --moe-router-bias-update-rate "
            f"{model.moe.moe_router_bias_update_rate} would change the expert bias; use --moe-router-bias-update-rate 0"
        )


def _check_beside_experts(config: RunConfig) -> Iterator[str]:
    model = config.model
    yield from _check_moe_recompute(config)
    if model.moe.num_experts is None:
        return
    given = f"--num-experts {model.moe.num_experts}:"
    if model.fp8.fp8_format is not None:
        yield from _check_float8(config)
    if model.fp8.fp4_format is not None:
        yield f"{given} {_asked(config)} is not supported for experts; use --fp8-format hybrid, or omit it"
    if model.lora_rank:
        yield from _check_adapters(config, given)
    if config.training.cuda_graph_impl == "local":
        yield (
            f"{given} --cuda-graph-impl local is not supported, because CUDA graphs do not support dynamic expert "
            "shapes; use --cuda-graph-impl none"
        )
    if model.cpu_offloading:
        yield f"{given} --cpu-offloading is not supported for MoE layers; omit it"
    if config.optimizer.offload_fraction and config.optimizer.optimizer_offload_policy == "auto":
        yield (
            f"{given} --optimizer-offload-policy auto cannot estimate how much memory experts need; use "
            "--optimizer-offload-policy static"
        )


SPREAD = Check(
    (
        *("num_experts", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("moe_ffn_hidden_size", "ffn_hidden_size", "tensor_model_parallel_size"),
        "moe_shared_expert_intermediate_size",
    ),
    _check_spread,
)

MOE_CHECKS = (
    Check(("num_layers", "num_experts", "moe_layer_freq"), _check_moe_layers),
    SPREAD,
    Check(
        (
            *("num_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"),
            "moe_router_group_score_topk",
            "moe_router_load_balancing_type",
        ),
        _check_choice,
    ),
    Check(
        ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "recompute_granularity", *_NOT_WITH_SINKHORN),
        _check_balancing,
    ),
    Check(
        ("num_experts", "moe_token_dispatcher_type", "moe_deepep_num_sms", "moe_expert_capacity_factor"),
        _check_dispatch,
    ),
    Check(
        (
            "num_experts",
            "moe_latent_size",
            "fp8_format",
            "fp4_format",
            "lora_rank",
            "lora_target_modules",
            "lora_dropout",
            "expert_tensor_parallel_size",
            "tensor_model_parallel_size",
            "moe_router_bias_update_rate",
            "cuda_graph_impl",
            "cpu_offloading",
        ),
        _check_beside_experts,
    ),
)


_LATENT = (
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "num_attention_heads",
)
_SHAPE = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "mtp_num_layers"),
    *ATTENTION_SHAPE,
)


def _asked(config: RunConfig) -> str:
    """Return the flag that enables FP8 or NVFP4, as typed."""
    fp8 = config.model.fp8
    if fp8.fp4_format is not None:
        return f"--fp4-format {fp8.fp4_format}"
    return "--fp8-hybrid" if fp8.fp8_hybrid else "--fp8-e4m3" if fp8.fp8_e4m3 else f"--fp8-format {fp8.fp8_format}"


def _kind(config: RunConfig) -> str:
    return "FP8" if config.model.fp8.fp4_format is None else "NVFP4"


def _multiple(config: RunConfig) -> int:
    """Return the multiple of each dimension that GEMMs of a GPU require: 16 bytes of a row."""
    return 16 if config.model.fp8.fp4_format is None else 32


def _check_precision(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.fp8.is_quantized and not (model.bf16 or model.fp16):
        yield f"{_asked(config)}: {_kind(config)} requires --bf16 or --fp16; add --bf16"


def _check_graphs(config: RunConfig) -> Iterator[str]:
    if config.model.fp8.fp4_format is not None and config.training.cuda_graph_impl == "local":
        yield (
            f"{_asked(config)}: --cuda-graph-impl local is not supported, because the backward pass draws random "
            "numbers by micro-batch; use --cuda-graph-impl none"
        )


def _check_formats(config: RunConfig) -> Iterator[str]:
    model = config.model
    for given, meant in ((model.fp8.fp8_hybrid, "hybrid"), (model.fp8.fp8_e4m3, "e4m3")):
        if given and model.fp8.fp8_format != meant:
            yield f"--fp8-{meant} and --fp8-format {model.fp8.fp8_format} exclude each other; omit one of them"


def _check_float8_layers(config: RunConfig) -> Iterator[str]:
    model = config.model
    if not model.fp8.is_quantized or model.fp8.float8_layers(model.num_layers):
        return
    start, end = model.fp8.num_layers_at_start_in_bf16, model.fp8.num_layers_at_end_in_bf16
    yield (
        f"--first-last-layers-bf16 leaves none of the {model.num_layers} layers for {_asked(config)} "
        f"(--num-layers-at-start-in-bf16 {start}, --num-layers-at-end-in-bf16 {end}); their sum may be at most "
        f"{model.num_layers - 1}"
    )


def _check_widths(config: RunConfig) -> Iterator[str]:
    model, tensor = config.model, config.model.tensor_model_parallel_size
    multiple = _multiple(config)
    if not model.fp8.is_quantized or min(tensor, model.hidden_size, model.kv_channels, model.ffn_hidden_size) <= 0:
        return
    needed = f"but {_asked(config)} needs a multiple of {multiple}"
    if model.hidden_size % multiple:
        yield f"--hidden-size {model.hidden_size}, {needed}; use {_rounded(model.hidden_size, multiple)}"
    elif model.mtp.mtp_depth and model.hidden_size % tensor == 0 and model.hidden_size // tensor % multiple:
        yield (
            f"--hidden-size {model.hidden_size} gives the projection of the MTP modules (--mtp-num-layers) "
            f"{model.hidden_size // tensor} columns on each tensor-parallel rank, {needed}; use "
            f"{_rounded(model.hidden_size, multiple * tensor)}"
        )
    width = model.ffn_hidden_size
    if width % tensor == 0 and width // tensor % multiple:
        yield (
            f"--ffn-hidden-size {width} is {width // tensor} on each tensor-parallel rank, {needed}; "
            f"use {_rounded(width, multiple * tensor)}"
        )
    has_attention = any(each.has_attention for each in _layer_parts(model))
    if not has_attention or model.mla.multi_latent_attention:
        return
    for own, flag, _ in attention_shapes(model):
        yield from _check_head_channels(own, flag, multiple, needed)


def _check_head_channels(model: GPTConfig, flag: str, multiple: int, needed: str) -> Iterator[str]:
    heads, groups, tensor = model.num_attention_heads, model.num_query_groups, model.tensor_model_parallel_size
    if heads % tensor or groups <= 0 or (groups % tensor and tensor % groups):
        return
    own_heads, own_groups = heads // tensor, max(groups // tensor, 1)
    num_keys = own_groups * (1 if model.attention_k_eq_v else 2)
    num_rows = own_heads * (2 if model.attention_output_gate else 1) + num_keys
    columns, rows = own_heads * model.kv_channels, num_rows * model.kv_channels
    if columns % multiple or rows % multiple:
        fitting = next(
            width
            for width in count(model.kv_channels)
            if not (own_heads * width % multiple or num_keys * width % multiple)
        )
        yield (
            f"{flag} {model.kv_channels} makes {columns} query channels and {rows} query, key and value "
            f"channels on each tensor-parallel rank, {needed}; use {flag} {fitting}"
        )


def _check_latent_widths(config: RunConfig) -> Iterator[str]:
    model, tensor = config.model, config.model.tensor_model_parallel_size
    multiple = _multiple(config)
    if not model.fp8.is_quantized or not model.mla.multi_latent_attention or tensor <= 0:
        return
    needed = f"but {_asked(config)} needs a multiple of {multiple}"
    narrow = {
        "--q-lora-rank": model.mla.q_lora_rank,
        "--kv-lora-rank": model.mla.kv_lora_rank,
        "--qk-pos-emb-head-dim": model.mla.qk_pos_emb_head_dim,
    }
    for name, width in narrow.items():
        if width is not None and width % multiple:
            yield f"{name} {width}, {needed}; use {_rounded(width, multiple)}"
    if model.num_attention_heads % tensor:
        return
    heads = model.num_attention_heads // tensor
    for name, width in (("--qk-head-dim", model.mla.qk_head_dim), ("--v-head-dim", model.mla.v_head_dim)):
        if heads * width % multiple:
            fitting = next(each for each in count(width) if heads * each % multiple == 0)
            yield f"{name} {width} makes {heads * width} channels on each tensor-parallel rank, {needed}; use {fitting}"


def _layer_parts(model: GPTConfig) -> tuple[LayerParts, ...]:
    """Return the parts of the layers, or nothing if another check reports an invalid pattern."""
    try:
        return model.layer_parts
    except ValueError:
        return ()


def _projection_widths(model: GPTConfig, kind: RecurrentKind[HybridConfig], heads: str, number: int) -> tuple[int, int]:
    """Return the rows of a recurrent layer's input projection and the columns of its output projection on a rank.

    ``heads`` is the field of its number of heads, for which ``number`` is taken.
    """
    hybrid, tensor = with_fields(model.hybrid, **{heads: number}), model.tensor_model_parallel_size
    rows, columns = kind.projection_rows(hybrid, model.hidden_size), kind.inner_size(hybrid, model.hidden_size)
    return sum(rows) // tensor, columns // tensor


def _check_recurrent_widths(config: RunConfig) -> Iterator[str]:
    model, multiple = config.model, _multiple(config)
    tensor = model.tensor_model_parallel_size
    if not model.fp8.is_quantized or tensor <= 0:
        return
    needed, kinds = f"but {_asked(config)} needs a multiple of {multiple}", recurrent_kinds_of(_layer_parts(model))
    for kind in kinds:
        field, heads, groups = kind.heads(model.hybrid, model.hidden_size)
        is_sharded = groups % tensor == 0 or (kind.shares_groups and tensor % groups == 0)
        step = max(groups, tensor)
        if not is_sharded or heads % step:
            continue  # The checks of the shapes report it.
        rows, columns = _projection_widths(model, kind, field, heads)
        if rows % multiple == columns % multiple == 0:
            continue
        numbers = range(heads + step, heads + step * multiple + 1, step)
        fitting = (
            number
            for number in numbers
            if not any(width % multiple for width in _projection_widths(model, kind, field, number))
        )
        number, typed = next(fitting, None), f"--{field.replace('_', '-')}"
        yield (
            f"{typed} {heads} gives the projections of a {kind.title} layer {rows} rows and {columns} columns on each "
            f"tensor-parallel rank, {needed}; use "
            + (f"{typed} {number}" if number else f"heads whose widths are multiples of {multiple}")
        )
    for kind in kinds:
        yield from kind.check_quantized_widths(model.hybrid, tensor, multiple, needed)


def _check_tokens(config: RunConfig) -> Iterator[str]:
    model, length, batch = config.model, config.data.seq_length, config.training.micro_batch_size
    multiple = _multiple(config)
    parts = model.context_parallel_size
    if model.sequence_parallel:
        parts *= model.tensor_model_parallel_size
    if not model.fp8.is_quantized or parts <= 0 or length <= 0 or batch <= 0 or length % parts:
        return
    if model.moe.moe_latent_size is not None and not model.sequence_parallel:
        # Tensor-parallel ranks share the tokens that they route.
        parts *= max(model.tensor_model_parallel_size, 1)
    if length * batch % (parts * multiple) == 0:
        return
    tokens = -(-length * batch // parts)
    step = parts * (2 if model.context_parallel_size > 1 else 1)
    fitting = next(size for size in count(_rounded(length, step), step) if size * batch // parts % multiple == 0)
    yield (
        f"--seq-length {length} x --micro-batch-size {batch} makes {tokens} tokens per micro-batch on each rank, but "
        f"{_asked(config)} needs a multiple of {multiple}; use --seq-length {fitting}"
    )


def _check_param_gather(config: RunConfig) -> Iterator[str]:
    if config.model.fp8.fp8_param_gather and config.parallel_sizes.num_replicas > 1 and not config.ddp.shards_optimizer:
        yield (
            "--fp8-param-gather: parameters are gathered only with --use-distributed-optimizer; add "
            "--use-distributed-optimizer, or omit --fp8-param-gather"
        )


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


FLOAT8_CHECKS = (
    Check(("fp8_format", "fp4_format", "fp16", "bf16"), _check_precision),
    Check(("fp4_format", "cuda_graph_impl"), _check_graphs),
    Check(("fp8_format",), _check_formats),
    Check(("num_layers", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), _check_float8_layers),
    Check((*_SHAPE, *MODEL_SIZE_NAMES), _check_widths),
    Check((*_LATENT, *MODEL_SIZE_NAMES), _check_latent_widths),
    Check((*_SHAPE, *MODEL_SIZE_NAMES, *(spec.name for spec in field_specs(HybridConfig))), _check_recurrent_widths),
    Check(("seq_length", "micro_batch_size", "moe_latent_size", *MODEL_SIZE_NAMES), _check_tokens),
    Check(("use_distributed_optimizer", *MODEL_SIZE_NAMES), _check_param_gather),
)
