"""Charts as one PNG file, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.pictures.chart import Chart
from megatron.pictures.chart_svg import COLORS


def write_png(path: Path, charts: Sequence[Chart], title: str) -> None:
    """Draw the charts in two columns.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"{path} needs matplotlib ({error}); install it, or name a .html") from error
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
