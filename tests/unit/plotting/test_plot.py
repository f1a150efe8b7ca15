"""Pages and pictures of runs: what is read, what is drawn, and what is refused."""

from __future__ import annotations

import json
import math
import re
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.plot import main
from megatron.plotting.chart import (
    COLORS,
    MOST_POINTS,
    Chart,
    ChartView,
    Series,
    charts_of,
    draw_chart,
    log_ticks,
    means,
    moving_average,
    number,
    thinned,
    ticks,
)
from megatron.plotting.metrics_record import read_metrics, read_several
from megatron.plotting.run_page import read_resource, to_page


def write_run(folder: Path, iterations: int = 30, **more: Any) -> Path:
    """Write the metrics of a run into a folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    for iteration in range(1, iterations + 1):
        step = {"iteration": iteration, "lm_loss": 5 - iteration / 20, "grad_norm": 1.5, "learning_rate": 1e-4}
        step |= {"tokens_per_second": 900.0 + iteration, "skipped": False, "loss_scale": 1.0, "balance_loss": 0.25}
        lines.append(step | ({} if iteration % 10 else {"memory_mib": {"allocated": 5.0, "max_allocated": 9.0}}) | more)
        if iteration % 10 == 0:
            lines += [{"iteration": iteration, "split": name, "lm_loss": 4.5} for name in ("validation", "code")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def titles(page: str) -> list[str]:
    return re.findall(r'aria-label="([^"]*)"', page)


def test_a_page_has_a_chart_for_each_figure_and_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_run(tmp_path / "first")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'plot.html'}\n"
    page = (folder / "plot.html").read_text()
    assert titles(page) == [
        *("Training loss", "Validation loss", "Gradient norm, before clipping", "Learning rate", "Throughput"),
        *("Peak memory of the first rank since its process began", "balance loss"),
    ]
    assert not re.search(r'(src|href)="', page)
    assert ">code<" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        xml.etree.ElementTree.fromstring(svg)


def test_runs_are_compared_under_names_of_their_own(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "checkpoints", grad_norm=norm) for name, norm in (("a", 1.0), ("b", 2.0))]
    records = read_several(runs)
    assert [record.name for record in records] == ["a/checkpoints", "b/checkpoints"]
    assert [record.name for record in read_several(runs[:1])] == ["a/checkpoints"]
    charts = {chart.title: chart for chart in charts_of(records)}
    assert [series.color for series in charts["Training loss"].series] == [0, 1]
    assert [series.points[0] for series in charts["Gradient norm, before clipping"].series] == [(1, 1.0), (1, 2.0)]
    assert len(charts["Validation loss"].series) == 4


def test_the_losses_of_data_sets_are_means_over_tokens_of_those_with_the_most(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 251):
            # The loss of the first is 1 where it has one token and 4 where it has three.
            sets = {"a": {"lm_loss": 4.0 if step % 2 else 1.0, "num_tokens": 3 if step % 2 else 1}}
            sets |= {f"set {number}": {"lm_loss": 2.0, "num_tokens": number} for number in range(4, 14)}
            del sets[f"set {4 + step % 10}"]
            torn = {"torn": {"lm_loss": None, "num_tokens": 9}, "odd": 3}
            file.write(json.dumps({"iteration": step, "lm_loss": 2.0, "data_sets": sets | torn}) + "\n")
    record = read_metrics(folder)
    (chart,) = (chart for chart in charts_of([record]) if chart.title == "Training loss of each data set")
    assert [series.label for series in chart.series] == [f"set {number}" for number in range(13, 5, -1)]
    points = means(record.data_sets["a"], 250)
    # Three iterations a point: two of the one kind and one of the other.
    assert [x for x, _ in points] == [*range(3, 250, 3), 250]
    assert [y for _, y in points[:2]] == [(3 * 4 + 1 + 3 * 4) / 7, (1 + 3 * 4 + 1) / 5]
    assert "data_sets" not in " ".join(titles(to_page([record])))


def test_torn_lines_and_figures_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"iteration": 1, "lm_loss": 2.0}', '{"iteration": 2, "lm_loss": null, "skipped": true}', "[1]", '{"iter']
    path.write_text("\n".join(lines))
    record = read_metrics(path)
    assert record.figures == {"lm_loss": [(1, 2.0)]}
    assert record.skipped == [2]


def test_samples_and_names_are_text_and_never_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>run", iterations=1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 1, "samples": [{"prompt": "<script>", "text": "&<i>"}]}) + "\n")
    assert main([str(folder)]) == 0
    page = (folder / "plot.html").read_text()
    assert "<b>&lt;script&gt;</b>&amp;&lt;i&gt;" in page
    # The only script is the project's own.
    assert page.count("<script") == 1
    assert "<b>run" not in page


@pytest.mark.parametrize("content", [None, "", "weights\n"], ids=["missing", "empty", "no metrics"])
def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}")


def test_a_picture_without_matplotlib_or_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = write_run(tmp_path / "a", iterations=1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(folder), "--output", str(tmp_path / "a.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert main([str(folder), "--output", str(tmp_path / "none" / "a.html")]) == 2
    assert "cannot be written: No such file or directory; change --output" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(folder), "--output", "a.gif"])


def test_a_picture_has_the_lines_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It runs where matplotlib is installed, which the extra plotting has."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    runs = [write_run(tmp_path / name, iterations=60) for name in ("first", "second")]
    path = tmp_path / "runs.png"
    assert main([*map(str, runs), "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    pixels = imread(path)[..., :3]
    # Seven charts in two columns, of 13 x (0.6 + 4 x 3.6) inches.
    assert pixels.shape == (1500, 1300, 3)
    upper, lower = pixels[:800], pixels[800:]
    for part in (upper, lower):
        # The second run lies over the first, whose color is in the legends.
        first, second = ((abs(part - to_rgb(color)).max(axis=2) < 0.02).sum() for color in COLORS[:2])
        assert second > first > 20
    assert (pixels.min(axis=2) > 0.98).mean() > 0.8


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (4.7, 4.9), (1e-6, 3e-4), (-3.0, 2.0), (7.0, 7.0), (0.0, 0.0), (900.0, 123456.0)]
)
def test_ticks_are_few_and_hold_the_values(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-9
    assert found[-1] >= high - 1e-9
    assert 2 <= len(found) <= 9
    assert len({number(value) for value in found}) == len(found)


def test_one_point_and_one_value_are_drawn(tmp_path: Path) -> None:
    charts = charts_of([read_metrics(write_run(tmp_path / "a", iterations=1))])
    for chart in charts:
        assert "nan" not in draw_chart(chart)
        xml.etree.ElementTree.fromstring(draw_chart(chart))


def shapes(figure: str) -> tuple[int, int]:
    """Return the numbers of lines and of points."""
    return figure.count('<path class="line'), figure.count("<circle")


@pytest.mark.parametrize(("count", "lines", "circles"), [(1, 0, 1), (2, 0, 2), (3, 1, 3), (40, 1, 40), (41, 1, 0)])
def test_one_or_two_values_are_points_and_no_line(count: int, lines: int, circles: int) -> None:
    points = [(float(x), 4.0 - x) for x in range(1, count + 1)]
    assert shapes(draw_chart(Chart("Loss", "nats", [Series("run", points, 0)]))) == (lines, circles)


def test_smoothing_is_the_average_of_tensorboard_with_bias_correction(tmp_path: Path) -> None:
    points = [(1.0, 4.0), (2.0, 2.0), (5.0, 3.0)]
    # What the slider of TensorBoard shows for 0.6: each value has the weight 0.6 to the power of its age in values.
    expected = [4.0, (4 * 0.6 + 2) / 1.6, (4 * 0.36 + 2 * 0.6 + 3) / 1.96]
    found = moving_average(points, 0.6)
    assert [x for x, _ in found] == [1.0, 2.0, 5.0]
    assert [y for _, y in found] == pytest.approx(expected, rel=1e-12)
    assert moving_average(points, 0.0) == points

    record = read_metrics(write_run(tmp_path / "a"))
    charts = {chart.key: chart for chart in charts_of([record], 0.6)}
    (loss,) = charts["lm_loss"].series
    assert loss.smoothed == moving_average(loss.points, 0.6)
    for key in ("learning_rate", "evaluations"):
        assert not any(each.smoothed for each in charts[key].series)
    figure = draw_chart(charts["lm_loss"])
    assert (figure.count('class="line raw"'), figure.count('class="line average"')) == (1, 1)
    assert f'data-averages="1:{loss.points[0][1]:.6g} ' in figure
    # Two values have no average.
    (short,) = charts_of([read_metrics(write_run(tmp_path / "b", iterations=2))], 0.6)[0].series
    assert short.smoothed == []


def test_a_logarithmic_scale_leaves_out_what_is_not_positive() -> None:
    points = [(1.0, 0.0), (2.0, 1.0), (3.0, 10.0), (4.0, 100.0)]
    chart = Chart("Rate", "per step", [Series("run", points, 0)], "rate")
    figure = draw_chart(chart, ChartView(frozenset(["rate"]), has_buttons=True))
    assert "per step, logarithmic (without 1 values that are not positive)" in figure
    assert 'aria-pressed="true"' in figure
    heights = [float(y) for y in re.findall(r'<circle cx="[^"]*" cy="([^"]*)"', figure)]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)
    assert 'aria-pressed="false"' in draw_chart(chart, ChartView(has_buttons=True))
    nothing = Chart("Rate", "", [Series("run", [(1.0, 0.0), (2.0, -1.0)], 0)], "rate")
    assert "logarithmic (" not in draw_chart(nothing, ChartView(frozenset(["rate"])))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (3.0, 70.0, [5, 10, 20, 50]),
        (0.003, 200.0, [0.01, 0.1, 1, 10, 100]),
        (1e-9, 1e9, [1e-9, 1e-6, 1e-3, 1, 1e3, 1e6, 1e9]),
        (4.0, 6.0, [4, 4.5, 5, 5.5, 6]),
        (4.89, 5.11, [4.9, 4.95, 5, 5.05, 5.1]),
    ],
)
def test_ticks_of_a_logarithmic_scale(low: float, high: float, expected: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(expected)


def test_long_names_are_text_of_the_page_that_wraps(tmp_path: Path) -> None:
    name = "a-very-long-name-of-a-run-" * 8
    runs = [write_run(tmp_path / name / each) for each in ("one", "two")]
    page = to_page(read_several(runs))
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", page)
    assert "iteration" in drawn
    assert not any("one" in text for text in drawn)
    assert "overflow-wrap: anywhere" in read_resource("page.css")


def test_long_runs_keep_their_peaks() -> None:
    points = [(float(x), math.sin(x)) for x in range(100_000)]
    points[54_321] = (54_321.0, 40.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 3
    assert (54_321.0, 40.0) in kept
    assert kept[-1] == points[-1]
    assert kept == sorted(kept)
