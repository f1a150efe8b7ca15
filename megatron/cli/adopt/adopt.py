"""Translate another trainer's launch script or configuration file, without executing it.

Supported are launch scripts (bash) of Megatron-LM, Pai-Megatron-Patch and DeepSpeed-Megatron, TOML files of torchtitan,
YAML files of nanotron, and the saved config.json of OLMo-core. The exit status is 0 if the command would run, 1 if the
user must decide something first, and 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.cli.adopt.adoption import adopt_file, report_json, report_lines
from megatron.cli.arguments import Parser, exit_status_of
from megatron.cli.convert import parse_arguments as parse_conversion
from megatron.cli.merge_datasets import build_parser as parser_of_merging
from megatron.cli.preprocess_data import build_parser as parser_of_preprocessing
from megatron.cli.run_text_generation_server import build_parser as parser_of_server
from megatron.config import resolve_arguments
from megatron.core.errors import ConfigurationError


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="adopt.py",
        usage="%(prog)s FILE [--set NAME=VALUE ...] [--json FILE] [-- PARAMETER ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="launch script (not executed) or configuration file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="value of a variable; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this JSON file")
    return parser


def refused_in_pretraining(words: Sequence[str], world_size: int) -> Sequence[str]:
    """Return the problems that the training script's parser finds in a command."""
    try:
        resolve_arguments(words, world_size)
    except ConfigurationError as error:
        return error.problems
    return ()


def refused_by(parse: Callable[[Sequence[str]], Any]) -> Callable[[Sequence[str], int], Sequence[str]]:
    """Make a check from a tool's parser, which raises SystemExit for an invalid command."""

    def check(words: Sequence[str], world_size: int) -> Sequence[str]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parse(words)
        except SystemExit:
            return (said.getvalue().strip().removeprefix("error: ").removesuffix("; see --help"),)
        return ()

    return check


CHECKS = {
    "pretrain_gpt.py": refused_in_pretraining,
    "tools/preprocess_data.py": refused_by(parser_of_preprocessing().parse_args),
    "tools/merge_datasets.py": refused_by(parser_of_merging().parse_args),
    "tools/run_text_generation_server.py": refused_by(parser_of_server().parse_args),
    "tools/checkpoint/convert.py": refused_by(parse_conversion),
}


def variables_of(settings: Sequence[str]) -> dict[str, str]:
    """Parse the ``NAME=VALUE`` texts of --set.

    Raises:
        ConfigurationError: a text has another form.
    """
    wrong = [item for item in settings if not re.match(r"[A-Za-z_]\w*=", item)]
    if wrong:
        raise ConfigurationError([f"--set {item} is not NAME=VALUE" for item in wrong])
    return dict(item.split("=", 1) for item in settings)


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status: 0, 1 or 2."""
    words = sys.argv[1:] if argv is None else argv
    cut = words.index("--") if "--" in words else len(words)
    arguments = build_parser().parse_args(words[:cut])
    statuses = []

    def work() -> None:
        adoption = adopt_file(arguments.file, words[cut + 1 :], variables_of(arguments.set), CHECKS)
        for line in report_lines(adoption.commands, adoption.notes):
            print(line)
        if arguments.json is not None:
            arguments.json.write_text(report_json(adoption.commands, adoption.notes), encoding="utf-8")
        statuses.append(0 if all(command.would_run for command in adoption.commands) else 1)

    return exit_status_of(work) or statuses[0]
