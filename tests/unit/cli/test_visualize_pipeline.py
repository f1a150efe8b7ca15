"""The chart of a schedule shows what the simulator says, and a recorded one is compared with its plan."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.core.pipeline_parallel.schedule_actions import build_schedule
from megatron.core.pipeline_parallel.simulator import Durations, ScheduleError, simulate
from megatron.core.pipeline_parallel.timeline import RankTimeline, Timeline, write_timeline
from megatron.plotting.run_folder import planned_timeline

TOOL = Path(__file__).parents[3] / "tools" / "visualize_pipeline.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_text_chart_of_a_small_pipeline() -> None:
    result = run("--pipeline-model-parallel-size", 2, "--num-microbatches", 2, "--width", 100)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("2 pipeline ranks x 1 chunks, 2 micro-batches: 9 time units, largest bubble 50.0 %")
    assert lines[1].startswith("rank 0 |F0-F1-      B0----   B1----| bubble  50.0 %  peak 2 live")
    assert lines[2].startswith("rank 1 |   F0-B0----F1-B1----      | bubble  50.0 %  peak 1 live")


@pytest.mark.default(3)
@pytest.mark.parametrize(
    ("flags", "last", "saved"),
    [
        (("--delay-wgrad-compute",), "rank 1 |   F0-B0-W0-F1-B1-W1-   | b", "--delay-wgrad-compute saves 1 of 9"),
        (
            ("--defer-embedding-wgrad-compute", "--output-weight-time", 1),
            "rank 1 |   F0-B0-F1-B1-O0-O1-| b",
            "--defer-embedding-wgrad-compute saves 2 of 9",
        ),
        (
            ("--defer-embedding-wgrad-compute", "--output-weight-time", 1, "--wgrad-deferral-limit", 1),
            "rank 1 |   F0-B0----F1-B1-O1-   | b",
            "--defer-embedding-wgrad-compute saves 1 of 9",
        ),
        (("--schedule", "zero-bubble", "--delay-wgrad-compute"), "rank 1 |", "--delay-wgrad-compute saves 0 of 7"),
    ],
)
def test_deferred_weight_gradients_are_drawn(flags: tuple[object, ...], last: str, saved: str, tmp_path: Path) -> None:
    size = ("--pipeline-model-parallel-size", 2, "--num-microbatches", 2)
    lines = run(*size, "--width", 100, *flags).stdout.splitlines()
    assert lines[2].startswith(last)
    assert lines[-1].startswith(f"{saved} time units: ")
    assert run(*size, *flags, "--output", tmp_path / "chart.svg").returncode == 0
    assert saved in (tmp_path / "chart.svg").read_text()


def test_batch_sizes_give_the_number_of_microbatches() -> None:
    result = run("--global-batch-size", 24, "--micro-batch-size", 2, "--data-parallel-size", 3)
    assert "4 micro-batches" in result.stdout


def test_a_chart_that_does_not_fit_is_drawn_smaller() -> None:
    result = run("--pipeline-model-parallel-size", 8, "--num-virtual-stages-per-pipeline-rank", 2, "--width", 80)
    assert result.returncode == 0
    assert max(len(line) for line in result.stdout.splitlines()[1:9]) <= 80


def test_svg_holds_every_pass(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    options = ("--pipeline-model-parallel-size", 3, "--num-microbatches", 5, "--schedule", "zero-bubble")
    assert run(*options, "--output", path).returncode == 0
    titles = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3 * 3 * 5
    assert titles[0] == "F0: forward, 0 to 1"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_png(tmp_path: Path) -> None:
    path = tmp_path / "chart.png"
    assert run("--num-virtual-stages-per-pipeline-rank", 2, "--output", path).returncode == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_png_without_matplotlib_says_what_to_do(tmp_path: Path) -> None:
    result = run("--output", tmp_path / "chart.png")
    assert (result.returncode, result.stdout) == (2, "")
    assert "install it, or use --format svg" in result.stderr


def test_a_recorded_run_is_drawn(tmp_path: Path) -> None:
    timeline = simulate(build_schedule("interleaved", 2, 4, 2), 2)
    write_timeline(tmp_path / "run.json", timeline)
    result = run("--recorded", tmp_path / "run.json")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"2 pipeline ranks x 2 chunks, 4 micro-batches: {timeline.makespan:g} time units")


@pytest.mark.default(6)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pipeline-model-parallel-size", 0), "--pipeline-model-parallel-size 0 must be 1 or more"),
        (("--num-microbatches", 0), "raise --global-batch-size"),
        (
            ("--output-weight-time", 3),
            ("--output-weight-time 3.0 must be less than --backward-time 2.0, because it is a part of it"),
        ),
        (("--wgrad-deferral-limit", -1), "--wgrad-deferral-limit -1 must be 0 or more"),
        (("--num-microbatches", 10**9), "use fewer"),
        (("--schedule", "gpipe"), "invalid choice: 'gpipe'"),
        (("--schedule", "1f1b", "--num-virtual-stages-per-pipeline-rank", 2), "use the interleaved schedule"),
        (("--forward-time", -1), "--forward-time -1.0 must be a number of 0 or more"),
        (("--forward-time", "nan"), "--forward-time nan must be"),
        (("--global-batch-size", 7, "--micro-batch-size", 2), "use 6 or 8"),
        (("--global-batch-size", 8, "--num-microbatches", 2), "pass only one of them"),
        (("--recorded", "absent.json"), "absent.json cannot be read"),
        (("--format", "png"), "--format png needs --output"),
        (("--output", "absent/folder/chart.svg"), "change --output"),
        (("--width", 0), "--width 0 is not between"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: tuple[object, ...], words: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_late_pass_is_planned_with_the_usual_time_of_its_kind() -> None:
    ideal = simulate(build_schedule("1f1b", 2, 5), 1, Durations(forward=1.0, backward=2.0))
    last = ideal.ranks[1]
    late = dataclasses.replace(
        last,
        starts=(*last.starts[:3], *(start + 7.0 for start in last.starts[3:])),
        ends=(*last.ends[:2], *(end + 7.0 for end in last.ends[2:])),
    )
    recorded = Timeline((ideal.ranks[0], late))
    assert recorded.makespan == ideal.makespan + 7.0 - (ideal.ranks[0].ends[-1] - last.ends[-1])
    assert planned_timeline(recorded) == ideal


def test_passes_of_no_schedule_are_refused() -> None:
    ranks = simulate(build_schedule("1f1b", 2, 3), 1).ranks
    backwards = RankTimeline(ranks[0].actions[::-1], ranks[0].starts, ranks[0].ends)
    with pytest.raises(ScheduleError):
        planned_timeline(Timeline((backwards, ranks[1])))
