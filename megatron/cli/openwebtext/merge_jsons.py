"""Merge the .json files of a folder, with one JSON object per line, into one file.

The arguments are those of Megatron-LM's script. The files are read in the order of their names, and lines are copied
as they are. Unlike there, documents without text are dropped, a line that is not a JSON object with a text is reported
with its file and number, and the output is never among the files that are read. `megatron clean-dataset` also reads
text files, compressed files and subfolders.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron.cli.arguments import Parser, exit_status_of
from megatron.cli.clean_dataset import build_parser as build_cleaning_parser
from megatron.cli.clean_dataset import clean
from megatron.core.errors import DataError


def build_parser() -> Parser:
    """Declare Megatron-LM's flags."""
    parser = Parser(prog="merge_jsons.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json_path", type=Path, default=Path(), metavar="DIR", help="folder of the .json files (.)")
    parser.add_argument(
        "--output_file",
        type=Path,
        default=Path("merged_output.json"),
        metavar="FILE",
        help="file to write (merged_output.json)",
    )
    return parser


def merge(arguments: argparse.Namespace) -> None:
    """Merge the files.

    Raises:
        InputError: there are no files, or a line is not a document.
    """
    output = os.path.realpath(arguments.output_file)
    files = [str(path) for path in sorted(arguments.json_path.glob("*.json")) if os.path.realpath(path) != output]
    if not files:
        raise DataError(f"--json_path {arguments.json_path}: there are no .json files in it; use a different folder")
    words = ["--input", *files, "--input-format", "jsonl", "--output", str(arguments.output_file), "--workers", "1"]
    clean(build_cleaning_parser().parse_args(words))
    print(f"Merged file {arguments.output_file}")


def main(argv: list[str] | None = None) -> int:
    """Run the script with ``argv`` (default: the command line) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return exit_status_of(lambda: merge(arguments))
