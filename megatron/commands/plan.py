"""Predict memory and time of training runs without a GPU, and compare them with what was measured.

python tools/plan.py --evaluate RUNS.json --output PREDICTIONS.json

RUNS.json holds one record a run, as benchmarks/planner/measured_runs.json does. Every record is predicted under the
implementation and on the GPU type that it names, or those that are given here. The errors are printed by model.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

from megatron.commands.arguments.command_line import Parser, exit_status_of
from megatron.core.errors import ConfigurationError
from megatron.planning.gpu import GPUS, find_gpu
from megatron.planning.prediction.evaluation import describe_errors, evaluate
from megatron.planning.prediction.implementations import IMPLEMENTATIONS, find_implementation
from megatron.planning.prediction.measured_runs import read_runs


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="plan.py",
        usage="%(prog)s --evaluate RUNS.json [--output PREDICTIONS.json] [--implementation NAME] [--gpu TYPE]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--evaluate", type=Path, required=True, metavar="FILE", help="predict the runs of this file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the predictions to this file")
    parser.add_argument(
        "--implementation", metavar="NAME", help=f"one of {', '.join(IMPLEMENTATIONS)} (as each record says)"
    )
    parser.add_argument("--gpu", metavar="TYPE", help=f"one of {', '.join(GPUS)} (as each record says)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status: 2 for a file or flags that cannot be used."""
    arguments = build_parser().parse_args(argv)
    return exit_status_of(functools.partial(evaluate_file, arguments))


def evaluate_file(arguments: argparse.Namespace) -> None:
    """Predict the runs of a file, write the predictions and print the errors.

    Raises:
        DataError: the file is not one of measured runs.
        ConfigurationError: a name is not known, or the predictions cannot be written.
    """
    implementation = None if arguments.implementation is None else find_implementation(arguments.implementation)
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu)
    evaluated = evaluate(read_runs(arguments.evaluate), implementation, gpu)
    if arguments.output is not None:
        predictions = {"runs": [each.to_json() for each in evaluated]}
        try:
            arguments.output.write_text(json.dumps(predictions, indent=1) + "\n")
        except OSError as error:
            raise ConfigurationError(f"--output {arguments.output} cannot be written: {error.strerror}") from error
    print("\n".join(describe_errors(evaluated)))
