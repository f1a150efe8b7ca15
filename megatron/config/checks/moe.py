"""Checks of mixture-of-experts (MoE) models: routing, expert parallelism, and unsupported combinations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.base import Check, divisors
from megatron.config.run_config import RunConfig
from megatron.core.errors import choices


def _check_layers(config: RunConfig) -> Iterator[str]:
    model = config.model
    try:
        layers = model.moe_layers
    except ValueError as error:
        yield f"--moe-layer-freq {model.moe_layer_freq}: {error}"
        return
    if model.num_experts is not None and not any(layers):
        yield (
            f"--moe-layer-freq {model.moe_layer_freq} gives no layer of --num-layers {model.num_layers} experts; leave "
            "--num-experts out, or give a list with a 1"
        )


def _check_spread(config: RunConfig) -> Iterator[str]:
    model = config.model
    experts, size = model.num_experts, model.expert_model_parallel_size
    if experts is None or size < 1:
        return
    tensor, sizes = model.parallel_sizes.expert_tp, config.parallel_sizes
    if experts % size:
        most = math.gcd(experts, sizes.dp * sizes.cp * sizes.tp // max(tensor, 1))
        yield (
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {size}; "
            f"expert-parallel sizes that work: {divisors(most, 64)}"
        )
    if tensor > 0 and model.moe_ffn_hidden_size % tensor:
        yield (
            f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size} is not divisible by --expert-tensor-parallel-size "
            f"{tensor} (by default the tensor-parallel size); sizes that work: "
            f"{divisors(model.moe_ffn_hidden_size, 64)}"
        )
    shared, tensor = model.moe_shared_expert_intermediate_size, model.tensor_model_parallel_size
    if shared is not None and tensor > 0 and shared % tensor:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by --tensor-model-parallel-size "
            f"{tensor}; tensor-parallel sizes that work: {divisors(shared, 64)}"
        )


def _check_choice(config: RunConfig) -> Iterator[str]:
    model = config.model
    experts, topk = model.num_experts, model.moe_router_topk
    if experts is None or experts < 1:
        return
    if topk > experts:
        yield f"--moe-router-topk {topk} is greater than --num-experts {experts}; values from 1 to {experts} work"
    is_softmax = model.moe_router_score_function == "softmax"
    if topk == 1 and is_softmax and not model.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1: a softmax over one expert is 1 whatever its logit, and the router learns nothing; "
            "add --moe-router-pre-softmax"
        )
    if model.moe_router_enable_expert_bias and is_softmax:
        yield (
            "--moe-router-enable-expert-bias moves scores by sigmoid; add --moe-router-score-function sigmoid or leave "
            "it out"
        )
    groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None or group_topk is None or min(groups, group_topk) < 1:
        return
    if experts % groups:
        yield (
            f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}; "
            f"groups that work: {divisors(experts, 64)}"
        )
    elif group_topk > groups:
        yield (
            f"--moe-router-group-topk {group_topk} is greater than --moe-router-num-groups {groups}; values from 1 to "
            f"{groups} work"
        )
    elif not group_topk <= topk <= group_topk * (experts // groups):
        works = [n for n in range(1, groups + 1) if n <= topk <= n * (experts // groups)]
        yield (
            f"--moe-router-topk {topk} experts cannot be of --moe-router-group-topk {group_topk} groups with "
            f"{experts // groups} experts each; numbers of groups that work: {choices(works)}"
        )


def _check_balancing(config: RunConfig) -> Iterator[str]:
    model = config.model
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    words, numbers = " ".join(kinds), " ".join(map(str, coefficients))
    if len(set(kinds)) < len(kinds) or ("none" in kinds and len(kinds) > 1):
        yield f"--moe-router-load-balancing-type {words}: give each kind once, or none alone"
    elif len(coefficients) not in (1, len(kinds)):
        yield (
            f"--moe-aux-loss-coeff {numbers}: {len(kinds)} numbers are expected, one for each of "
            f"--moe-router-load-balancing-type {words}, or one for all"
        )
    if any(not 0 <= value < float("inf") for value in coefficients):
        yield f"--moe-aux-loss-coeff {numbers}: values of 0 or more are expected"
    again = model.recompute_granularity == "full" or "moe" in model.recomputed_modules
    if model.num_experts is not None and model.moe_aux_losses.get("global_aux_loss") and again:
        yield (
            "--moe-router-load-balancing-type global_aux_loss counts the micro-batches so far, which recompute of "
            "layers of experts would count again; use aux_loss, or --recompute-granularity selective without moe"
        )


def _check_dispatch(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.moe_token_dispatcher_type == "alltoall" or model.num_experts is None:
        return
    given = f"--moe-token-dispatcher-type {model.moe_token_dispatcher_type}"
    if model.moe_expert_capacity_factor is not None:
        yield (
            f"{given} gives every rank all tokens, and has no use for --moe-expert-capacity-factor "
            f"{model.moe_expert_capacity_factor}; use --moe-token-dispatcher-type alltoall"
        )
    if model.moe_shared_expert_overlap:
        yield (f"{given} cannot be overlapped by --moe-shared-expert-overlap; use --moe-token-dispatcher-type alltoall")


def _check_float8(config: RunConfig) -> Iterator[str]:
    model = config.model
    tensor, width = model.parallel_sizes.expert_tp, model.moe_ffn_hidden_size
    if tensor > 0 and width % tensor == 0 and width // tensor % 16:
        yield (
            f"--moe-ffn-hidden-size {width} is {width // tensor} on each expert-tensor-parallel rank, which fp8 needs "
            f"to be a multiple of 16; use {-(-width // (16 * tensor)) * 16 * tensor}"
        )
    tensor, shared = model.tensor_model_parallel_size, model.moe_shared_expert_intermediate_size
    if shared is not None and tensor > 0 and shared % tensor == 0 and shared // tensor % 16:
        yield (
            f"--moe-shared-expert-intermediate-size {shared} is {shared // tensor} on each tensor-parallel rank, which "
            f"fp8 needs to be a multiple of 16; use {-(-shared // (16 * tensor)) * 16 * tensor}"
        )


def _check_recompute(config: RunConfig) -> Iterator[str]:
    model = config.model
    of_experts = [name for name in model.recomputed_modules if name in ("moe", "moe_act", "shared_experts")]
    if of_experts and model.num_experts is None:
        yield f"--recompute-modules {' '.join(of_experts)} has no effect without --num-experts; leave it out"
    elif "shared_experts" in of_experts:
        if model.moe_shared_expert_intermediate_size is None:
            yield (
                "--recompute-modules shared_experts has no effect without --moe-shared-expert-intermediate-size; leave "
                "it out"
            )
        elif model.moe_shared_expert_overlap:
            yield (
                "--recompute-modules shared_experts and --moe-shared-expert-overlap exclude each other: what is "
                "computed while tokens travel is kept; leave one out"
            )


def _check_adapters(config: RunConfig, given: str) -> Iterator[str]:
    """Refuse adapters of experts that drop or are cut otherwise, and a bias that moves while the rest stays."""
    model = config.model
    try:
        parts = model.adapted_parts
    except ValueError:
        return  # Said by the check of the names.
    adapted = " ".join(linear for linear in parts if linear in ("linear_fc1", "linear_fc2"))
    if adapted and model.lora_dropout:
        yield (
            f"{given} --lora-dropout {model.lora_dropout} is not built for adapters of experts ({adapted}); use "
            "--lora-dropout 0, or --lora-target-modules linear_qkv linear_proj"
        )
    tp, etp = model.tensor_model_parallel_size, model.parallel_sizes.expert_tp
    if adapted and etp not in (1, tp):
        yield (
            f"{given} adapters of experts ({adapted}) with --expert-tensor-parallel-size {etp} beside "
            f"--tensor-model-parallel-size {tp}; use --expert-tensor-parallel-size 1 or {tp}, or "
            "--lora-target-modules linear_qkv linear_proj"
        )
    if model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate:
        yield (
            f"{given} --lora-rank {model.lora_rank} leaves all weights as they are, and --moe-router-bias-update-rate "
            f"{model.moe_router_bias_update_rate} would move the experts' bias; use --moe-router-bias-update-rate 0"
        )


def _check_beside_experts(config: RunConfig) -> Iterator[str]:
    model = config.model
    yield from _check_recompute(config)
    if model.num_experts is None:
        return
    given = f"--num-experts {model.num_experts}:"
    if model.fp8_format is not None:
        yield from _check_float8(config)
    if model.lora_rank:
        yield from _check_adapters(config, given)
    if config.training.cuda_graph_impl == "local":
        yield (
            f"{given} --cuda-graph-impl local cannot record layers whose experts are given another number of tokens "
            "each time; use --cuda-graph-impl none"
        )
    if model.cpu_offloading:
        yield f"{given} --cpu-offloading is not built for layers of experts; leave it out"
    if config.optimizer.offload_fraction and config.optimizer.optimizer_offload_policy == "auto":
        yield (
            f"{given} --optimizer-offload-policy auto does not know how much memory experts need; use "
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

CHECKS = (
    Check(("num_layers", "num_experts", "moe_layer_freq"), _check_layers),
    SPREAD,
    Check(("num_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"), _check_choice),
    Check(("moe_router_load_balancing_type", "moe_aux_loss_coeff", "recompute_granularity"), _check_balancing),
    Check(("num_experts", "moe_token_dispatcher_type", "moe_expert_capacity_factor"), _check_dispatch),
    Check(
        (
            "num_experts",
            "fp8_format",
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
