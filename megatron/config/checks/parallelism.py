"""Checks of tensor, data, pipeline and context parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.config.checks.base import Check, divisors
from megatron.config.run_config import RunConfig
from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.errors import ConfigurationError, choices
from megatron.core.parallel_sizes import MODEL_SIZE_NAMES
from megatron.core.pipeline_parallel.schedules import default_schedule, schedule_problems
from megatron.core.pipeline_parallel.stage_layout import layout_problems


def has_whole_copies(config: RunConfig) -> bool:
    """Tell whether the ranks divide into copies of the model, so that a data-parallel size exists."""
    return not config.parallel_sizes.problems(config.world_size)


def _check_world_size(config: RunConfig) -> Iterator[str]:
    if config.model.parallel_sizes.world_size > 0:
        yield from config.parallel_sizes.problems(config.world_size, config.model.num_experts or 0)


def _check_heads_of_tensor_ranks(config: RunConfig) -> Iterator[str]:
    heads, tensor = config.model.num_attention_heads, config.model.tensor_model_parallel_size
    if tensor > 0 and heads > 0 and heads % tensor != 0:
        yield (
            f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size {tensor}; "
            f"tensor-parallel sizes that work: {divisors(heads, heads)}"
        )


def _check_key_value_heads(config: RunConfig) -> Iterator[str]:
    groups, tensor = config.model.num_query_groups, config.model.tensor_model_parallel_size
    if groups <= 0 or tensor <= 0 or groups == config.model.num_attention_heads:
        return
    if groups % tensor != 0 and tensor % groups != 0:
        yield (
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tensor}: "
            f"one must be a multiple of the other; "
            f"tensor-parallel sizes that work: {divisors(groups, groups)} and multiples of {groups}"
        )


def _check_feed_forward(config: RunConfig) -> Iterator[str]:
    width, tensor = config.model.ffn_hidden_size, config.model.tensor_model_parallel_size
    if tensor > 0 and width % tensor != 0:
        yield (
            f"--ffn-hidden-size {width} is not divisible by --tensor-model-parallel-size {tensor}; "
            f"tensor-parallel sizes that work: {divisors(width, 64)}"
        )


def _check_sequence_parallel(config: RunConfig) -> Iterator[str]:
    length, tensor = config.data.seq_length, config.model.tensor_model_parallel_size
    if config.model.context_parallel_size > 1:  # Its own check knows both.
        return
    if config.model.sequence_parallel and tensor > 0 and length % tensor != 0:
        yield (
            f"--seq-length {length} is not divisible by --tensor-model-parallel-size {tensor}, which "
            f"--sequence-parallel needs; the next length that works: {-(-length // tensor) * tensor}"
        )


def _instance_problems(config: RunConfig) -> Iterator[str]:
    number, sizes = config.ddp.num_distributed_optimizer_instances, config.parallel_sizes
    given = f"--num-distributed-optimizer-instances {number}"
    if number <= 1 or sizes.problems(config.world_size):
        return
    if not config.ddp.shards_optimizer and sizes.num_replicas > 1:
        yield f"{given} copies what is sharded, and nothing is; add --use-distributed-optimizer, or leave it out"
    elif sizes.num_replicas == number:
        yield f"{given}: each of the {number} ranks with the same weights would be a copy that shares nothing; lower it"
    for name, replicas in (("same weights", sizes.num_replicas), ("same experts", sizes.num_expert_replicas)):
        if replicas % number and (name == "same weights" or config.model.num_experts is not None):
            able = divisors(replicas, max(1, replicas // 2))
            yield f"{given} does not divide the {replicas} ranks with the {name}; use {able}"


def _check_sharding(config: RunConfig) -> Iterator[str]:
    """Refuse what sharded weights cannot go with."""
    model, ddp = config.model, config.ddp
    strategy = f"--data-parallel-sharding-strategy {ddp.data_parallel_sharding_strategy}"
    if ddp.use_torch_fsdp2 and not ddp.shards_weights and config.parallel_sizes.num_replicas > 1:
        yield f"--use-torch-fsdp2 shards weights too, and {strategy} does not; leave one of them out"
    yield from _instance_problems(config)
    if not ddp.shards_weights:
        return
    instead = "leave it out, or give --data-parallel-sharding-strategy optim_grads"
    if model.lora_rank:
        yield f"--lora-rank {model.lora_rank} with {strategy}: frozen weights would not be sharded; {instead}"
    if model.fp8_param_gather:
        yield f"--fp8-param-gather with {strategy}: weights are gathered in the model's own precision; {instead}"
    if ddp.overlap_param_gather_with_optimizer_step:
        yield f"--overlap-param-gather-with-optimizer-step with {strategy}: an update gathers no weights; {instead}"


DATA_PARALLEL_CHECKS = (
    Check(
        (
            *("data_parallel_sharding_strategy", "use_torch_fsdp2", "use_megatron_fsdp", "lora_rank"),
            *("num_distributed_optimizer_instances", "use_distributed_optimizer", "num_experts"),
            *("fp8_param_gather", "overlap_param_gather_with_optimizer_step", *MODEL_SIZE_NAMES),
        ),
        _check_sharding,
    ),
)
"""Of how a run is trained, which a model that is generated from or converted need not be."""
LAYOUT_CHECKS = (
    Check(MODEL_SIZE_NAMES, _check_world_size),
    Check(("num_attention_heads", "tensor_model_parallel_size"), _check_heads_of_tensor_ranks),
    Check(("num_attention_heads", "num_query_groups", "tensor_model_parallel_size"), _check_key_value_heads),
    Check(("hidden_size", "ffn_hidden_size", "tensor_model_parallel_size"), _check_feed_forward),
    Check(("seq_length", "tensor_model_parallel_size", "context_parallel_size"), _check_sequence_parallel),
)


def _check_layout(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_layers > 0 and model.pipeline_model_parallel_size > 0:
        yield from layout_problems(model, model.num_layers, model.pipeline_model_parallel_layout)


def _check_virtual_stages(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.pipeline_model_parallel_size != 1:
        return
    given = {
        "--num-layers-per-virtual-pipeline-stage": model.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": model.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": model.pipeline_model_parallel_layout,
    }
    for name, value in given.items():
        if value is not None:
            yield (
                f"{name} {value} cuts a pipeline and --pipeline-model-parallel-size is 1; leave it out, or use a "
                "pipeline size of 2 or more"
            )


def _check_schedule(config: RunConfig) -> Iterator[str]:
    model, training = config.model, config.training
    pp, per_step = model.pipeline_model_parallel_size, training.micro_batch_size
    if pp <= 0 or model.num_layers <= 0 or not has_whole_copies(config):
        return
    per_step *= config.data_parallel_size
    if per_step <= 0 or training.global_batch_size <= 0 or training.global_batch_size % per_step:
        return
    try:
        num_chunks = config.stage_layout.num_chunks
    except ConfigurationError:
        return  # Said by the check of the layout.
    name = model.pipeline_schedule or default_schedule(pp, num_chunks)
    group_size = model.microbatch_group_size_per_virtual_pipeline_stage
    yield from schedule_problems(name, pp, training.global_batch_size // per_step, num_chunks, group_size)


LAYOUT_FIELDS = (
    "num_layers",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)
"""What decides which layers are on which stage."""

PIPELINE_CHECKS = (
    Check(LAYOUT_FIELDS, _check_layout),
    Check(LAYOUT_FIELDS, _check_virtual_stages),
    Check(
        (
            *LAYOUT_FIELDS,
            "pipeline_schedule",
            "microbatch_group_size_per_virtual_pipeline_stage",
            "micro_batch_size",
            "global_batch_size",
        ),
        _check_schedule,
    ),
)


_LEVELS = "a2a+p2p"
_EXCHANGES = ("p2p", "all_gather", "a2a", _LEVELS)
_LARGEST_PROPOSED_SIZE = 64


def _check_sequence(config: RunConfig) -> Iterator[str]:
    length, model = config.data.seq_length, config.model
    context = model.context_parallel_size
    tensor = model.tensor_model_parallel_size if model.sequence_parallel else 1
    if length <= 0 or tensor <= 0 or context <= 1 or length % _unit(context, tensor) == 0:
        return
    unit = _unit(context, tensor)
    reason = f"2 x {context} chunks" + (f", and then by tensor({tensor})" if tensor > 1 else "")
    limit = min(length, _LARGEST_PROPOSED_SIZE)
    sizes = [size for size in range(1, limit + 1) if length % _unit(size, tensor) == 0]
    yield (
        f"--seq-length {length} is not divisible by {unit}: --context-parallel-size {context} cuts it into {reason}; "
        f"the next length that works: {-(-length // unit) * unit}; context-parallel sizes that work: {choices(sizes)}"
    )


def _unit(context: int, tensor: int) -> int:
    """Return what a sequence length must be a multiple of."""
    return math.lcm(2 * context if context > 1 else 1, context * tensor)


def _check_exchanges(config: RunConfig) -> Iterator[str]:
    given, layers = config.model.cp_comm_type, config.model.num_layers
    for name in dict.fromkeys(given):
        if name not in _EXCHANGES:
            yield f"--cp-comm-type {name}: values that work: {', '.join(_EXCHANGES)}"
    if len(given) not in (1, layers):
        yield (
            f"--cp-comm-type has {len(given)} values; give one for all layers, or one for each of --num-layers {layers}"
        )


def _check_levels(config: RunConfig) -> Iterator[str]:
    model = config.model
    context, sizes = model.context_parallel_size, model.hierarchical_context_parallel_sizes
    if context <= 1 or _LEVELS not in model.cp_comm_type or _has_levels(config):
        return
    flag = "--hierarchical-context-parallel-sizes"
    pairs = choices(f"{inner} {context // inner}" for inner in range(1, context + 1) if context % inner == 0)
    said = f"{flag} {' '.join(map(str, sizes))} are not two of this product" if sizes else f"{flag} is missing"
    yield f"--cp-comm-type {_LEVELS} cuts --context-parallel-size {context} in two, and {said}; give one of: {pairs}"


def _has_levels(config: RunConfig) -> bool:
    sizes = config.model.hierarchical_context_parallel_sizes
    return len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == config.model.context_parallel_size


def _check_heads_of_context_ranks(config: RunConfig) -> Iterator[str]:
    model = config.model
    context = model.context_parallel_size
    if context > 1 and "a2a" in model.cp_comm_type:
        yield from _head_problems(config, context, "a2a", "--context-parallel-size")
    if context > 1 and _LEVELS in model.cp_comm_type and _has_levels(config):
        inner = model.hierarchical_context_parallel_sizes[0]
        yield from _head_problems(config, inner, _LEVELS, "the first of --hierarchical-context-parallel-sizes")


def _head_problems(config: RunConfig, context: int, exchange: str, sharers: str) -> Iterator[str]:
    model = config.model
    tensor = model.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.num_query_groups
    if tensor <= 0 or groups <= 0 or heads <= 0 or heads % tensor or heads % groups:
        return
    local_heads, local_groups = heads // tensor, key_value_heads_of_rank(groups, tensor)
    if copies_of_key_value_heads(local_heads, local_groups, context) is not None:
        return
    sizes = [size for size in range(1, local_heads + 1) if copies_of_key_value_heads(local_heads, local_groups, size)]
    yield (
        f"--cp-comm-type {exchange} shares the {local_heads} heads of a tensor-parallel rank, in {local_groups} query "
        f"groups, among {sharers} {context} ranks, which is not possible; context-parallel sizes that "
        f"work: {choices(sizes)}; or give --cp-comm-type p2p or all_gather"
    )


def _check_logits(config: RunConfig) -> Iterator[str]:
    size = config.model.context_parallel_size
    if config.logging.log_max_attention_logit and size > 1:
        yield (
            f"--log-max-attention-logit with --context-parallel-size {size}: no rank has all keys of a query; leave it "
            "out, or give --context-parallel-size 1"
        )


CONTEXT_PARALLEL_CHECKS = (
    Check(("context_parallel_size", "log_max_attention_logit"), _check_logits),
    Check(("seq_length", "context_parallel_size", "tensor_model_parallel_size"), _check_sequence),
    Check(("cp_comm_type", "num_layers"), _check_exchanges),
    Check(("cp_comm_type", "context_parallel_size", "hierarchical_context_parallel_sizes"), _check_levels),
    Check(
        (
            "cp_comm_type",
            "hierarchical_context_parallel_sizes",
            "context_parallel_size",
            "tensor_model_parallel_size",
            "num_attention_heads",
            "num_query_groups",
        ),
        _check_heads_of_context_ranks,
    ),
)
