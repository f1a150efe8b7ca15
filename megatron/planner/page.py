"""An explanation as one HTML page that needs no network: layout, memory bars, pipeline chart, alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from megatron.planner.changes import Change
from megatron.planner.explanation import Explanation
from megatron.planner.pipeline_chart import draw_svg
from megatron.planner.stage_memory import MEMORY_PARTS
from megatron.planner.text_report import describe_chunk, describe_experts, describe_host, rank_lines

_MIB = 2**20
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
    """Return the page; ``ranking`` is a table of other layouts as text."""
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
        "<h2>Sent in a step by the first rank of each stage</h2>",
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
    """Yield what else could be run."""
    if changes:
        yield "<h2>Changes that would make it run</h2>"
        yield _list(f"{each.flags}: {each.cost}" for each in changes)
    if ranking:
        table, _, notes = ranking.partition("\n\n")
        yield f'<h2>Ranked layouts</h2><pre id="ranking" class="wide">{escape(table)}</pre>'
        yield _list(notes.splitlines())


def _speed(explanation: Explanation) -> str:
    time = explanation.prediction.time
    if time is None:
        return f"{explanation.flops:.3e} FLOPs a step"
    return f"{1e3 * time.total:.0f} ms a step, {explanation.tokens_per_second:.0f} tokens/s (predictions)"


def _memory_bars(explanation: Explanation) -> str:
    """Return a bar for each stage, whose parts end at the memory of the GPU or beyond the line that marks it."""
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
        f'<text x="{limit:.2f}" y="{foot + 14}" text-anchor="end" fill="#a00">the GPU gives away '
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
            describe_chunk(chunk, explanation.plan.model.num_further_tokens)
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
