"""Plot the metrics of runs as one HTML page or a PNG file.

megatron plot checkpoints/a checkpoints/b --output runs.html
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from megatron.cli.arguments import Parser, exit_status_of
from megatron.core.errors import DataError
from megatron.plotting import charts_of, read_several, to_page


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="--save folder or metrics file of a run; several runs are compared",
    )
    parser.add_argument(
        "--output",
        type=Path,
        action="append",
        metavar="FILE",
        help="file to write, .html or .png (needs matplotlib); may be repeated (plot.html in the first run's folder)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    for output in arguments.output or ():
        if output.suffix not in (".html", ".png"):
            parser.error(f"--output {output} ends in neither .html nor .png; use one of these")
    return exit_status_of(functools.partial(plot, arguments))


def plot(arguments: argparse.Namespace) -> None:
    """Write the plots and print their paths.

    Raises:
        InputError: a run cannot be read, a file cannot be written, or matplotlib is missing.
    """
    records = read_several(arguments.runs)
    outputs: list[Path] = arguments.output or [records[0].path.parent / "plot.html"]
    for output in outputs:
        try:
            if output.suffix == ".png":
                from megatron.plotting import write_png

                write_png(output, charts_of(records), ", ".join(record.name for record in records))
            else:
                output.write_text(to_page(records), encoding="utf-8")
        except OSError as error:
            raise DataError(f"{output} cannot be written: {error.strerror}; change --output") from error
        print(f"wrote {output}")
