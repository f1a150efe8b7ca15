"""Print and draw the report of a hang: the blocking rank and the last collectives of each rank.

megatron hang-report out/hang-20261122-140005.json --output hang.svg
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from megatron.cli.arguments import Parser
from megatron.cli.drawing import BarRow, add_drawing_arguments, chosen_format, put_text, write_png
from megatron.core.errors import InputError
from megatron.core.flight_recorder import Communication
from megatron.training.fault_tolerance import HangReport, describe_communication, read_hang_report

WIDTH, ROW_HEIGHT, LABEL_WIDTH, MARGIN = 1600, 26, 190, 10
LINE_WIDTH = 200


def build_parser() -> Parser:
    """Build the command's parser."""
    parser = Parser(prog="megatron hang-report", description=__doc__, allow_abbrev=False)
    parser.add_argument("report", type=Path, help="hang-*.json file, or the --save folder with it (the newest report)")
    parser.add_argument("--last", type=int, default=8, metavar="N", help="communications per rank in the text (8)")
    add_drawing_arguments(parser)
    return parser


def newest_report(path: Path) -> Path:
    """Return ``path``, or the newest report in it if it is a folder.

    Raises:
        InputError: the folder has no report.
    """
    if not path.is_dir():
        return path
    reports = sorted(path.glob("hang-*.json"))
    if not reports:
        raise InputError(f"{path} has no hang-*.json; no hang of a run that saves there was reported")
    return reports[-1]


def latest(answer: Mapping[str, Any]) -> list[Communication]:
    """Return the last communications of a rank, oldest first."""
    return [Communication(**item) for item in answer.get("latest", ())]


def to_text(report: HangReport, count: int) -> str:
    """Format the report with the last communications of every rank that answered, and the root causes at the end."""
    lines = [f"{report.time}, limit {report.limit_s:g} s", *report.table()]
    for rank, answer in sorted(report.answers.items()):
        lines.append(f"rank {rank}, last communications:")
        for item in latest(answer)[-count:] if count else ():
            took = "not over" if item.seconds is None else f"{1000 * item.seconds:.2f} ms"
            lines.append(f"    {item.age_s:8.2f} s ago, {took}: {describe_communication(item)}")
    return "\n".join([*lines, *report.to_text().splitlines()[1 + len(report.table()) :]]) + "\n"


def spans(report: HangReport) -> dict[int, list[tuple[float, float, Communication]]]:
    """Return each rank's communications with their start and end, in seconds relative to the rank's answer (<= 0)."""
    return {
        rank: [
            (-item.age_s, 0.0 if item.seconds is None else item.seconds - item.age_s, item) for item in latest(answer)
        ]
        for rank, answer in report.answers.items()
    }


def first_moment(rows: Mapping[int, Sequence[tuple[float, float, Communication]]]) -> float:
    """Return the start time of the plot, slightly before the last communication of the rank that waits longest."""
    newest = [row[-1][0] for row in rows.values() if row]
    return 1.2 * min(newest, default=-1.0) - 0.001


def to_svg(report: HangReport) -> str:
    """Draw one row per rank with its communications over time; unfinished communications reach the right edge."""
    rows = spans(report)
    begin = first_moment(rows)
    scale = (WIDTH - LABEL_WIDTH - MARGIN) / -begin
    ranks, summary = sorted(report.states), report.culprit_lines()
    height = (len(ranks) + len(summary) + 2) * ROW_HEIGHT
    blamed = {culprit.rank for culprit in report.diagnosis.culprits}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="17" font-size="13">{escape(report.time)}: the last {-begin:.1f} s</text>',
    ]
    for row, rank in enumerate(ranks, start=1):
        top = row * ROW_HEIGHT
        label = f"rank {rank}: {report.processes.get(rank, '') or 'unknown'}"
        color = "#c0392b" if rank in blamed else "black"
        parts.append(f'<text x="{MARGIN}" y="{top + 16}" fill="{color}">{escape(label)}</text>')
        for start, end, item in rows.get(rank, ()):
            if end < begin:
                continue
            left = LABEL_WIDTH + (max(start, begin) - begin) * scale
            length = max((end - max(start, begin)) * scale, 1.0)
            fill = "#e67e22" if item.seconds is None else "#3498db"
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 2}" width="{length:.1f}" height="{ROW_HEIGHT - 4}" fill="{fill}">'
                f"<title>{escape(describe_communication(item))}</title></rect>"
            )
            if item.seconds is None and length > LINE_WIDTH:
                text = escape(f"{item.operation} #{item.sequence} of {item.channel}")
                parts.append(f'<text x="{left + 4:.1f}" y="{top + 16}">{text}</text>')
    for row, line in enumerate(summary, start=len(ranks) + 1):
        parts.append(f'<text x="{MARGIN}" y="{row * ROW_HEIGHT + 16}" fill="#c0392b">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def bar_rows(report: HangReport) -> tuple[list[BarRow], float]:
    """Return one row of bars per rank, with unfinished communications in another color, and the start time."""
    rows = spans(report)
    begin = first_moment(rows)
    result = []
    for rank in sorted(report.states):
        shown = [(start, end, item) for start, end, item in rows.get(rank, ()) if end >= begin]
        bars = [(start, max(end - start, -begin / WIDTH)) for start, end, _ in shown]
        colors = ["#e67e22" if item.seconds is None else "#3498db" for _, _, item in shown]
        result.append(BarRow(f"rank {rank}", bars, colors))
    return result, begin


def main(argv: list[str] | None = None) -> int:
    """Print or plot a hang report and return the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    output: Path | None = arguments.output
    form = chosen_format(parser, arguments)
    if arguments.last < 0:
        parser.error(f"--last {arguments.last} is negative")
    try:
        report = read_hang_report(newest_report(arguments.report))
        if form == "png":
            assert output is not None
            rows, begin = bar_rows(report)
            write_png(output, rows, "\n".join(report.culprit_lines()), width=WIDTH, begin=begin)
            return 0
        text = to_svg(report) if form == "svg" else to_text(report, arguments.last)
        put_text(text, output)
    except InputError as error:
        parser.exit(2, f"error: {'; '.join(str(error).splitlines())}\n")
    except OSError as error:
        parser.exit(2, f"error: {error.filename} cannot be written: {error.strerror}; change --output\n")
    return 0
