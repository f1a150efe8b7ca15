"""Explain a configuration: ranks, layers, predicted memory and step time, traffic, flags without effect.

python tools/explain.py TRAINING-FLAGS --world-size 64 [--html page.html]

The flags are those of pretrain_gpt.py, which does the same with --explain. No GPU, data or tokenizer is needed. If the
configuration is invalid or does not fit in memory, the cheapest changes that would make it run are listed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.arguments import Parser, declare_script, exit_status_of
from megatron.cli.planner_arguments import (
    HELP,
    add_platform,
    check_agreement,
    check_imbalance,
    check_world_size,
    describe_verified,
    find_platform,
    prepare_to_verify,
    read_planned_run,
    verify_plan,
    write_text,
)
from megatron.core.errors import ConfigurationError
from megatron.planner import (
    describe_changes,
    explain,
    find_changes,
    find_implementation,
    to_page,
    to_text,
    trace_in_this_process,
)
from megatron.training import keep_arguments


def build_parser(world_size: int) -> Parser:
    """Declare the flags that are not training flags."""
    parser = Parser(
        prog="explain.py",
        usage="%(prog)s TRAINING-FLAGS [--world-size N] [--gpu TYPE] [--implementation NAME] [--json] [--html FILE] "
        "[--verify] [--exit-code]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size", "--gpus", type=int, default=world_size, metavar="N", help=f"number of ranks ({world_size})"
    )
    declare_script(parser, before=trace_in_this_process)
    add_platform(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write an HTML page to this file")
    parser.add_argument("--verify", action="store_true", help=HELP)
    parser.add_argument(
        "--exit-code", action="store_true", help="exit with status 1 if the run is predicted not to fit in memory"
    )
    return parser


def main(argv: Sequence[str] | None = None, world_size: int = 1) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status: 2 for invalid flags.

    With --exit-code the status is 1 if the predicted outcome is not that the run works. ``world_size`` is the
    launcher's world size, the default of --world-size.
    """
    arguments, training_flags = build_parser(world_size).parse_known_args(argv)
    words = [word for word in training_flags if word != "--explain"]
    outcomes: list[str] = []
    status = exit_status_of(lambda: outcomes.append(report(arguments, words)))
    return status or int(arguments.exit_code and outcomes != ["ok"])


def report(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """Print the explanation and return the predicted outcome: ``ok``, ``oom`` or ``error``.

    Raises:
        ConfigurationError: the flags are invalid, or a file cannot be written.
    """
    check_world_size("--world-size", arguments.world_size)
    gpu = find_platform(arguments.gpu)
    implementation = find_implementation(arguments.implementation, arguments.expert_imbalance)
    where = arguments.world_size, read_planned_run, gpu, implementation
    if arguments.verify:
        prepare_to_verify(implementation)
    trace_in_this_process()
    try:
        parsed = read_planned_run(words, arguments.world_size)
    except ConfigurationError as error:
        changes = find_changes(words, *where)
        for line in describe_changes(changes):
            print(f"would run with {line}", file=sys.stderr)
        raise error
    check_imbalance(arguments.expert_imbalance, parsed.config.model)
    keep_arguments(parsed.config)
    explanation = explain(parsed.config, parsed.notes, gpu, implementation)
    if arguments.verify and explanation.prediction.outcome == "error":
        raise ConfigurationError(f"--verify: this configuration cannot run: {explanation.prediction.reason}")
    changes = () if explanation.prediction.outcome == "ok" else find_changes(words, *where)
    if arguments.html is not None:
        write_text("--html", arguments.html, to_page(explanation, changes))
    verified = verify_plan(parsed.config, gpu) if arguments.verify else ()
    if arguments.json:
        more = {"verified": [each.to_json() for each in verified]} if arguments.verify else {}
        print(json.dumps(explanation.to_json(changes) | more, indent=1))
    else:
        sys.stdout.write(to_text(explanation, changes))
        if arguments.verify:
            print("\n" + "\n".join(describe_verified(verified)))
    check_agreement(verified)
    return explanation.prediction.outcome
