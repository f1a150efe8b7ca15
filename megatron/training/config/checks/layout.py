"""Checks of the parallel layout against the world size and the model's shape."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parallel_sizes import MODEL_SIZE_NAMES
from megatron.training.config.checks.check import Check, divisors
from megatron.training.config.run_config import RunConfig


def has_whole_copies(config: RunConfig) -> bool:
    """Tell whether the ranks divide into copies of the model, so that a data-parallel size exists."""
    return not config.parallel_sizes.problems(config.world_size)


def _check_world_size(config: RunConfig) -> Iterator[str]:
    if config.model.parallel_sizes.world_size > 0:
        yield from config.parallel_sizes.problems(config.world_size, config.model.num_experts or 0)


def _check_heads(config: RunConfig) -> Iterator[str]:
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
CHECKS = (
    Check(MODEL_SIZE_NAMES, _check_world_size),
    Check(("num_attention_heads", "tensor_model_parallel_size"), _check_heads),
    Check(("num_attention_heads", "num_query_groups", "tensor_model_parallel_size"), _check_key_value_heads),
    Check(("hidden_size", "ffn_hidden_size", "tensor_model_parallel_size"), _check_feed_forward),
    Check(("seq_length", "tensor_model_parallel_size", "context_parallel_size"), _check_sequence_parallel),
)
