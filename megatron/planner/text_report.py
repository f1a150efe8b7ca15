"""An explanation as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.changes import Change
from megatron.planner.explanation import Explanation, first_rank
from megatron.planner.stage_memory import MEMORY_PARTS
from megatron.planner.step_time import StepTime

_MIB = 2**20
_MOST_ROWS = 64
"""Lines of the rank map; larger worlds are in the JSON."""


def to_text(explanation: Explanation, changes: tuple[Change, ...] = ()) -> str:
    """Return the explanation in sections of lines, with changes that would make it run."""
    sections = {
        "run": _run(explanation),
        "ranks": rank_lines(explanation.sizes),
        "stages": _stages(explanation),
        "memory of a rank, MiB": _memory(explanation),
        "time of a step, a prediction": _time(explanation),
        "sent in a step by the first rank of each stage": _traffic(explanation),
        "flags without effect and other notes": iter(explanation.notes or ("none",)),
    }
    if changes:
        sections["changes that would make it run, the cheapest first"] = describe_changes(changes)
    return "\n\n".join("\n".join([name, *(f"  {line}" for line in lines)]) for name, lines in sections.items()) + "\n"


def describe_changes(changes: tuple[Change, ...]) -> Iterator[str]:
    """Yield a line for each change: its flags and what it costs."""
    for number, change in enumerate(changes, 1):
        yield f"{number}. {change.flags}: {change.cost}"


def describe_experts(model: GPTConfig, imbalance: float) -> Iterator[str]:
    """Yield a line on a model's experts, if it has some, and on their load."""
    spread = "the time is for a balanced load (--expert-imbalance 1)"
    if imbalance > 1:
        spread = f"the time is for {imbalance:g} times the mean number of tokens on the most loaded rank"
    if model.num_experts is not None:
        yield (
            f"{sum(model.moe_layers)} layers of {model.num_experts} experts, of which each token goes to "
            f"{model.moe_router_topk}; {spread}"
        )


def describe_chunk(chunk: StageContents, num_further: int = 0) -> str:
    """Return what a model chunk holds in words; layers count from 1 as in log lines and checkpoints.

    ``num_further`` tokens beyond the next are predicted where the loss is.
    """
    numbers = [number + 1 for number in chunk.layer_numbers]
    layers = f"layers {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"layer {numbers[0]}" if numbers else ""
    further = f"{num_further} of further tokens" * (chunk.has_loss and num_further > 0)
    has_copy = bool(further) and not chunk.has_embedding
    embedding = "embedding" * chunk.has_embedding or "embedding's copy" * has_copy
    parts = (embedding, layers, further, "output layer and loss" * chunk.has_loss)
    return " + ".join(filter(None, parts)) or "nothing"


def _run(explanation: Explanation) -> Iterator[str]:
    plan, data, size = explanation.plan, explanation.data, explanation.size
    yield f"{explanation.sizes.world_size} ranks of {explanation.gpu.name}, {explanation.sizes.describe()}"
    yield (
        f"{(size.block + size.embedding) / 1e9:.3f} billion parameters, vocabulary {plan.model.vocab_size} padded to "
        f"{plan.model.padded_vocab_size}"
    )
    yield (
        f"global batch {plan.global_batch_size} = {plan.num_microbatches} micro-batches x {plan.micro_batch_size} "
        f"samples x {explanation.sizes.dp} data-parallel ranks; {plan.global_batch_size * plan.seq_length} tokens a "
        "step"
    )
    yield (
        f"{explanation.flops:.4e} FLOPs a step, {explanation.flops / explanation.sizes.world_size:.4e} of them on a GPU"
    )
    yield from describe_experts(plan.model, explanation.implementation.expert_imbalance)
    if data.samples:
        yield f"{data.iterations} iterations, {data.samples} samples, {data.tokens} tokens"
    else:
        yield "the length of the run is not known: no --train-iters, and no --train-samples"
    for each in data.data_sets:
        yield (
            f"{each.prefix}: {each.tokens} training tokens, {each.samples} samples; {each.samples_wanted} wanted: "
            f"{each.epochs} epochs"
        )
    if data.reason is not None:
        yield f"epochs are not known: {data.reason}"


def rank_lines(sizes: ParallelSizes) -> Iterator[str]:
    """Yield a line for each tensor-parallel group, at most so many that a screen holds them."""
    starts = range(0, sizes.world_size, sizes.tp)
    for start in starts[:_MOST_ROWS]:
        place, last = sizes.place(start), start + sizes.tp - 1
        ranks, tensor = (f"{start}-{last}", f"0-{sizes.tp - 1}") if sizes.tp > 1 else (f"{start}", "0")
        experts = "".join(
            f"  {axis} {first}" if first == end else f"  {axis} {first}-{end}"
            for (axis, first), end in zip(sizes.expert_place(start).items(), sizes.expert_place(last).values())
        )
        yield f"{ranks:>11}  pp {place['pp']}  dp {place['dp']}  cp {place['cp']}  tp {tensor}{experts}"
    if len(starts) > _MOST_ROWS:
        yield f"... and {len(starts) - _MOST_ROWS} more tensor-parallel groups; --json lists every rank"


def _stages(explanation: Explanation) -> Iterator[str]:
    plan, size = explanation.plan, explanation.size
    for stage, (parameters, trained) in enumerate(zip(size.shards, size.trained)):
        chunks = "; ".join(
            (f"chunk {number}: " if plan.stage_layout.num_chunks > 1 else "")
            + describe_chunk(chunk, plan.model.num_further_tokens)
            for number, chunk in enumerate(plan.stage_layout.chunks(stage))
        )
        of_them = f", {trained} of them trained" if trained != parameters else ""
        yield f"stage {stage}: {chunks}; {parameters} parameters on each rank{of_them}"
    yield f"schedule {plan.pipeline_schedule}, bubble {100 * explanation.bubble:.2f} % of busy time"


def _memory(explanation: Explanation) -> Iterator[str]:
    prediction = explanation.prediction
    if prediction.stages:
        yield "stage" + "".join(f"{name:>12}" for name in (*MEMORY_PARTS, "together"))
    for number, stage in enumerate(prediction.stages):
        sizes = (*(getattr(stage, name) for name in MEMORY_PARTS), stage.total)
        yield f"{number:5}" + "".join(f"{size // _MIB:12}" for size in sizes)
    if prediction.used_bytes is not None:
        yield (
            f"the fullest GPU shows {prediction.used_bytes // _MIB} of {explanation.usable // _MIB} MiB with what "
            "libraries and the allocator hold"
        )
    yield f"outcome: {prediction.outcome}" + (f": {prediction.reason}" if prediction.reason else "")


def _time(explanation: Explanation) -> Iterator[str]:
    prediction = explanation.prediction
    if prediction.time is None:
        yield "none: it does not run"
        return
    parts = dataclasses.asdict(prediction.time)
    names = ("busy", "bubble", "neighbours", "exposed_data_parallel", "update")
    yield f"{1e3 * prediction.time.total:.1f} ms: " + ", ".join(
        f"{name.replace('_', ' ')} {1e3 * parts[name]:.1f}" for name in names
    )
    yield describe_host(prediction.time)
    yield f"{prediction.tflops:.1f} TFLOP/s a GPU as Megatron counts, {explanation.tokens_per_second:.0f} tokens/s"


def describe_host(time: StepTime) -> str:
    """Return the host's time to launch the layers of the slowest stage, and whether the GPU waits for it."""
    line = f"host: {1e3 * time.host:.1f} ms to launch the layers"
    return f"{line}; host-bound: the GPU waits for the host" if time.is_host_bound else line


def _traffic(explanation: Explanation) -> Iterator[str]:
    if not any(explanation.traffic):
        yield "nothing"
    for stage, groups in enumerate(explanation.traffic):
        for each in groups:
            yield (
                f"rank {first_rank(explanation.sizes, stage)}: {each.operation} over {'-'.join(each.axes)}: "
                f"{each.calls} times, {each.num_bytes / _MIB:.3f} MiB"
            )
