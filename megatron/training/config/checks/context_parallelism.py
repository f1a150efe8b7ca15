"""Checks of the context-parallel size and of the exchanges between context-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.errors import choices
from megatron.training.config.checks.check import Check
from megatron.training.config.run_config import RunConfig

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


def _check_heads(config: RunConfig) -> Iterator[str]:
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


CHECKS = (
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
        _check_heads,
    ),
)
