"""A chart as SVG: axes with round numbers, a legend below the title, and the value at each point as a tooltip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from megatron.pictures.chart import Chart, Series

WIDTH, HEIGHT = 520, 300
COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#b83280", "#6b46c1", "#975a16", "#2c7a7b", "#9b2c2c")
_LEFT, _RIGHT, _BOTTOM = 66, 14, 40
_LEGEND_LINE, _TITLE_LINE, _UNIT_LINE = 16, 24, 30
_MOST_IN_LEGEND = 8
_LETTER = 6.6


def draw_chart(chart: Chart) -> str:
    """Return the chart as one SVG element that scales with the page."""
    legend = list(_legend(chart))
    top = _TITLE_LINE + _UNIT_LINE + _LEGEND_LINE * (1 + max((line for _, line, _ in legend), default=-1))
    height = HEIGHT + top - _TITLE_LINE - _UNIT_LINE
    xs = [x for each in chart.series for x, _ in each.points]
    ys = [y for each in chart.series for _, y in each.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs), whole=True), ticks(min(ys), max(ys))
    x_low, x_high = min(xs[0], *xs, x_ticks[0]), max(*xs, x_ticks[-1])
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT),
            height - _BOTTOM - (y - y_low) / (y_high - y_low) * (height - _BOTTOM - top),
        )

    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(chart.title)}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="18" font-size="15" font-weight="bold">{escape(chart.title)}</text>',
    ]
    for series, line, left in legend:
        base = _TITLE_LINE + 12 + line * _LEGEND_LINE
        parts.append(_stroke(series, f"M{left} {base - 4}H{left + 20}"))
        parts.append(f'<text x="{left + 25}" y="{base}">{escape(_short(series.label))}</text>')
    hidden = len(chart.series) - len(legend)
    if hidden and len(chart.series) > 1:
        parts.append(f'<text x="{WIDTH - 12}" y="18" text-anchor="end">and {hidden} more</text>')
    unit_y = top - 14
    parts.append(f'<text x="12" y="{unit_y}" fill="#555">{escape(chart.unit)}</text>')
    for value in y_ticks:
        _, y = place(x_low, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in x_ticks:
        x, _ = place(value, y_low)
        foot = height - _BOTTOM
        parts.append(f'<path d="M{x:.1f} {foot}v4" stroke="#555"/>')
        parts.append(f'<text x="{x:.1f}" y="{foot + 17}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<path d="M{_LEFT} {height - _BOTTOM}H{WIDTH - _RIGHT}" stroke="#555"/>')
    parts.append(
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{height - 6}" text-anchor="middle" fill="#555">iteration</text>'
    )
    for series in chart.series:
        places = [place(x, y) for x, y in series.points]
        parts.append(_stroke(series, "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)))
        shown = 2.5 if len(places) <= 40 else 0
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{shown or 4}" fill="{_color(series)}"'
            f"{'' if shown else ' fill-opacity=' + chr(34) + '0' + chr(34)}><title>{escape(series.label)}\n"
            f"iteration {at:g}: {value:.6g}</title></circle>"
            for (x, y), (at, value) in zip(places, series.points)
        ]
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return four to eight round numbers, the first at or below ``low`` and the last at or above ``high``."""
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = (low - 1, low + 1) if whole else (low - room, high + room)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def number(value: float) -> str:
    """Return a number of an axis, short: 12k, 3M, 1e-05."""
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.4g}"


def _legend(chart: Chart) -> Iterator[tuple[Series, int, float]]:
    """Yield each line that the legend names, in which line of text, and where that begins."""
    if len(chart.series) == 1:
        yield chart.series[0], 0, 12.0
        return
    line, left = 0, 12.0
    for series in chart.series[:_MOST_IN_LEGEND]:
        width = 25 + len(_short(series.label)) * _LETTER + 16
        if left + width > WIDTH and left > 12.0:
            line, left = line + 1, 12.0
        yield series, line, left
        left += width


def _short(label: str) -> str:
    return label if len(label) <= 44 else f"…{label[-43:]}"


def _color(series: Series) -> str:
    return COLORS[series.color % len(COLORS)]


def _stroke(series: Series, path: str) -> str:
    dashes = ' stroke-dasharray="5 3"' if series.dashed else ""
    return f'<path d="{path}" fill="none" stroke="{_color(series)}" stroke-width="1.6"{dashes}/>'
