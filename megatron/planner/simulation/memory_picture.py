"""The memory of a step over its operations as an SVG picture: one band for each holder, stacked."""

from __future__ import annotations

from html import escape

from megatron.planner.gpu import Gpu
from megatron.planner.simulation.dry_run import DryRun
from megatron.planner.simulation.live_memory import HOLDERS

_COLOURS = ("#4878a8", "#e49444", "#85b6b2", "#6a9f58", "#d1615d", "#a87c9f")
_WIDTH, _HEIGHT = 900, 360
_LEFT, _TOP, _BOTTOM, _RIGHT = 70, 40, 40, 130
_GIB = 2**30


def draw_memory(run: DryRun, gpu: Gpu) -> str:
    """Return the picture; each column shows the moment at which most memory was live in it."""
    columns = _columns(run, _WIDTH - _LEFT - _RIGHT)
    height = _HEIGHT - _TOP - _BOTTOM
    top = max(max(map(sum, columns)), 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22">{escape(_title(run, gpu))}</text>',
    ]
    floor = [0] * len(columns)
    for index, name in enumerate(HOLDERS):
        ceiling = [low + column[index] for low, column in zip(floor, columns)]
        points = [(x, high) for x, high in enumerate(ceiling)] + [(x, low) for x, low in reversed([*enumerate(floor)])]
        path = " ".join(f"{_LEFT + x},{_TOP + height * (1 - value / top):.1f}" for x, value in points)
        parts.append(f'<polygon points="{path}" fill="{_COLOURS[index]}"/>')
        place, line = _WIDTH - _RIGHT + 12, _TOP + 18 * index
        parts.append(f'<rect x="{place}" y="{line}" width="12" height="12" fill="{_COLOURS[index]}"/>')
        parts.append(f'<text x="{place + 18}" y="{line + 11}">{name}</text>')
        floor = ceiling
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + height * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#00000030"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{share * top / _GIB:.1f}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 14}">operations of one step, in order; GiB of live tensors</text>')
    return "\n".join([*parts, "</svg>\n"])


def _title(run: DryRun, gpu: Gpu) -> str:
    record = run.record
    return (
        f"rank {run.rank} of {run.world_size}, {gpu.name}: peak {record.peak_bytes / _GIB:.2f} GiB of "
        f"{gpu.memory_bytes / _GIB:.0f} (dry run)"
    )


def _columns(run: DryRun, count: int) -> list[tuple[int, ...]]:
    """Return what was live in each of ``count`` equal stretches of the step, at the fullest moment of it."""
    last = max(len(run.record.operations), 1)
    entries = run.record.memory
    columns: list[tuple[int, ...]] = []
    index, live = 0, entries[0][1]
    for column in range(count):
        fullest = live
        while index < len(entries) and entries[index][0] * count <= (column + 1) * last:
            live = entries[index][1]
            fullest = max(fullest, live, key=sum)
            index += 1
        columns.append(fullest)
    return columns
