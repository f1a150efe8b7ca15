"""Charts of runs, drawn as figures of a page (SVG) or, with matplotlib, as one PNG file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.plotting.metrics_record import MetricsRecord, Points

MOST_POINTS = 600
FEW_POINTS = 2
"""Series with at most this many points are drawn as points, because a line would suggest a trend."""
_MOST_MEANS = 100
_MOST_DATA_SETS = 8
_EVALUATIONS, _DATA_SETS = "evaluations", "data_sets"
_FIGURES = (
    ("lm_loss", "Training loss", "nats per token"),
    (_DATA_SETS, "Training loss of each data set", "nats per token"),
    (_EVALUATIONS, "Validation loss", "nats per token"),
    ("grad_norm", "Gradient norm, before clipping", "L2 norm"),
    ("learning_rate", "Learning rate", "per step"),
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
_NOT_SMOOTHED = (
    "learning_rate",
    "memory_mib.max_allocated",
    "loss_scale",
    "global_batch_size",
    _EVALUATIONS,
    _DATA_SETS,
)
_NOT_DRAWN = ("consumed_samples", "memory_mib.allocated", "memory_mib.reserved", "memory_mib.max_reserved")


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``color`` is the index of its color, ``dashed`` marks further lines of the same color.

    ``smoothed`` is the moving average of the points, or empty if there is none.
    """

    label: str
    points: Points
    color: int
    dashed: bool = False
    smoothed: Points = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """Lines of a chart over iterations, the unit of their values, and the metric's name."""

    title: str
    unit: str
    series: Sequence[Series]
    key: str = ""


def charts_of(records: Sequence[MetricsRecord], smoothing: float = 0.0) -> list[Chart]:
    """Return one chart per metric that the runs recorded, with one color per run.

    ``smoothing`` is the weight of `moving_average`, 0 to below 1. Schedules, sizes and averages are not smoothed.
    """
    drawn = {name for name, _, _ in _FIGURES}
    others = dict.fromkeys(name for record in records for name in record.figures)
    named = [*_FIGURES, *((name, name.replace("_", " "), "") for name in others if name not in (*drawn, *_NOT_DRAWN))]
    drawn_by = {_EVALUATIONS: _evaluations, _DATA_SETS: _data_sets}
    charts = []
    for name, title, unit in named:
        if name in drawn_by:
            series = list(drawn_by[name](records))
        else:
            series = list(_lines(records, name, 0.0 if name in _NOT_SMOOTHED else smoothing))
        charts.append(Chart(title, unit, series, name))
    return [chart for chart in charts if chart.series]


def _lines(records: Sequence[MetricsRecord], name: str, smoothing: float) -> Iterator[Series]:
    lines = [(record, record.figures.get(name, [])) for record in records]
    if name in _CONSTANT_IS_DULL and len({value for _, points in lines for _, value in points}) < 2:
        return
    for record, points in lines:
        if points:
            average = moving_average(points, smoothing) if smoothing > 0 and len(points) > FEW_POINTS else []
            yield Series(record.name, thinned(points), record.color, smoothed=thinned(average))


def moving_average(points: Points, weight: float) -> Points:
    """Return the exponential moving average with bias correction, as TensorBoard's slider computes it.

    ``weight``, from 0 to below 1, is the weight of the previous average. The correction divides by the sum of all
    weights so far, so the average does not start near 0.
    """
    average, rest = 0.0, 1.0
    averages: Points = []
    for x, y in points:
        average = weight * average + (1.0 - weight) * y
        rest *= weight
        averages.append((x, average / (1.0 - rest)))
    return averages


def _evaluations(records: Sequence[MetricsRecord]) -> Iterator[Series]:
    """Yield one line per validation set; a single run gets one color per set."""
    for record in records:
        for place, (name, points) in enumerate(record.evaluations.items()):
            if points and len(records) == 1:
                yield Series(name, thinned(points), place)
            elif points:
                yield Series(f"{record.name}: {name}", thinned(points), record.color, dashed=place > 0)


def _data_sets(records: Sequence[MetricsRecord]) -> Iterator[Series]:
    """Yield one line per training data set, those with the most tokens first."""
    tokens = Counter[str]()
    for record in records:
        tokens.update({name: round(sum(count for _, _, count in points)) for name, points in record.data_sets.items()})
    shown = [name for name, _ in tokens.most_common(_MOST_DATA_SETS)]
    for record in records:
        for place, name in enumerate(shown):
            points = means(record.data_sets.get(name, []), record.last_iteration)
            if points and len(records) == 1:
                yield Series(name, points, place)
            elif points:
                yield Series(f"{record.name}: {name}", points, record.color, dashed=place > 0)


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


WIDTH, HEIGHT = 520, 260
COLORS = ("#2b6cb0", "#c05621", "#2f855a", "#b83280", "#6b46c1", "#975a16", "#2c7a7b", "#9b2c2c")
"""Colors of runs in PNG files; page.css has the same ones, and lighter ones for dark pages."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 12, 46
_MOST_IN_LEGEND = 8
_MOST_MARKED = 40
_LOG_ROOM = 1.05


@dataclass(frozen=True)
class ChartView:
    """How a page draws its charts: which metrics have a logarithmic scale, and whether it has a button for that."""

    log_scale: frozenset[str] = frozenset()
    has_buttons: bool = False


PLAIN = ChartView()


def draw_chart(chart: Chart, view: ChartView = PLAIN) -> str:
    """Return the chart as a figure of a page: title, unit and legend as text, and the lines as SVG.

    On a logarithmic scale, values of 0 and below are left out; if there are no others, the scale stays linear.
    """
    is_log = chart.key in view.log_scale and any(y > 0 for each in chart.series for _, y in each.points)
    series = [_positive(each) for each in chart.series] if is_log else chart.series
    left_out = sum(len(each.points) for each in chart.series) - sum(len(each.points) for each in series)
    notes = [chart.unit] if chart.unit else []
    if is_log:
        notes.append("logarithmic" + (f" (without {left_out:,} values that are not positive)" if left_out else ""))
    return (
        f'<figure class="chart"><figcaption><b>{escape(chart.title)}</b> <span class="unit">{escape(", ".join(notes))}'
        f"</span>{_log_button(chart, is_log) if view.has_buttons else ''}{_legend(chart)}</figcaption>"
        f"{_draw_svg(chart.title, series, is_log)}</figure>"
    )


def _positive(series: Series) -> Series:
    points, smoothed = ([(x, y) for x, y in given if y > 0] for given in (series.points, series.smoothed))
    return replace(series, points=points, smoothed=smoothed)


def _log_button(chart: Chart, is_log: bool) -> str:
    return (
        f'<button type="button" class="log" id="log:{escape(chart.key)}" value="{escape(chart.key)}" '
        f'aria-pressed="{str(is_log).lower()}" title="logarithmic scale">log</button>'
    )


def _legend(chart: Chart) -> str:
    """Return the labels of the lines; the label of a single line is the run's name, which the page shows."""
    items = [
        f'<li title="{escape(each.label)}"><span class="key {_color(each)}{" dashed" if each.dashed else ""}"></span>'
        f"{escape(each.label)}</li>"
        for each in chart.series[:_MOST_IN_LEGEND]
    ]
    hidden = len(chart.series) - len(items)
    return f'<ul class="legend">{"".join(items)}{f"<li>and {hidden} more</li>" if hidden else ""}</ul>'


def _draw_svg(title: str, lines: Sequence[Series], is_log: bool) -> str:
    xs = [x for each in lines for x, _ in each.points]
    ys = [y for each in lines for _, y in each.points]
    x_ticks = ticks(min(xs), max(xs), whole=True)
    if is_log:
        low, high = min(ys) / _LOG_ROOM, max(ys) * _LOG_ROOM
        y_ticks = log_ticks(low, high)
    else:
        y_ticks = ticks(min(ys), max(ys))
        low, high = y_ticks[0], y_ticks[-1]
    axes = Axes(x_ticks[0], x_ticks[-1], low, high, is_log)
    foot = HEIGHT - _BOTTOM
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" data-axes="{axes.as_numbers()}">',
    ]
    for value in y_ticks:
        _, y = axes.place(axes.x_low, value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in x_ticks:
        x, _ = axes.place(value, axes.y_low)
        parts.append(f'<path class="axis" d="M{x:.1f} {foot}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{foot + 19}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {foot}H{WIDTH - _RIGHT}"/>')
    parts.append(f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">iteration</text>')
    parts += [_draw_series(each, axes) for each in lines if each.points]
    return "".join([*parts, "</svg>"])


def _draw_series(series: Series, axes: Axes) -> str:
    """Draw the raw values, and their average on top if there is one; `charts.js` reads the values that it shows."""
    shown = series.smoothed or series.points
    values = " ".join(f"{x:g}:{y:.6g}" for x, y in series.points)
    averages = " ".join(f"{x:g}:{y:.6g}" for x, y in series.smoothed)
    parts = [
        f'<g class="series {_color(series)}" data-label="{escape(series.label)}" data-values="{values}"'
        + (f' data-averages="{averages}">' if averages else ">")
    ]
    dashed = " dashed" if series.dashed else ""
    for points, kind in ((series.points, "raw"), (series.smoothed, "average")) if series.smoothed else ((shown, ""),):
        if len(points) > FEW_POINTS:
            places = "L".join(f"{x:.1f} {y:.1f}" for x, y in (axes.place(*point) for point in points))
            parts.append(f'<path class="line {kind}{dashed}" d="M{places}"/>')
    if len(shown) <= _MOST_MARKED:
        radius = 4 if len(shown) <= FEW_POINTS else 2.5
        for point in shown:
            x, y = axes.place(*point)
            title = f"{escape(series.label)}\niteration {point[0]:g}: {point[1]:.6g}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{title}</title></circle>')
    return "".join([*parts, "</g>"])


@dataclass(frozen=True)
class Axes:
    """Ranges of the axes of a chart; with ``is_log``, the vertical axis is logarithmic."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    is_log: bool = False

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the coordinates of a value in the SVG."""
        low, high, value = (math.log10(each) if self.is_log else each for each in (self.y_low, self.y_high, y))
        return (
            _LEFT + (x - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _BOTTOM - _TOP),
        )

    def as_numbers(self) -> str:
        """Return the rectangle of the axes in the SVG, then the ranges, for `charts.js`."""
        numbers = (_LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM, _TOP, self.x_low, self.x_high, self.y_low, self.y_high)
        return " ".join(f"{each:.9g}" for each in (*numbers, int(self.is_log)))


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


def log_ticks(low: float, high: float) -> list[float]:
    """Return tick values between two positive values, for a logarithmic axis.

    They are powers of ten, or 1, 2 and 5 times powers of ten within two decades, or those of a linear axis if fewer
    than three are between the values.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high > 100 * low:
        step = -(-(last - first) // 7)
        found = [10.0**power for power in range(first, last + 1) if power % step == 0]
    else:
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    found = [value for value in found if low <= value <= high]
    return found if len(found) > 2 else [value for value in ticks(low, high) if low <= value <= high]


def number(value: float) -> str:
    """Format an axis label briefly: 12k, 3M, 1e-05."""
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.4g}"


def _color(series: Series) -> str:
    return f"c{series.color % len(COLORS)}"


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
                linestyle="" if len(xs) <= FEW_POINTS else "--" if series.dashed else "-",
                marker="o" if len(xs) <= _MOST_MARKED else None,
                markersize=3,
                label=series.label,
            )
        axes.set_title(chart.title, fontsize=11, loc="left")
        axes.set_xlabel("iteration")
        axes.set_ylabel(chart.unit)
        axes.grid(color="#e3e3e3")
        axes.legend(fontsize=8)
    figure.savefig(path, format="png")
