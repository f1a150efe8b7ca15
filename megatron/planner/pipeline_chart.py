"""Timeline of a pipeline schedule as an SVG chart, with a summary for each rank."""

from __future__ import annotations

from xml.sax.saxutils import escape

from megatron.core.pipeline_parallel import Event, Pass, Timeline

LETTERS = {
    Pass.FORWARD: "F",
    Pass.BACKWARD: "B",
    Pass.BACKWARD_INPUT: "B",
    Pass.BACKWARD_WEIGHT: "W",
    Pass.OUTPUT_WEIGHT: "O",
}
# Hue of each kind of pass; chunks differ in lightness.
HUES = {
    Pass.FORWARD: 210,
    Pass.BACKWARD: 140,
    Pass.BACKWARD_INPUT: 140,
    Pass.BACKWARD_WEIGHT: 40,
    Pass.OUTPUT_WEIGHT: 0,
}
ROW_HEIGHT, LABEL_WIDTH, SUMMARY_WIDTH, MARGIN = 24, 60, 210, 10


def label(event: Event, num_chunks: int) -> str:
    """Return the label of a pass: its letter, its micro-batch, and its chunk if there are several chunks."""
    return f"{LETTERS[event.kind]}{event.microbatch}" + (f".{event.chunk}" if num_chunks > 1 else "")


def summary(timeline: Timeline, rank: int) -> str:
    """Return a rank's bubble and its peak of live activations as text."""
    peak = timeline.ranks[rank].peak_activations
    return f"bubble {100 * timeline.bubble(rank):5.1f} %  peak {peak} live"


def title(timeline: Timeline) -> str:
    """Return the title of the chart."""
    return (
        f"{timeline.pipeline_size} pipeline ranks x {timeline.num_chunks} chunks, {timeline.num_microbatches} "
        f"micro-batches: {timeline.makespan:g} time units, largest bubble {100 * timeline.worst_bubble:.1f} % of busy "
        f"time, at most {max((rank.peak_activations for rank in timeline.ranks), default=0)} live activations"
    )


def rows_of(timeline: Timeline) -> list[list[Event]]:
    rows: list[list[Event]] = [[] for _ in timeline.ranks]
    for event in timeline.events():
        rows[event.rank].append(event)
    return rows


def draw_svg(timeline: Timeline, width: int | None, saved: str = "") -> str:
    """Return the chart as an SVG document of ``width`` pixels."""
    width = max(width or 1600, LABEL_WIDTH + SUMMARY_WIDTH + 200)
    scale = (width - LABEL_WIDTH - SUMMARY_WIDTH) / (timeline.makespan or 1.0)
    height = (timeline.pipeline_size + 2) * ROW_HEIGHT + MARGIN
    num_chunks = timeline.num_chunks
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{ROW_HEIGHT - 7}" font-size="13">{escape(title(timeline))}</text>',
    ]
    for rank, row in enumerate(rows_of(timeline)):
        top = (rank + 1) * ROW_HEIGHT
        parts.append(f'<text x="{MARGIN}" y="{top + 16}">rank {rank}</text>')
        for event in row:
            left = LABEL_WIDTH + (event.start - timeline.start) * scale
            length = (event.end - event.start) * scale
            name = label(event, num_chunks)
            parts.append(
                f'<rect x="{left:.2f}" y="{top + 1}" width="{length:.2f}" height="{ROW_HEIGHT - 2}" '
                f'fill="{color(event, num_chunks)}" stroke="white" stroke-width="0.5">'
                f"<title>{name}: {event.kind.value}, {event.start:g} to {event.end:g}</title></rect>"
            )
            if length > 7 * len(name):
                parts.append(f'<text x="{left + length / 2:.2f}" y="{top + 16}" text-anchor="middle">{name}</text>')
        parts.append(f'<text x="{width - SUMMARY_WIDTH + MARGIN}" y="{top + 16}">{summary(timeline, rank)}</text>')
    legend_y = (timeline.pipeline_size + 1) * ROW_HEIGHT + 18
    parts.append(
        f'<text x="{LABEL_WIDTH}" y="{legend_y}">F forward, B backward (of the input where W follows), '
        f"W backward of the weights, O of the output layer's; micro-batch.chunk{saved and f'; {saved}'}</text></svg>"
    )
    return "\n".join(parts) + "\n"


def color(event: Event, num_chunks: int) -> str:
    """Return a pass's color; later chunks are lighter."""
    return f"hsl({HUES[event.kind]}, 65%, {60 + 25 * event.chunk // num_chunks}%)"
