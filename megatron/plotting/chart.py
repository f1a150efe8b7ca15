"""Charts of runs, drawn as SVG or, with matplotlib, as one PNG file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.plotting.metrics_record import MetricsRecord, Points

MOST_POINTS = 600
_MOST_MEANS = 100
_MOST_DATA_SETS = 8
_EVALUATIONS, _DATA_SETS = "the losses of evaluations", "the losses of data sets"
_FIGURES = (
    ("lm_loss", "Training loss", "nats per token"),
    (_DATA_SETS, "Training loss of each data set", "nats per token"),
    (_EVALUATIONS, "Validation loss", "nats per token"),
    ("grad_norm", "Gradient norm, before clipping", "L2 norm"),
    ("learning_rate", "Learning rate", "a step"),
    ("tokens_per_second", "Throughput", "tokens per second"),
    ("tflops_per_device", "Throughput of each device", "TFLOP/s"),
    ("mfu", "Model FLOPs utilization", "part of the peak"),
    ("step_time_s", "Time of an iteration", "seconds"),
    (
        "memory_mib.max_allocated",
        "Peak memory of the first rank since its process began",
        "MiB (on a CPU: of the whole process)",
    ),
    ("loss_scale", "Loss scale", "factor"),
    ("global_batch_size", "Global batch size", "samples"),
    ("params_norm", "Norm of the parameters", "L2 norm"),
    ("num_zeros", "Zeros in the gradient", "elements"),
    ("max_attention_logit", "Largest attention logit", "logit"),
)
_CONSTANT_IS_DULL = ("loss_scale", "global_batch_size")
_NOT_DRAWN = ("consumed_samples", "memory_mib.allocated", "memory_mib.reserved", "memory_mib.max_reserved")


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``color`` is the index of its color, ``dashed`` marks further lines of the same color."""

    label: str
    points: Points
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines of a chart over iterations, and the unit of their values."""

    title: str
    unit: str
    series: Sequence[Series]


def charts_of(records: Sequence[MetricsRecord]) -> list[Chart]:
    """Return one chart per metric that the runs recorded, with one color per run."""
    drawn = {name for name, _, _ in _FIGURES}
    others = dict.fromkeys(name for record in records for name in record.figures)
    named = [*_FIGURES, *((name, name.replace("_", " "), "") for name in others if name not in (*drawn, *_NOT_DRAWN))]
    drawn_by = {_EVALUATIONS: _evaluations, _DATA_SETS: _data_sets}
    charts = [
        Chart(title, unit, list(drawn_by[name](records) if name in drawn_by else _lines(records, name)))
        for name, title, unit in named
    ]
    return [chart for chart in charts if chart.series]


def _lines(records: Sequence[MetricsRecord], name: str) -> Iterator[Series]:
    lines = [(number, record, record.figures.get(name, [])) for number, record in enumerate(records)]
    if name in _CONSTANT_IS_DULL and len({value for _, _, points in lines for _, value in points}) < 2:
        return
    for number, record, points in lines:
        if points:
            yield Series(record.name, thinned(points), number)


def _evaluations(records: Sequence[MetricsRecord]) -> Iterator[Series]:
    """Yield one line per validation set; a single run gets one color per set."""
    for number, record in enumerate(records):
        for place, (name, points) in enumerate(record.evaluations.items()):
            if points and len(records) == 1:
                yield Series(name, thinned(points), place)
            elif points:
                yield Series(f"{record.name}: {name}", thinned(points), number, dashed=place > 0)


def _data_sets(records: Sequence[MetricsRecord]) -> Iterator[Series]:
    """Yield one line per training data set, those with the most tokens first."""
    tokens = Counter[str]()
    for record in records:
        tokens.update({name: round(sum(count for _, _, count in points)) for name, points in record.data_sets.items()})
    shown = [name for name, _ in tokens.most_common(_MOST_DATA_SETS)]
    for number, record in enumerate(records):
        for place, name in enumerate(shown):
            points = means(record.data_sets.get(name, []), record.last_iteration)
            if points and len(records) == 1:
                yield Series(name, points, place)
            elif points:
                yield Series(f"{record.name}: {name}", points, number, dashed=place > 0)


def means(points: Sequence[tuple[float, float, float]], last_iteration: int) -> Points:
    """Average the losses over bins of iterations, weighted by tokens, at the last iteration of each bin.

    Binning is needed because one iteration may have few tokens of a data set. There are at most 100 bins.
    """
    size = -(-max(last_iteration, 1) // _MOST_MEANS)
    stretches: dict[float, tuple[float, float, float]] = {}
    for iteration, loss, count in points:
        stretch = (iteration - 1) // size
        _, loss_sum, total = stretches.get(stretch, (0.0, 0.0, 0.0))
        stretches[stretch] = (iteration, loss_sum + loss * count, total + count)
    return [(iteration, loss_sum / total) for iteration, loss_sum, total in stretches.values() if total > 0]


def thinned(points: Points) -> Points:
    """Downsample to the number of visible points: the minimum and maximum of each bin, and the last point."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // (MOST_POINTS // 2))
    kept: Points = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


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
    """Return four to eight round tick values, the first at or below ``low`` and the last at or above ``high``."""
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
    """Format an axis label briefly: 12k, 3M, 1e-05."""
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.4g}"


def _legend(chart: Chart) -> Iterator[tuple[Series, int, float]]:
    """Yield each series of the legend, with its text line and its left edge in pixels."""
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


def write_png(path: Path, charts: Sequence[Chart], title: str) -> None:
    """Draw the charts in two columns as a PNG file.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            f"{path} needs matplotlib ({error}); install it, or use a name that ends in .html"
        ) from error
    rows = -(-len(charts) // 2)
    figure = Figure(figsize=(13, 0.6 + 3.6 * rows), dpi=100, facecolor="white", layout="constrained")
    figure.suptitle(title)
    for place, chart in enumerate(charts):
        axes = figure.add_subplot(rows, 2, place + 1)
        for series in chart.series:
            xs, ys = zip(*series.points)
            axes.plot(
                xs,
                ys,
                color=COLORS[series.color % len(COLORS)],
                linestyle="--" if series.dashed else "-",
                marker="o" if len(xs) <= 40 else None,
                markersize=3,
                label=series.label,
            )
        axes.set_title(chart.title, fontsize=11, loc="left")
        axes.set_xlabel("iteration")
        axes.set_ylabel(chart.unit)
        axes.grid(color="#e3e3e3")
        axes.legend(fontsize=8)
    figure.savefig(path, format="png")
