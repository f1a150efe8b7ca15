"""Print the parameter count and the training memory of a model in Megatron's format.

python tools/report_theoretical_memory.py TRAINING-FLAGS [--world-size 8]

The flags are those of pretrain_gpt.py. No GPU, data or tokenizer is needed. The command megatron simulate records the
memory of a whole step.
"""

from __future__ import annotations

import argparse

from megatron.cli.arguments import Parser, declare_script, exit_status_of
from megatron.config import resolve_arguments
from megatron.core.errors import ConfigurationError
from megatron.planner import with_known_vocabulary
from megatron.training import describe_theoretical_memory


def build_parser() -> Parser:
    """Declare the flag that is not a training flag."""
    parser = Parser(
        prog="report_theoretical_memory.py",
        usage="%(prog)s TRAINING-FLAGS [--world-size N]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    declare_script(parser)
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="number of ranks (1)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status: 2 for invalid flags."""
    arguments, training_flags = build_parser().parse_known_args(argv)
    return exit_status_of(lambda: report(arguments.world_size, training_flags))


def report(world_size: int, training_flags: list[str]) -> None:
    """Print the report.

    Raises:
        ConfigurationError: the flags are invalid, or do not determine the vocabulary size.
    """
    if world_size < 1:
        raise ConfigurationError(f"--world-size {world_size} is not positive; pass the number of the run's ranks")
    parsed = resolve_arguments(training_flags, world_size, needs_files=False)
    config = with_known_vocabulary(parsed.config)
    for note in parsed.notes:
        print(note)
    print("\n".join(describe_theoretical_memory(config)))
