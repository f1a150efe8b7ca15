"""Checks of fp8: the precision beside it, the layers that it takes, and shapes that its products can have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from megatron.config.checks.base import Check
from megatron.config.run_config import RunConfig
from megatron.core.parallel_sizes import MODEL_SIZE_NAMES

_MULTIPLE = 16
_LATENT = (
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "num_attention_heads",
)
_SHAPE = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    "mtp_num_layers",
)


def _asked(config: RunConfig) -> str:
    """Return the flag that asks for fp8, as it was typed."""
    model = config.model
    return (
        "--fp8-hybrid" if model.fp8_hybrid else "--fp8-e4m3" if model.fp8_e4m3 else f"--fp8-format {model.fp8_format}"
    )


def _check_precision(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.fp8_format is not None and not (model.bf16 or model.fp16):
        yield f"{_asked(config)} needs --bf16 or --fp16 for all that is not a product; add --bf16"


def _check_formats(config: RunConfig) -> Iterator[str]:
    model = config.model
    for given, meant in ((model.fp8_hybrid, "hybrid"), (model.fp8_e4m3, "e4m3")):
        if given and model.fp8_format != meant:
            yield f"--fp8-{meant} and --fp8-format {model.fp8_format} exclude each other; keep one"


def _check_layers(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.fp8_format is None or model.float8_layers(model.num_layers):
        return
    start, end = model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16
    yield (
        f"--first-last-layers-bf16 leaves none of {model.num_layers} layers for {_asked(config)} "
        f"(--num-layers-at-start-in-bf16 {start}, --num-layers-at-end-in-bf16 {end}); together they may be "
        f"{model.num_layers - 1} at most"
    )


def _check_widths(config: RunConfig) -> Iterator[str]:
    model, tensor = config.model, config.model.tensor_model_parallel_size
    if model.fp8_format is None or min(tensor, model.hidden_size, model.kv_channels, model.ffn_hidden_size) <= 0:
        return
    needed = f"which {_asked(config)} needs to be a multiple of {_MULTIPLE}"
    if model.hidden_size % _MULTIPLE:
        yield f"--hidden-size {model.hidden_size}, {needed}; use {_rounded(model.hidden_size, _MULTIPLE)}"
    elif model.mtp_depth and model.hidden_size % tensor == 0 and model.hidden_size // tensor % _MULTIPLE:
        yield (
            f"--hidden-size {model.hidden_size} makes {model.hidden_size // tensor} columns of the product in front of "
            f"the layers of --mtp-num-layers on each tensor-parallel rank, {needed}; use "
            f"{_rounded(model.hidden_size, _MULTIPLE * tensor)}"
        )
    width = model.ffn_hidden_size
    if width % tensor == 0 and width // tensor % _MULTIPLE:
        yield (
            f"--ffn-hidden-size {width} is {width // tensor} on each tensor-parallel rank, {needed}; "
            f"use {_rounded(width, _MULTIPLE * tensor)}"
        )
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.multi_latent_attention or heads % tensor or groups <= 0 or (groups % tensor and tensor % groups):
        return
    own_heads, own_groups = heads // tensor, max(groups // tensor, 1)
    columns, rows = own_heads * model.kv_channels, (own_heads + 2 * own_groups) * model.kv_channels
    if columns % _MULTIPLE or rows % _MULTIPLE:
        fitting = next(
            width
            for width in count(model.kv_channels)
            if not (own_heads * width % _MULTIPLE or 2 * own_groups * width % _MULTIPLE)
        )
        yield (
            f"--kv-channels {model.kv_channels} makes {columns} channels of queries and {rows} of queries, keys and "
            f"values on each tensor-parallel rank, {needed}; use --kv-channels {fitting}"
        )


def _check_latent_widths(config: RunConfig) -> Iterator[str]:
    model, tensor = config.model, config.model.tensor_model_parallel_size
    if model.fp8_format is None or not model.multi_latent_attention or tensor <= 0:
        return
    needed = f"which {_asked(config)} needs to be a multiple of {_MULTIPLE}"
    narrow = {
        "--q-lora-rank": model.q_lora_rank,
        "--kv-lora-rank": model.kv_lora_rank,
        "--qk-pos-emb-head-dim": model.qk_pos_emb_head_dim,
    }
    for name, width in narrow.items():
        if width is not None and width % _MULTIPLE:
            yield f"{name} {width}, {needed}; use {_rounded(width, _MULTIPLE)}"
    if model.num_attention_heads % tensor:
        return
    heads = model.num_attention_heads // tensor
    for name, width in (("--qk-head-dim", model.qk_head_dim), ("--v-head-dim", model.v_head_dim)):
        if heads * width % _MULTIPLE:
            fitting = next(each for each in count(width) if heads * each % _MULTIPLE == 0)
            yield f"{name} {width} makes {heads * width} channels on each tensor-parallel rank, {needed}; use {fitting}"


def _check_tokens(config: RunConfig) -> Iterator[str]:
    model, length, batch = config.model, config.data.seq_length, config.training.micro_batch_size
    parts = model.context_parallel_size
    if model.sequence_parallel:
        parts *= model.tensor_model_parallel_size
    if model.fp8_format is None or parts <= 0 or length <= 0 or batch <= 0 or length % parts:
        return
    tokens = length * batch // parts
    if tokens % _MULTIPLE == 0:
        return
    step = parts * (2 if model.context_parallel_size > 1 else 1)
    fitting = next(size for size in count(_rounded(length, step), step) if size * batch // parts % _MULTIPLE == 0)
    yield (
        f"--seq-length {length} x --micro-batch-size {batch} makes {tokens} tokens of a micro-batch on each rank, "
        f"which {_asked(config)} needs to be a multiple of {_MULTIPLE}; use --seq-length {fitting}"
    )


def _check_param_gather(config: RunConfig) -> Iterator[str]:
    if config.model.fp8_param_gather and config.parallel_sizes.num_replicas > 1 and not config.ddp.shards_optimizer:
        yield (
            "--fp8-param-gather: parameters are gathered with --use-distributed-optimizer only; add it or leave this "
            "out"
        )


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


CHECKS = (
    Check(("fp8_format", "fp16", "bf16"), _check_precision),
    Check(("fp8_format",), _check_formats),
    Check(("num_layers", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), _check_layers),
    Check((*_SHAPE, *MODEL_SIZE_NAMES), _check_widths),
    Check((*_LATENT, *MODEL_SIZE_NAMES), _check_latent_widths),
    Check(("seq_length", "micro_batch_size", *MODEL_SIZE_NAMES), _check_tokens),
    Check(("use_distributed_optimizer", *MODEL_SIZE_NAMES), _check_param_gather),
)
