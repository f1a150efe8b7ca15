"""Reports of the planner: an explanation as text and HTML, a comparison, and the ranking of a search.

The HTML page needs no network. It shows the layout, memory bars, the pipeline chart and alternatives. The ranking
is a table of the fastest choices, with the reasons why others were dropped and the launch command of the best
choice. The sensitivity table shows how the fastest layout changes with GPU memory, sequence length, batch size and
number of GPUs.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from megatron.config import RunConfig
from megatron.core.errors import ConfigurationError
from megatron.core.models.gpt import GPTConfig
from megatron.core.parallel_config import ParallelSizes
from megatron.core.pipeline_parallel import StageContents
from megatron.core.registry import registered_scripts
from megatron.planner.communication import GPUS_A_MACHINE
from megatron.planner.explanation import Change, Explanation, first_rank
from megatron.planner.gpu import Gpu
from megatron.planner.memory import MEMORY_PARTS
from megatron.planner.pipeline_chart import draw_svg
from megatron.planner.plan import Plan
from megatron.planner.search import Candidate, Search
from megatron.planner.step_time import StepTime

_MIB = 2**20
_MOST_ROWS = 64
"""Maximum number of lines of the rank map; larger worlds are in the JSON only."""


def to_text(explanation: Explanation, changes: tuple[Change, ...] = ()) -> str:
    """Return the explanation as text, with the changes that would make the run possible."""
    sections = {
        "run": _run(explanation),
        "ranks": rank_lines(explanation.sizes),
        "stages": _stages(explanation),
        "memory per rank, MiB": _memory(explanation),
        "predicted time per step": _time(explanation),
        "sent per step by the first rank of each stage": _traffic(explanation),
        "flags without effect and other notes": iter(explanation.notes or ("none",)),
    }
    if changes:
        sections["changes that would make it fit, the cheapest first"] = describe_changes(changes)
    return "\n\n".join("\n".join([name, *(f"  {line}" for line in lines)]) for name, lines in sections.items()) + "\n"


def describe_changes(changes: tuple[Change, ...]) -> Iterator[str]:
    """Yield a line for each change: its flags and what it costs."""
    for number, change in enumerate(changes, 1):
        yield f"{number}. {change.flags}: {change.cost}"


def describe_experts(model: GPTConfig, imbalance: float) -> Iterator[str]:
    """Yield a line about a model's experts and their load, if it has experts."""
    spread = "the time is for a balanced load (--expert-imbalance 1)"
    if imbalance > 1:
        spread = f"the time is for {imbalance:g} times the mean number of tokens on the most loaded rank"
    if model.moe.num_experts is not None:
        yield (
            f"{sum(model.moe_layers)} layers of {model.moe.num_experts} experts, {model.moe.moe_router_topk} per "
            f"token; {spread}"
        )


def describe_chunk(chunk: StageContents, num_further: int = 0) -> str:
    """Return a description of a model chunk; layers count from 1, as in log lines and checkpoints.

    ``num_further`` is the number of MTP modules, which are on the stage with the loss.
    """
    numbers = [number + 1 for number in chunk.layer_numbers]
    layers = f"layers {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"layer {numbers[0]}" if numbers else ""
    further = f"{num_further} MTP module{'s' * (num_further > 1)}" * (chunk.has_loss and num_further > 0)
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
        f"samples x {explanation.sizes.dp} data-parallel ranks; {plan.global_batch_size * plan.seq_length} tokens "
        "per step"
    )
    yield (f"{explanation.flops:.4e} FLOPs per step, {explanation.flops / explanation.sizes.world_size:.4e} per GPU")
    yield from describe_experts(plan.model, explanation.implementation.expert_imbalance)
    if data.samples:
        yield f"{data.iterations} iterations, {data.samples} samples, {data.tokens} tokens"
    else:
        yield "the length of the run is not known: neither --train-iters nor --train-samples is set"
    for each in data.data_sets:
        yield (
            f"{each.prefix}: {each.tokens} training tokens, {each.samples} samples; {each.samples_wanted} wanted: "
            f"{each.epochs} epochs"
        )
    if data.reason is not None:
        yield f"epochs are not known: {data.reason}"


def rank_lines(sizes: ParallelSizes) -> Iterator[str]:
    """Yield a line for each tensor-parallel group, at most `_MOST_ROWS`."""
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
            + describe_chunk(chunk, plan.model.mtp.mtp_depth)
            for number, chunk in enumerate(plan.stage_layout.chunks(stage))
        )
        of_them = f", {trained} of them trained" if trained != parameters else ""
        yield f"stage {stage}: {chunks}; {parameters} parameters on each rank{of_them}"
    yield f"schedule {plan.pipeline_schedule}, bubble {100 * explanation.bubble:.2f} % of busy time"


def _memory(explanation: Explanation) -> Iterator[str]:
    prediction = explanation.prediction
    if prediction.stages:
        yield "stage" + "".join(f"{name:>12}" for name in (*MEMORY_PARTS, "total"))
    for number, stage in enumerate(prediction.stages):
        sizes = (*(getattr(stage, name) for name in MEMORY_PARTS), stage.total)
        yield f"{number:5}" + "".join(f"{size // _MIB:12}" for size in sizes)
    if prediction.used_bytes is not None:
        yield (
            f"the GPU with the highest memory use needs {prediction.used_bytes // _MIB} of "
            f"{explanation.usable // _MIB} MiB, including libraries and the allocator's reserve"
        )
    yield f"outcome: {prediction.outcome}" + (f": {prediction.reason}" if prediction.reason else "")


def _time(explanation: Explanation) -> Iterator[str]:
    prediction = explanation.prediction
    if prediction.time is None:
        yield "none: see the outcome above"
        return
    parts = dataclasses.asdict(prediction.time)
    names = ("busy", "bubble", "neighbors", "exposed_data_parallel", "update")
    yield f"{1e3 * prediction.time.total:.1f} ms: " + ", ".join(
        f"{name.replace('_', ' ')} {1e3 * parts[name]:.1f}" for name in names
    )
    yield describe_host(prediction.time)
    yield f"{prediction.tflops:.1f} TFLOP/s per GPU as Megatron counts, {explanation.tokens_per_second:.0f} tokens/s"


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


_BAR_WIDTH, _BAR_HEIGHT, _LABEL_WIDTH, _TOTAL_WIDTH = 760, 22, 70, 130
_COLORS = ("#4472a8", "#79a5d1", "#3f8f6b", "#d9953b", "#b55d5d", "#8d7bb0")
_HELD_COLOR = "#c9c9c9"
_CHART_WIDTH = 1080
_STYLE = """
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 10px; text-align: right; border-bottom: 1px solid #ddd; }
td.text, th.text { text-align: left; } .wide { overflow-x: auto; } .oom, .error { color: #a00; } .ok { color: #060; }
#ranking { font-size: 12px; } .key { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px; }
"""


def to_page(explanation: Explanation, changes: Sequence[Change] = (), ranking: str = "") -> str:
    """Return the HTML page; ``ranking`` is a table of other layouts as text."""
    prediction, plan = explanation.prediction, explanation.plan
    outcome = prediction.outcome + (f": {prediction.reason}" if prediction.reason else "")
    size = explanation.size.block + explanation.size.embedding
    parts = [
        f"<h1>{size / 1e9:.2f} billion parameters on {explanation.sizes.world_size} x {escape(explanation.gpu.name)}"
        "</h1>",
        f'<p id="outcome" class="{prediction.outcome}">{escape(outcome)}</p>',
        f"<p>{escape(explanation.sizes.describe())}; {plan.num_microbatches} micro-batches of {plan.micro_batch_size}; "
        f"{escape(_speed(explanation))}</p>",
        *(
            f"<p>{escape(line)}</p>"
            for line in describe_experts(plan.model, explanation.implementation.expert_imbalance)
        ),
        *(() if prediction.time is None else (f"<p>{escape(describe_host(prediction.time))}</p>",)),
        "<h2>Memory of each stage</h2>",
        _memory_bars(explanation),
        "<h2>Pipeline</h2>",
        f"<p>Schedule {escape(plan.pipeline_schedule)}, bubble {100 * explanation.bubble:.2f} % of busy time; the "
        f"first {explanation.timeline.num_microbatches} of {plan.num_microbatches} micro-batches are drawn, in "
        "seconds.</p>",
        f'<div class="wide" id="pipeline">{draw_svg(explanation.timeline, _CHART_WIDTH)}</div>',
        "<h2>Stages</h2>",
        _table(("stage", "chunks", "parameters on each rank"), _stage_rows(explanation)),
        *_after(changes, ranking),
        "<h2>Ranks</h2>",
        f'<pre class="wide">{escape(chr(10).join(rank_lines(explanation.sizes)))}</pre>',
        "<h2>Sent per step by the first rank of each stage</h2>",
        _table(("stage", "operation", "over", "times", "MiB"), _traffic_rows(explanation)),
        "<h2>Flags without effect and other notes</h2>",
        _list(explanation.notes or ("none",)),
    ]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _after(changes: Sequence[Change], ranking: str) -> Iterator[str]:
    """Yield the sections on changes and on other layouts."""
    if changes:
        yield "<h2>Changes that would make it fit</h2>"
        yield _list(f"{each.flags}: {each.cost}" for each in changes)
    if ranking:
        table, _, notes = ranking.partition("\n\n")
        yield f'<h2>Ranked layouts</h2><pre id="ranking" class="wide">{escape(table)}</pre>'
        yield _list(notes.splitlines())


def _speed(explanation: Explanation) -> str:
    time = explanation.prediction.time
    if time is None:
        return f"{explanation.flops:.3e} FLOPs per step"
    return f"{1e3 * time.total:.0f} ms per step, {explanation.tokens_per_second:.0f} tokens/s (predictions)"


def _memory_bars(explanation: Explanation) -> str:
    """Return a memory bar for each stage, and a line at the usable memory of the GPU."""
    stages = explanation.prediction.stages
    if not stages:
        return "<p>none: this cannot run</p>"
    used = explanation.prediction.used_bytes or 0
    held = max(0, used - max(stage.total for stage in stages))
    largest = max(explanation.usable, used)
    scale = _BAR_WIDTH / largest
    width, height = _LABEL_WIDTH + _BAR_WIDTH + _TOTAL_WIDTH, (len(stages) + 1) * (_BAR_HEIGHT + 6)
    svg = [
        f'<svg id="memory" xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for number, stage in enumerate(stages):
        top, left = number * (_BAR_HEIGHT + 6), float(_LABEL_WIDTH)
        svg.append(f'<text x="0" y="{top + 16}">stage {number}</text>')
        for name, color in zip(MEMORY_PARTS, _COLORS):
            size = getattr(stage, name)
            svg.append(
                f'<rect class="part" x="{left:.2f}" y="{top}" width="{size * scale:.2f}" height="{_BAR_HEIGHT}" '
                f'fill="{color}"><title>{name}: {size // _MIB} MiB</title></rect>'
            )
            left += size * scale
        svg.append(
            f'<rect class="held" x="{left:.2f}" y="{top}" width="{held * scale:.2f}" height="{_BAR_HEIGHT}" '
            f'fill="{_HELD_COLOR}"><title>libraries and allocator: {held // _MIB} MiB</title></rect>'
        )
        left += held * scale
        svg.append(f'<text x="{left + 6:.2f}" y="{top + 16}">{(stage.total + held) // _MIB} MiB</text>')
    limit = _LABEL_WIDTH + explanation.usable * scale
    foot = len(stages) * (_BAR_HEIGHT + 6)
    svg.append(f'<line x1="{limit:.2f}" y1="0" x2="{limit:.2f}" y2="{foot}" stroke="#a00" stroke-dasharray="4 3"/>')
    svg.append(
        f'<text x="{limit:.2f}" y="{foot + 14}" text-anchor="end" fill="#a00">usable GPU memory '
        f"{explanation.usable // _MIB} MiB</text></svg>"
    )
    keys = "".join(
        f'<span class="key" style="background:{color}"></span>{name}'
        for name, color in (*zip(MEMORY_PARTS, _COLORS), ("libraries and allocator", _HELD_COLOR))
    )
    return f'<div class="wide">{"".join(svg)}</div><p>{keys}</p>'


def _stage_rows(explanation: Explanation) -> Iterable[tuple[object, ...]]:
    for stage, parameters in enumerate(explanation.size.shards):
        chunks = "; ".join(
            describe_chunk(chunk, explanation.plan.model.mtp.mtp_depth)
            for chunk in explanation.plan.stage_layout.chunks(stage)
        )
        yield stage, chunks, parameters


def _traffic_rows(explanation: Explanation) -> Iterable[tuple[object, ...]]:
    for stage, groups in enumerate(explanation.traffic):
        for each in groups:
            yield stage, each.operation, "-".join(each.axes), each.calls, f"{each.num_bytes / _MIB:.3f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td{_side(cell)}>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _side(cell: object) -> str:
    return ' class="text"' if isinstance(cell, str) and " " in cell else ""


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


_TIME_PARTS = {
    "busy": "busy",
    "bubble": "bubble",
    "neighbors": "pipeline communication",
    "exposed_data_parallel": "exposed data-parallel communication",
    "update": "update",
}


@dataclass(frozen=True)
class _Row:
    """A line of the comparison table: its label, one value per configuration, and the number of decimals."""

    label: str
    values: tuple[float | str | None, ...]
    digits: int = 0

    def texts(self) -> tuple[str, ...]:
        """Return the values as text, "-" for unknown values."""
        return tuple(map(self._text, self.values))

    def _text(self, value: float | str | None) -> str:
        if value is None:
            return "-"
        return value if isinstance(value, str) else f"{value:.{self.digits}f}"

    @property
    def change(self) -> str:
        """Return the change from the first value to the last one, in percent."""
        first, last = self.values[0], self.values[-1]
        if isinstance(first, str) or isinstance(last, str) or first is None or last is None or first == last:
            return ""
        return f"{100 * (last / first - 1):+.1f} %" if first > 0 else ""


def describe_comparison(names: Sequence[str], explanations: Sequence[Explanation]) -> Iterator[str]:
    """Yield the lines of a table with a column per configuration, and the change from the first to the last."""
    rows = list(_rows(explanations))
    labels = max(len(row.label) for row in rows)
    widths = [max(len(name), *(len(row.texts()[place]) for row in rows)) for place, name in enumerate(names)]
    heads = "  ".join(f"{name:>{width}}" for name, width in zip(names, widths))
    yield f"{'':{labels}}  {heads}  change"
    for row in rows:
        texts = "  ".join(f"{text:>{width}}" for text, width in zip(row.texts(), widths))
        yield f"{row.label:{labels}}  {texts}  {row.change}".rstrip()


def _rows(explanations: Sequence[Explanation]) -> Iterator[_Row]:
    def row(label: str, *values: float | str | None, digits: int = 0) -> _Row:
        return _Row(label, values, digits)

    plans = [each.plan for each in explanations]
    yield row("outcome", *(each.prediction.outcome for each in explanations))
    yield row("GPUs", *(str(each.sizes.world_size) for each in explanations))
    parameters = [(each.size.block + each.size.embedding) / 1e9 for each in explanations]
    yield row("parameters, billion", *parameters, digits=3)
    for axis in ("tp", "pp", "cp", "dp", "ep"):
        sizes = [getattr(each.sizes, axis) for each in explanations]
        if max(sizes) > 1:
            yield row(f"{axis} size", *map(str, sizes))
    yield row("pipeline schedule", *(plan.pipeline_schedule for plan in plans))
    yield row("precision", *(_precision(plan) for plan in plans))
    yield row("recompute", *(plan.model.recompute_granularity or "none" for plan in plans))
    yield row("micro-batch size", *(str(plan.micro_batch_size) for plan in plans))
    yield row("micro-batches per step", *(str(plan.num_microbatches) for plan in plans))
    yield row("tokens per step", *(plan.global_batch_size * plan.seq_length for plan in plans))
    fullest = [
        max(each.prediction.stages, key=lambda stage: stage.total) if each.prediction.stages else None
        for each in explanations
    ]
    for part in MEMORY_PARTS:
        yield row(f"{part}, MiB", *(None if stage is None else getattr(stage, part) / _MIB for stage in fullest))
    yield row(
        "stage with the highest memory use, total, MiB",
        *(None if stage is None else stage.total / _MIB for stage in fullest),
    )
    left = [
        None if each.prediction.used_bytes is None else (each.usable - each.prediction.used_bytes) / _MIB
        for each in explanations
    ]
    yield row("free GPU memory, MiB", *left)
    times = [each.prediction.time for each in explanations]
    for part, label in _TIME_PARTS.items():
        yield row(f"{label}, ms", *(None if time is None else 1e3 * getattr(time, part) for time in times), digits=1)
    yield row("step, ms", *(None if time is None else 1e3 * time.total for time in times), digits=1)
    yield row("tokens per second", *(each.tokens_per_second for each in explanations))
    per_gpu = [
        None if each.tokens_per_second is None else each.tokens_per_second / each.sizes.world_size
        for each in explanations
    ]
    yield row("tokens per second per GPU", *per_gpu)
    yield row("TFLOP/s per GPU", *(each.prediction.tflops for each in explanations), digits=1)


_DAY = 86400
_HEADS = "tp  pp  cp  dp vpp  schedule       micro  recompute  sharding     prec.   MFU %  TFLOP/s   ms/step   tokens/s"


def _precision(plan: Plan) -> str:
    fp8 = plan.model.fp8
    return "nvfp4" if fp8.fp4_format else "fp8" if fp8.fp8_format else plan.model.params_dtype


def describe_ranking(found: Search, shown: Sequence[Candidate], train_tokens: int | None) -> Iterator[str]:
    """Yield the lines of the ranking table, with a column of training days if ``train_tokens`` is given."""
    has_experts = any(each.choice.ep is not None for each in shown)
    heads = _HEADS.replace("  dp", "  dp  ep") if has_experts else _HEADS
    yield f"rank  {heads}" + ("      days" if train_tokens else "") + "  MiB left  layers"
    for number, each in enumerate(shown, 1):
        yield f"{number:4}  {_row(each, train_tokens)}"
    yield ""
    yield (
        f"{found.num_choices} layouts: {found.num_choices - found.num_predicted} were excluded without a full "
        f"prediction, {found.num_predicted} were predicted, and {len(found.candidates)} of these fit; times and memory "
        "are predictions"
    )
    yield from _dropped(found)


def launch_command(words: Sequence[str], world_size: int) -> str:
    """Return the torchrun command that starts a run on nodes with up to eight GPUs, the same number on each node."""
    here = max(size for size in range(1, GPUS_A_MACHINE + 1) if world_size % size == 0)
    launcher = ["torchrun", "--nproc-per-node", str(here)]
    if world_size > here:
        launcher += ["--nnodes", str(world_size // here), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    return shlex.join([*launcher, *(registered_scripts()[:1] or ("pretrain_gpt.py",)), *words])


def ranking_json(found: Search, train_tokens: int | None) -> dict[str, Any]:
    """Return every choice as JSON-ready values: the ranked choices in order, and the others with the reason."""
    return {
        "ranked": [
            dataclasses.asdict(each.choice)
            | {
                "pipeline_schedule": each.config.pipeline_schedule,
                "ms_per_step": 1e3 * each.seconds,
                "tokens_per_second": each.tokens_per_second,
                "tflops_per_gpu": each.prediction.tflops,
                "mfu": each.mfu,
                "days": _days(each, train_tokens),
                "margin_mib": each.margin_bytes / _MIB,
                "used_mib": (each.prediction.used_bytes or 0) / _MIB,
            }
            for each in found.ranked
        ],
        "dropped": [
            dataclasses.asdict(each.choice) | {"kind": each.kind, "reason": each.reason} for each in found.dropped
        ],
        "predicted": found.num_predicted,
    }


def _row(each: Candidate, train_tokens: int | None) -> str:
    choice, days = each.choice, _days(each, train_tokens)
    experts = "" if choice.ep is None else f"{choice.ep:3} "
    row = (
        f"{choice.tp:2} {choice.pp:3} {choice.cp:3} {each.config.data_parallel_size:3} {experts}{choice.chunks:3}  "
        f"{each.config.pipeline_schedule:13} {choice.micro_batch_size:6}  {choice.recompute:9}  {choice.sharding:11}  "
        f"{choice.precision:5}  {100 * each.mfu:6.1f} {each.prediction.tflops:8.1f} {1e3 * each.seconds:9.1f} "
        f"{each.tokens_per_second:10.0f}"
    )
    return (
        row + ("" if days is None else f"{days:10.1f}") + f"{each.margin_bytes // _MIB:10}  {choice.describe_split()}"
    )


def _days(each: Candidate, train_tokens: int | None) -> float | None:
    return None if train_tokens is None else train_tokens / each.tokens_per_second / _DAY


def _dropped(found: Search) -> Iterator[str]:
    """Yield the number of dropped choices by kind of reason, with an example of each kind."""
    counts = Counter(each.kind for each in found.dropped)
    for kind, count in counts.most_common():
        example = next(each for each in found.dropped if each.kind == kind)
        yield f"excluded, {kind}: {count}, such as {example.choice.describe()}: {example.reason}"


_MEMORY_FACTORS = (0.5, 0.75, 1.5)
_FACTORS = (0.5, 2.0)


@dataclass(frozen=True)
class Variation:
    """A change of one quantity: the flags that follow those of the run, the number of GPUs, and their type."""

    name: str
    words: tuple[str, ...]
    world_size: int
    gpu: Gpu


@dataclass(frozen=True)
class Sensitivity:
    """Fastest layout of a variation, or the reason why there is none."""

    variation: Variation
    best: Candidate | None
    reason: str = ""

    def to_text(self) -> str:
        """Return the step time, throughput and layout as text, or the reason."""
        best = self.best
        if best is None:
            return f" {self.reason}"
        speed = best.tokens_per_second
        return (
            f"{1e3 * best.seconds:10.1f} {speed:10.0f} {speed / self.variation.world_size:13.1f} "
            f"{best.margin_bytes // _MIB:9}  {best.choice.describe()}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        changed = {"changed": self.variation.name, "world_size": self.variation.world_size}
        if self.best is None:
            return changed | {"reason": self.reason}
        return changed | {
            "choice": dataclasses.asdict(self.best.choice),
            "ms_per_step": 1e3 * self.best.seconds,
            "tokens_per_second": self.best.tokens_per_second,
            "margin_mib": self.best.margin_bytes / _MIB,
        }


def variations(config: RunConfig, gpu: Gpu) -> Iterator[Variation]:
    """Yield the unchanged run, and variations of one quantity each."""
    world, length, batch = config.world_size, config.data.seq_length, config.training.global_batch_size
    yield Variation("as configured", (), world, gpu)
    for factor in _MEMORY_FACTORS:
        changed = dataclasses.replace(gpu, memory_bytes=int(factor * gpu.memory_bytes))
        yield Variation(f"GPU memory {changed.memory_bytes // _MIB} MiB", (), world, changed)
    for tokens in _scaled(length):
        positions = max(tokens, config.model.max_position_embeddings or 0)
        words = ("--seq-length", str(tokens), "--max-position-embeddings", str(positions))
        yield Variation(f"sequence length {tokens}", words, world, gpu)
    for samples in _scaled(batch):
        yield Variation(f"global batch size {samples}", ("--global-batch-size", str(samples)), world, gpu)
    for ranks in _scaled(world):
        yield Variation(f"GPUs {ranks}", (), ranks, gpu)


def _scaled(number: int) -> list[int]:
    """Return half and twice a number, without fractions."""
    return [int(factor * number) for factor in _FACTORS if (factor * number).is_integer()]


def find_sensitivity(variation: Variation, best_of: Callable[[Variation], Candidate | None]) -> Sensitivity:
    """Return the fastest layout of a variation; ``best_of`` returns it, or None if no layout fits."""
    try:
        best = best_of(variation)
    except ConfigurationError as error:
        return Sensitivity(variation, None, f"not possible: {error.problems[0]}")
    return Sensitivity(variation, best, "" if best else "no layout fits")


def describe_sensitivities(several: Sequence[Sensitivity]) -> Iterator[str]:
    """Yield the lines of a table: the fastest layout of each variation, and its speed."""
    width = max(len(each.variation.name) for each in several)
    yield f"{'changed':{width}}    ms/step   tokens/s  tokens/s/GPU  MiB left  fastest layout"
    for each in several:
        yield f"{each.variation.name:{width}} {each.to_text()}"
