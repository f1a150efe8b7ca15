"""Measure one GPU in ten minutes: which paths work, what is right, and how fast it is against the predictions.

Parts run one after the other, each in a process with a time limit. Each finding is a line of findings.jsonl as soon as
it is known. A part that fails or hangs costs no other part its time. report.md is written after every part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.emulated_cuda.build import BuildError, built_libraries
from tests.emulated_cuda.gpus import GPUS as EMULATED
from tests.gpu.window import findings
from tests.gpu.window.plan import PARTS, TOTAL_SECONDS, choose_parts, planned_seconds
from tests.gpu.window.runner import FINDINGS, REPORT, REPOSITORY, Settings, run_window

PREDICTIONS = Path(__file__).with_name("predictions.json")
_DEFAULT_FOLDER = REPOSITORY / "gpu_window"


def build_parser() -> argparse.ArgumentParser:
    """Declare the command's flags."""
    parser = argparse.ArgumentParser(prog="gpu_window.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=_DEFAULT_FOLDER, metavar="DIR", help="folder (gpu_window)")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, metavar="S", help="time of the window (600)")
    parser.add_argument("--only", type=_numbers, default=(), metavar="N,N", help="run these parts only")
    parser.add_argument("--skip", type=_numbers, default=(), metavar="N,N", help="leave these parts out")
    parser.add_argument("--list", action="store_true", help="list the parts with their times, and end")
    parser.add_argument("--report", action="store_true", help="write the report of the findings in --output, and end")
    parser.add_argument(
        "--predict", action="store_true", help="write the predictions of each GPU type, which needs no GPU, and end"
    )
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS, metavar="FILE", help="file of the predictions")
    parser.add_argument("--gpu", action="append", metavar="TYPE", help="with --predict: this GPU type only (repeat)")
    parser.add_argument("--small", action="store_true", help="take sizes that a CPU computes in seconds")
    parser.add_argument(
        "--emulate-cuda",
        nargs="?",
        const="h100",
        choices=sorted(EMULATED),
        metavar="TYPE",
        help="run on an emulated GPU, at small sizes (h100); its times are no measurements",
    )
    parser.add_argument("--crash-part", type=int, metavar="N", help="let part N kill itself, to test this command")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 if the report was written, also of a machine without a GPU."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        parts = choose_parts(arguments.only, arguments.skip)
    except ValueError as error:
        parser.error(str(error))
    if arguments.seconds <= 0 or not parts:
        parser.error(f"--seconds {arguments.seconds:g} with {len(parts)} parts leaves nothing to run")
    if arguments.list:
        planned = planned_seconds(parts, arguments.seconds)
        for part in parts:
            print(f"{part.number}  {planned[part.number]:5.0f} s  {part.title}: {part.shows}")
        return 0
    small = arguments.small or arguments.emulate_cuda is not None
    if arguments.predict:
        return _predict(arguments, small)
    folder: Path = arguments.output.resolve()
    if arguments.report:
        if not (folder / FINDINGS).is_file():
            parser.error(f"--report: {folder / FINDINGS} is not there; pass the folder of a window with --output")
        _write_report(folder, arguments.predictions)
        print(f"wrote {folder / REPORT}")
        return 0
    if arguments.emulate_cuda is not None:
        try:
            # The first use compiles, which counts for no part.
            built_libraries()
        except BuildError as error:
            parser.error(f"--emulate-cuda: {error}")
    settings = Settings(folder, arguments.seconds, arguments.emulate_cuda, small, arguments.crash_part)
    print(f"{len(parts)} of {len(PARTS)} parts, at most {arguments.seconds:.0f} s; findings go to {folder / FINDINGS}")
    ended = run_window(parts, settings, lambda: _write_report(folder, arguments.predictions))
    bad = sum(each.status in (findings.CRASHED, findings.TIMED_OUT) for each in ended)
    print(f"the report is {folder / REPORT}" + (f"; {bad} parts crashed or were stopped" if bad else ""))
    return 0


def _write_report(folder: Path, predictions: Path) -> None:
    from tests.gpu.window.markdown import write_report

    write_report(folder / FINDINGS, predictions, folder / REPORT)


def _predict(arguments: argparse.Namespace, small: bool) -> int:
    from tests.gpu.window.predict import predict_all

    predict_all(arguments.predictions, arguments.gpu, small=small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
