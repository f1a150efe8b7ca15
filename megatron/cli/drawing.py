"""Output flags (text, SVG, PNG) that commands share, and a bar chart with one row per rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.errors import ConfigurationError

FORMATS = ("text", "svg", "png")

Color = str | tuple[float, float, float]


@dataclass(frozen=True)
class BarRow:
    """Row of a chart: (start, length) of each bar in seconds, and its color."""

    label: str
    bars: Sequence[tuple[float, float]]
    colors: Sequence[Color]


def add_drawing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--output`` and ``--format``."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (standard output)")
    parser.add_argument("--format", choices=FORMATS, help="output format (from the suffix of --output, otherwise text)")


def chosen_format(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """Return the output format, from --format or the suffix of --output; exit for a PNG without an output file."""
    output: Path | None = arguments.output
    suffix = "" if output is None else output.suffix.removeprefix(".")
    form: str = arguments.format or (suffix if suffix in FORMATS else "text")
    if form == "png" and output is None:
        parser.error("--format png needs --output FILE")
    return form


def put_text(text: str, output: Path | None) -> None:
    """Write text to a file, or to standard output if ``output`` is None."""
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


def write_png(path: Path, rows: Sequence[BarRow], title: str, *, width: int, begin: float | None = None) -> None:
    """Draw rows of bars from the top down, ``width`` pixels wide; the x axis goes from ``begin``, if given, to 0.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f"--format png needs matplotlib ({error}); install it, or use --format svg") from error
    figure = Figure(figsize=(width / 100, 1.0 + 0.3 * len(rows) + 0.15 * title.count("\n")), dpi=100)
    axes = figure.subplots()
    for place, row in enumerate(rows):
        bars = (place - 0.45, 0.9)
        axes.broken_barh(row.bars, bars, facecolors=row.colors, edgecolors="white", linewidth=0.3)
    if begin is not None:
        axes.set_xlim(begin, 0.0)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, format="png")
