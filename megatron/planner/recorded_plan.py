"""The plan that a record of a measured run describes, its implementation and its GPU."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.pipeline_parallel.schedules import default_schedule
from megatron.core.pipeline_parallel.stage_layout import plan_stage_layout
from megatron.core.transformer.layer_pattern import parse_layer_pattern, parse_window
from megatron.core.transformer.transformer_config import default_ffn_hidden_size
from megatron.planner.implementations import (
    MEGATRON_BRIDGE,
    Implementation,
    implementation_of_software,
)
from megatron.planner.measured_runs import Fields
from megatron.planner.plan import Plan

_PRECISIONS = ("bf16", "fp16", "fp8", "fp32")
_RECIPES = {"current": "tensorwise", "tensorwise": "tensorwise", "mx": "mxfp8", "block": "blockwise", "row": "rowwise"}
"""Recipes of fp8 by what a description of a precision calls them."""
_RECOMPUTES = ("none", "selective", "full", "cpu_offload")
_MOST_LAYERS, _MOST_FURTHER, _MOST_RANKS = 10_000, 64, 100_000
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_TEXT_FIELDS = ("window_size", "window_attn_skip_freq")
"""Fields of a model that few records have, by the names of our flags."""
_EXPERT_FIELDS = ("num_experts", "num_moe_experts", "moe_num_experts", "n_routed_experts")


def recorded_implementation(fields: Fields) -> Implementation:
    """Return the implementation that a record's software means."""
    software = fields.part("software")
    described = " ".join(str(value) for value in software.values.values())
    return implementation_of_software(described, fields.switch("flash_attention", True))


def recorded_plan(fields: Fields) -> Plan:
    """Return the plan of a record. What it leaves out is as in most of such runs: flash attention, a distributed
    optimizer, sequence parallelism beside tensor parallelism, everything overlapped.

    Raises:
        DataError: a field is missing or of another kind.
        ConfigurationError: the layout is none; every problem, with values that would work.
    """
    shape = fields.part("model")
    tp, pp, cp = (fields.integer(axis, 1, most=_MOST_RANKS) for axis in ("tp", "pp", "cp"))
    dp, world_size = _replicas(fields, tp * pp * cp)
    ep = fields.integer("ep", 1, most=_MOST_RANKS)
    sizes = ParallelSizes(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=_expert_tp(fields, tp * cp * dp, ep, tp))
    is_grid = dp * tp * pp * cp == world_size
    problems = sizes.problems(world_size) if is_grid else [_not_a_grid(world_size, tp * pp * cp)]
    problems += _unknown(fields, dp * cp)
    problems += _wrong_experts(shape, sizes)
    problems += _wrong_texts(shape, fields)
    if problems:
        raise ConfigurationError(problems)
    model = _model(fields, shape, sizes)
    layout = plan_stage_layout(model, model.num_layers, model.pipeline_model_parallel_layout)
    micro_batch_size = fields.integer("micro_batch", 1)
    global_batch_size = fields.optional("global_batch")
    if global_batch_size is None:
        global_batch_size = fields.integer("num_microbatches") * micro_batch_size * dp
    is_sharded = fields.switch("distributed_optimizer", default=True)
    fsdp = fields.optional("fsdp") if fields.values.get("fsdp") else None
    strategy = "no_shard" if fsdp in (None, 1) else "optim_grads_params"
    return Plan(
        model=model,
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=is_sharded,
            data_parallel_sharding_strategy=strategy,
            num_distributed_optimizer_instances=1 if strategy == "no_shard" else dp * cp // (fsdp or 1),
            overlap_grad_reduce=fields.switch("overlap_grad_reduce", default=True),
            overlap_param_gather=is_sharded and fields.switch("overlap_param_gather", default=True),
        ),
        optimizer=OptimizerConfig(params_dtype=model.params_dtype),
        parallel_sizes=sizes,
        stage_layout=layout,
        pipeline_schedule=default_schedule(pp, layout.num_chunks),
        seq_length=shape.integer("seq_length"),
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
    )


def _replicas(fields: Fields, model_ranks: int) -> tuple[int, int]:
    """Return the data-parallel size and the number of ranks, of which one may be left out."""
    dp, world_size = fields.optional("dp"), fields.optional("world_size")
    if dp is None:
        world_size = world_size or model_ranks
        return max(1, world_size // model_ranks), world_size
    return dp, world_size or dp * model_ranks


def _expert_tp(fields: Fields, num_ranks: int, ep: int, tp: int) -> int | None:
    """Return how many ranks cut each expert. Where the record leaves it out, Megatron cuts them as the rest (None);
    its recipes, and layouts that this does not fit, have whole experts.
    """
    given = fields.optional("etp")
    is_recipe = recorded_implementation(fields) is MEGATRON_BRIDGE
    return 1 if given is None and (is_recipe or num_ranks % (ep * tp)) else given


def _not_a_grid(world_size: int, model_ranks: int) -> str:
    return (
        f"world_size {world_size} is not tp x pp x cp x dp, with {model_ranks} ranks a model copy; use a multiple of "
        f"{model_ranks} and the dp that follows"
    )


def _num_experts(shape: Fields) -> int | None:
    """Return the number of experts of a layer by any of its names, None for a dense model."""
    return next((shape.optional(name) for name in _EXPERT_FIELDS if shape.values.get(name)), None)


def _wrong_experts(shape: Fields, sizes: ParallelSizes) -> list[str]:
    experts = _num_experts(shape)
    if experts is None:
        return [f"ep {sizes.ep} without experts; give num_experts, or use ep 1"] if sizes.ep > 1 else []
    problems = []
    if experts % sizes.ep:
        problems.append(f"num_experts {experts} is not divisible by ep {sizes.ep}; use an ep that divides it")
    width = shape.integer("moe_ffn_hidden_size")
    if width % sizes.expert_tp:
        problems.append(f"moe_ffn_hidden_size {width} is not divisible by etp {sizes.expert_tp}; use etp 1")
    if shape.integer("moe_router_topk") > experts:
        problems.append(f"moe_router_topk {shape.integer('moe_router_topk')} is more than the {experts} experts")
    return problems


def _unknown(fields: Fields, num_replicas: int) -> list[str]:
    problems = []
    shards = fields.optional("fsdp") if fields.values.get("fsdp") else None
    if shards is not None and num_replicas % shards:
        problems.append(f"fsdp {shards} does not divide the {num_replicas} ranks with the same weights; use a divisor")
    if _precision(fields) not in _PRECISIONS:
        problems.append(f"precision {fields.text('precision')} is not known; use one of {', '.join(_PRECISIONS)}")
    if fields.text("recompute", "none") not in _RECOMPUTES:
        problems.append(f"recompute {fields.text('recompute')} is not known; use one of {', '.join(_RECOMPUTES)}")
    return problems


def _wrong_texts(shape: Fields, fields: Fields) -> list[str]:
    """Return what is wrong with patterns of layers, and with parts of a layer that are computed again."""
    problems = []
    for name in (*_TEXT_FIELDS, "moe_layer_freq"):
        try:
            if name == "window_size" and shape.values.get(name):
                parse_window(shape.text(name))
            elif shape.values.get(name):
                parse_layer_pattern(shape.text(name), shape.integer("num_layers", most=_MOST_LAYERS))
        except ValueError as error:
            problems.append(f"{name} is {shape.text(name)[:60]!r}; {error}")
    (field,) = (each for each in dataclasses.fields(GPTConfig) if each.name == "recompute_modules")
    known = field.metadata["flag"].choices
    problems += [
        f"recompute module {name[:60]} is not known; use some of {', '.join(known)}"
        for name in _recompute_modules(fields)
        if name not in known
    ]
    if shape.values.get("q_lora_rank") and not shape.switch("multi_latent_attention", default=False):
        problems.append("q_lora_rank is of latent attention; give multi_latent_attention true, or leave it out")
    return problems


def _precision(fields: Fields) -> str:
    """Return the first word of the precision: recipes of fp8 may be named behind it."""
    words = fields.text("precision", "bf16").lower().split()
    return words[0] if words else ""


def _float8_recipe(fields: Fields) -> str:
    """Return the recipe of fp8 that the words behind it name."""
    words = fields.text("precision").lower()
    return next((recipe for word, recipe in _RECIPES.items() if word in words), "delayed")


def _model(fields: Fields, shape: Fields, sizes: ParallelSizes) -> GPTConfig:
    tp, pp, cp = sizes.tp, sizes.pp, sizes.cp
    experts = _num_experts(shape)
    precision, recompute = _precision(fields), fields.text("recompute", "none")
    hidden, heads, gated = (
        shape.integer("hidden_size"),
        shape.integer("num_attention_heads"),
        shape.switch("swiglu", default=False),
    )
    padded = shape.optional("padded_vocab_size")
    is_known = padded is not None and padded % tp == 0
    dropout = shape.number("dropout") or 0.0 if shape.values.get("dropout") else 0.0
    if dropout >= 1.0:
        raise shape.error("dropout", "a number from 0 to below 1")
    has_flash_attention = fields.switch("flash_attention", default=True)
    chunks = fields.optional("vpp")
    depth = fields.optional("layers_per_virtual_stage")
    again = recompute if recompute in ("selective", "full") else None
    more: dict[str, Any] = {name: shape.optional(name) for name in _LATENT_FIELDS if shape.values.get(name)}
    more |= {name: shape.text(name) for name in _TEXT_FIELDS if shape.values.get(name)}
    return GPTConfig(
        num_layers=shape.integer("num_layers", most=_MOST_LAYERS),
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=shape.integer("ffn_hidden_size", default_ffn_hidden_size(hidden, gated)),
        kv_channels=shape.integer("head_dim", max(1, hidden // heads)),
        num_query_groups=shape.integer("num_query_groups", heads),
        vocab_size=padded if is_known and padded is not None else shape.integer("vocab_size"),
        make_vocab_size_divisible_by=1 if is_known else 128,
        max_position_embeddings=shape.integer("max_position_embeddings", shape.integer("seq_length")),
        position_embedding_type=shape.text("position_embedding", "rope"),
        normalization=shape.text("normalization", "RMSNorm"),
        swiglu=gated,
        add_bias_linear=shape.switch("linear_bias", default=False),
        add_qkv_bias=shape.switch("qkv_bias", default=False),
        untie_embeddings_and_output_weights=not shape.switch("tied_embeddings", default=False),
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attention_backend="auto" if has_flash_attention else "unfused",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1 and fields.switch("sequence_parallel", default=True),
        num_layers_per_virtual_pipeline_stage=depth,
        num_virtual_stages_per_pipeline_rank=None if depth is not None or chunks == 1 else chunks,
        account_for_embedding_in_pipeline_split=fields.switch("account_for_embedding_in_pipeline_split", default=False),
        account_for_loss_in_pipeline_split=fields.switch("account_for_loss_in_pipeline_split", default=False),
        recompute_granularity=again,
        recompute_modules=_recompute_modules(fields),
        recompute_method=_told(fields, "method", "uniform") if again == "full" else None,
        recompute_num_layers=int(_told(fields, "num-layers", "1")) if again == "full" else None,
        cpu_offloading=recompute == "cpu_offload",
        cpu_offloading_num_layers=int(_told(fields, "num-layers", "1")) if recompute == "cpu_offload" else 0,
        fp8_format="hybrid" if precision == "fp8" else None,
        fp8_recipe=_float8_recipe(fields),
        num_experts=experts,
        moe_ffn_hidden_size=shape.integer("moe_ffn_hidden_size") if experts else 0,
        moe_router_topk=shape.integer("moe_router_topk") if experts else 2,
        moe_shared_expert_intermediate_size=shape.optional("moe_shared_expert_intermediate_size") if experts else None,
        moe_layer_freq=shape.text("moe_layer_freq", "1"),
        moe_token_dispatcher_type="alltoall",
        multi_latent_attention=shape.switch("multi_latent_attention", default=False),
        qk_layernorm=shape.switch("qk_layernorm", default=False),
        mtp_num_layers=shape.integer("mtp_num_layers", most=_MOST_FURTHER)
        if shape.values.get("mtp_num_layers")
        else None,
        pipeline_model_parallel_layout=fields.text("pipeline_layout") or None,
        **more,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        fp16=precision == "fp16",
        bf16=precision in ("bf16", "fp8"),
    )


def _recompute_modules(fields: Fields) -> tuple[str, ...]:
    """Return the parts that the flags name which a record quotes of its recompute: the core of attention without."""
    found = re.search(r"--recompute-modules((?:[ =]+[a-z_]+)+)", fields.text("recompute_detail"))
    return tuple(found.group(1).replace("=", " ").split()) if found else ("core_attn",)


def _told(fields: Fields, name: str, default: str) -> str:
    """Return a value of the flags that a record quotes of its recompute or offload."""
    found = re.search(rf"-{name}[ =](\w+)", fields.text("recompute_detail"))
    value = found.group(1) if found else default
    return value if value.isdecimal() == default.isdecimal() else default
