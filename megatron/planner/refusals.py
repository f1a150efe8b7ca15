"""Why an implementation cannot run a plan: each reason with the values that would work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.errors import choices
from megatron.planner.gpu import GPUS, Gpu
from megatron.planner.implementations import OURS, Implementation
from megatron.planner.plan import Plan

_FLOAT8_MULTIPLE = 16


def plan_refusals(plan: Plan, implementation: Implementation, gpu: Gpu | None) -> Sequence[str]:
    """Return one line for each reason; none where the plan runs."""
    return [*_shape(plan), *_batches(plan, implementation), *_features(plan, implementation, gpu)]


def _shape(plan: Plan) -> Iterator[str]:
    model, t, c = plan.model, plan.parallel_sizes.tp, plan.parallel_sizes.cp
    for name, size in (("num_attention_heads", model.num_attention_heads), ("ffn_hidden_size", model.ffn_hidden_size)):
        if size % t:
            yield f"{name} {size} is not divisible by tp {t}; {_divisors(size, t)}"
    groups = model.num_query_groups
    if model.num_attention_heads % groups:
        yield f"num_attention_heads {model.num_attention_heads} is not divisible by num_query_groups {groups}"
    if groups % t and t % groups:
        yield f"num_query_groups {groups} and tp {t} do not divide each other; {_divisors(groups, t)}"
    if c > 1 and plan.seq_length % (2 * c):
        yield f"seq_length {plan.seq_length} is not divisible by 2 x cp {c}; use a multiple of {2 * c}"
    if model.sequence_parallel and plan.seq_length // c % t:
        yield f"seq_length / cp is {plan.seq_length // c} and not divisible by tp {t}; leave out sequence_parallel"


def _batches(plan: Plan, implementation: Implementation) -> Iterator[str]:
    product = plan.micro_batch_size * plan.parallel_sizes.dp
    if plan.global_batch_size % product:
        yield (
            f"global_batch {plan.global_batch_size} is not divisible by micro_batch {plan.micro_batch_size} x dp "
            f"{plan.parallel_sizes.dp}; use a multiple of {product}"
        )
        return
    pp = plan.parallel_sizes.pp
    interleaves = plan.stage_layout.num_chunks > 1
    if interleaves and plan.num_microbatches % pp and not implementation.takes_any_microbatches:
        yield (
            f"{plan.num_microbatches} micro-batches are not divisible by pp {pp}, which {implementation.name} asks of "
            f"interleaved stages; use a global_batch that is a multiple of {product * pp}"
        )


def _features(plan: Plan, implementation: Implementation, gpu: Gpu | None) -> Iterator[str]:
    model, pp = plan.model, plan.parallel_sizes.pp
    if plan.optimizer.optimizer == "muon":
        yield "the memory and time of --optimizer muon are not planned; plan with adam, which keeps one moment more"
    if model.cpu_offloading and pp > 1 and not implementation.offloads_in_pipelines:
        yield (
            f"{implementation.name} has no offload of activations in pipelines (pp {pp}); use pp 1, recompute, or the "
            f"implementation {OURS.name}"
        )
    is_recomputed = model.recompute_granularity is not None
    if model.cpu_offloading and is_recomputed and not implementation.offloads_beside_recompute:
        yield f"{implementation.name} offloads or recomputes activations; leave out one"
    if plan.pipeline_schedule == "zero-bubble" and not implementation.schedules_zero_bubble:
        yield (
            f"{implementation.name} has no zero-bubble schedule; use 1f1b or interleaved, or the implementation "
            f"{OURS.name}"
        )
    if plan.stage_layout.num_chunks > 1 and pp == 1:
        yield "virtual stages need pp of 2 or more; leave out vpp or raise pp"
    if model.fp8_format is None:
        return
    if gpu is not None and not gpu.float8_flops:
        able = ", ".join(name for name, each in GPUS.items() if each.float8_flops)
        yield f"{gpu.name} has no products in fp8; use bf16, or one of {able}"
    width = model.ffn_hidden_size // plan.parallel_sizes.tp
    for name, size in (("hidden_size", model.hidden_size), ("ffn_hidden_size / tp", width)):
        if size % _FLOAT8_MULTIPLE:
            yield f"{name} {size} is not divisible by {_FLOAT8_MULTIPLE}, as products in fp8 need; use bf16"


def _divisors(size: int, most: int) -> str:
    """Return the tensor-parallel sizes that would work."""
    return f"use tp {choices(each for each in range(1, max(most, 8) + 1) if size % each == 0)}"
