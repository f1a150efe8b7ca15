"""Draw predicted memory and step time against measured runs as ``docs/images/planner.svg``; with --check, only compare.

python docs/scripts/draw_planner.py

Measurements are those of ``benchmarks/planner/measured_runs.json``, predictions those of the newest
``benchmarks/results/planner_*.json``. Each run is predicted with constants that were fitted to the runs of the other
models.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "docs" / "images" / "planner.svg"
MEASURED = ROOT / "benchmarks" / "planner" / "measured_runs.json"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("planner_2*.json"))[-1]

COLORS = {
    "GPT-2-345M": "#7b3294",
    "Llama-3.1-8B": "#2c7fb8",
    "Qwen2.5-14B": "#d95f0e",
    "Llama-3.1-70B": "#238b45",
    "Qwen2.5-72B": "#c51b8a",
}
SIZE, LEFT, TOP, GAP = 300, 66, 62, 110


@dataclass(frozen=True)
class Point:
    """One run's measured and predicted value, in the unit of its panel."""

    model: str
    measured: float
    predicted: float


def points(unit: str) -> Iterator[Point]:
    """Yield the runs whose memory (``unit`` GiB) or step time (``unit`` s) the records say to compare."""
    measured = {run["id"]: run for run in json.loads(MEASURED.read_text(encoding="utf-8"))["runs"]}
    for predicted in json.loads(RESULTS.read_text(encoding="utf-8"))["left_out"]:
        run = measured[predicted["id"]]
        found = _memory(run) if unit == "GiB" else _time(run)
        value = predicted["memory_mib" if unit == "GiB" else "ms_per_iter"]
        if found is not None and value is not None:
            factor = 1024 if unit == "GiB" else 1000
            yield Point(run["model"]["name"], found / factor, value / factor)


def _memory(run: dict[str, Any]) -> float | None:
    peaks = [rank["max_allocated"] for rank in run["memory"].get("per_rank", {}).values()]
    found = max(peaks) if peaks else run["memory"].get("value_mib")
    return found if run["scored"]["memory"] else None


def _time(run: dict[str, Any]) -> float | None:
    return run["ms_per_iter"] if run["scored"]["time"] else None


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "middle", extra: str = "") -> str:
    """Return a line of text at its baseline."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def panel(left: float, title: str, unit: str, ticks: Sequence[int], shown: Sequence[Point]) -> Iterator[str]:
    """Yield the parts of one plot with logarithmic axes from the first tick to the last."""
    low, high = math.log(ticks[0]), math.log(ticks[-1])

    def place(value: float) -> float:
        return SIZE * (math.log(value) - low) / (high - low)

    def at(point: Point) -> tuple[float, float]:
        return left + place(point.measured), TOP + SIZE - place(point.predicted)

    errors = [abs(point.predicted / point.measured - 1) for point in shown]
    summary = f"{len(shown)} runs: {sum(errors) / len(errors):.1%} mean error, {max(errors):.1%} worst"
    yield text(left + SIZE / 2, TOP - 26, title, size=15, extra=' font-weight="bold"')
    yield text(left + SIZE / 2, TOP - 9, summary)
    yield f'<rect x="{left}" y="{TOP}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#888"/>'
    for tick in ticks:
        offset = place(tick)
        x, y = left + offset, TOP + SIZE - offset
        yield f'<path d="M{x:.1f} {TOP}V{TOP + SIZE}M{left} {y:.1f}H{left + SIZE}" stroke="#e4e4e4"/>'
        yield text(x, TOP + SIZE + 16, f"{tick:g}")
        yield text(left - 6, y + 4, f"{tick:g}", anchor="end")
    yield f'<path d="M{left} {TOP + SIZE}L{left + SIZE} {TOP}" stroke="#555" stroke-dasharray="5 4"/>'
    for point in shown:
        x, y = at(point)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLORS[point.model]}" fill-opacity="0.75"/>'
    yield text(left + SIZE / 2, TOP + SIZE + 34, f"measured ({unit})")
    x, y = left - 44, TOP + SIZE / 2
    yield text(x, y, f"predicted ({unit})", extra=f' transform="rotate(-90 {x} {y})"')


def draw() -> str:
    """Return the document: memory on the left, step time on the right, and the models' colors below."""
    parts = [
        *panel(LEFT, "Peak GPU memory", "GiB", (4, 8, 16, 32, 64, 128), list(points("GiB"))),
        *panel(LEFT + SIZE + GAP, "Step time", "s", (16, 32, 64, 128), list(points("s"))),
        *legend(),
    ]
    return document(LEFT + 2 * SIZE + GAP + 20, TOP + SIZE + 76, parts)


def legend() -> Iterator[str]:
    """Yield the name of each model after a circle of its color."""
    for number, (model, color) in enumerate(COLORS.items()):
        x, y = LEFT + 145 * number, TOP + SIZE + 62
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="{color}"/>' + text(x + 10, y + 4, model, anchor="start")


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Return an SVG document on a white background, so that it can be read in a dark theme."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" fill="#222"><title>Predicted and measured memory and step time of GPU runs</title>'
    )
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def main(argv: Sequence[str] | None = None, draw: Callable[[], str] = draw) -> int:
    """Write the plot, or compare it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the plot is out of date")
    drawn = draw()
    if not parser.parse_args(argv).check:
        IMAGE.write_text(drawn, encoding="utf-8")
        return 0
    if IMAGE.is_file() and IMAGE.read_text(encoding="utf-8") == drawn:
        return 0
    print(f"{IMAGE.name}: out of date; run python docs/scripts/draw_planner.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
