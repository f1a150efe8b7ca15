"""Charts of runs: which figures make which chart, with title, unit and legend, before anything is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.pictures.metrics_record import MetricsRecord, Points

MOST_POINTS = 600
_MOST_MEANS = 100
_MOST_DATA_SETS = 8
_EVALUATIONS, _DATA_SETS = "the losses of evaluations", "the losses of data sets"
_FIGURES = (
    ("lm_loss", "Training loss", "nats a token"),
    (_DATA_SETS, "Training loss of each data set", "nats a token"),
    (_EVALUATIONS, "Validation loss", "nats a token"),
    ("grad_norm", "Gradient norm, before clipping", "L2 norm"),
    ("learning_rate", "Learning rate", "a step"),
    ("tokens_per_second", "Throughput", "tokens a second"),
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
    """Hold one line of a chart; ``color`` is the number of its color, ``dashed`` tells lines of one color apart."""

    label: str
    points: Points
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Hold the lines of a chart over iterations, and the unit of its values."""

    title: str
    unit: str
    series: Sequence[Series]


def charts_of(records: Sequence[MetricsRecord]) -> list[Chart]:
    """Return the charts that the runs have figures for: each run has a color, each further figure a chart."""
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
    """Yield a line for each data set that the runs are evaluated on; with one run each has its color."""
    for number, record in enumerate(records):
        for place, (name, points) in enumerate(record.evaluations.items()):
            if points and len(records) == 1:
                yield Series(name, thinned(points), place)
            elif points:
                yield Series(f"{record.name}: {name}", thinned(points), number, dashed=place > 0)


def _data_sets(records: Sequence[MetricsRecord]) -> Iterator[Series]:
    """Yield a line for each data set that the runs are trained on, those with the most tokens first."""
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
    """Return the mean losses over the tokens of stretches of as many iterations, at the last of each.

    One iteration may have few tokens of a data set. There are at most a hundred stretches.
    """
    size = -(-max(last_iteration, 1) // _MOST_MEANS)
    stretches: dict[float, tuple[float, float, float]] = {}
    for iteration, loss, count in points:
        stretch = (iteration - 1) // size
        _, loss_sum, total = stretches.get(stretch, (0.0, 0.0, 0.0))
        stretches[stretch] = (iteration, loss_sum + loss * count, total + count)
    return [(iteration, loss_sum / total) for iteration, loss_sum, total in stretches.values() if total > 0]


def thinned(points: Points) -> Points:
    """Return at most so many points as can be seen: of each stretch the lowest and the highest, and the last of all."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-len(points) // (MOST_POINTS // 2))
    kept: Points = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]
