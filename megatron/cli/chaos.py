"""Inject faults into a training run, restart it until it ends, and check that nothing was lost.

megatron chaos --folder fault_trials --kill any --kill launcher --rounds 10
megatron chaos --folder /scratch/faults --stop any -- torchrun --nproc_per_node 8 pretrain_gpt.py …

Without a command, a small model is trained on generated data. A command must accept training flags at its end:
--save, --load and --metrics-jsonl are appended, with new folders, so that the command's own output folders are never
written to.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from megatron.cli.arguments import Parser, exit_status_of
from megatron.core.errors import ConfigurationError
from megatron.verification.faults import (
    CORRUPTIBLE,
    AttackedCommand,
    Campaign,
    Fault,
    Kind,
    Plan,
    check_folder,
    parse_fault,
    small_command,
)

FLAGS: tuple[tuple[Kind, str, str], ...] = (
    ("kill", "RANK", "kill a rank with SIGKILL: a rank, 'any', 'all', or 'launcher' (the launcher alone)"),
    ("stop", "RANK", "stop a rank with SIGSTOP: a rank or 'any'"),
    ("slow", "RANK:FACTOR", "slow a rank down by FACTOR for --for-seconds: a rank or 'any'"),
    (
        "corrupt",
        "WHAT",
        f"{', '.join(CORRUPTIBLE)}: corrupt the newest checkpoint, a copy of the data, or a rank's tensor",
    ),
    ("partition", "RANK", "close all TCP connections of a rank: a rank or 'any'"),
)
NUMBERS = ("rounds", "processes", "train_iters", "at_iteration", "every_seconds", "for_seconds", "patience_seconds")


def build_parser() -> Parser:
    """Build the command's parser."""
    parser = Parser(
        prog="megatron chaos",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- COMMAND …]",
    )
    faults = parser.add_argument_group(
        "faults", "Each flag may be repeated; every round selects one of these faults at random."
    )
    for kind, metavar, text in FLAGS:
        faults.add_argument(f"--{kind}", action="append", default=[], metavar=metavar, help=text)
    faults.add_argument("--fill-disk", action="store_true", help="simulate a full disk on all ranks for --for-seconds")
    when = parser.add_argument_group("schedule of the faults")
    when.add_argument("--rounds", type=int, default=5, metavar="N", help="number of faults (5)")
    when.add_argument("--at-iteration", type=int, metavar="N", help="inject N iterations after each (re)start")
    when.add_argument(
        "--every-seconds", type=float, default=5.0, metavar="X", help="inject about X s after the first step (5)"
    )
    when.add_argument(
        "--for-seconds", type=float, default=5.0, metavar="X", help="duration of --slow and --fill-disk (5)"
    )
    when.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the faults, times and ranks (0)")
    run = parser.add_argument_group("training run")
    run.add_argument("--folder", type=Path, required=True, metavar="DIR", help="new folder for all output")
    run.add_argument("--processes", type=int, default=2, metavar="N", help="ranks of the small run (2)")
    run.add_argument("--train-iters", type=int, default=300, metavar="N", help="iterations of the small run (300)")
    run.add_argument("--flags", default="", metavar="TEXT", help="more flags of the small run, as one quoted word")
    run.add_argument(
        "--reference", type=Path, metavar="FILE", help="metrics.jsonl of an uninterrupted run (by default one is run)"
    )
    run.add_argument(
        "--patience-seconds", type=float, default=600.0, metavar="X", help="time limit of a start and of an end (600)"
    )
    run.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative tolerance of the final loss (0: bitwise)"
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    return parser


def parse_arguments(argv: Sequence[str]) -> tuple[Campaign, Path | None, Path | None]:
    """Return the campaign, the path of the reference metrics, and the path of the JSON report.

    Raises:
        ConfigurationError: a value is invalid.
    """
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    command = words[place + 1 :]
    parser = build_parser()
    arguments = parser.parse_args(words[:place])
    values = vars(arguments)
    faults = [parse_fault(kind, text) for kind, _, _ in FLAGS for text in values[kind]]
    faults += [Fault("fill-disk", "")] if arguments.fill_disk else []
    if not faults:
        raise ConfigurationError("no fault is selected; pass for example --kill any")
    for name in NUMBERS:
        if values[name] is not None and not (math.isfinite(values[name]) and values[name] > 0):
            raise ConfigurationError(f"--{name.replace('_', '-')} {values[name]} is not greater than 0")
    if not (math.isfinite(arguments.tolerance) and arguments.tolerance >= 0):
        raise ConfigurationError(f"--tolerance {arguments.tolerance} is not a number of 0 or more")
    given = [name for name in ("processes", "train_iters", "flags") if values[name] != parser.get_default(name)]
    if command and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigurationError(
            f"{flags} configure the small run, but a command after -- replaces it; omit one of them"
        )
    if arguments.reference is not None and not arguments.reference.is_file():
        raise ConfigurationError(f"--reference {arguments.reference} is not a file; pass a metrics.jsonl, or omit it")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--json {arguments.json}: its folder does not exist; create it, or use a different one"
        )
    for fault in () if command else faults:
        fault.rank(range(arguments.processes), random.Random(0))
    check_folder(arguments.folder)
    folder = arguments.folder.resolve()
    attacked = (
        AttackedCommand(tuple(command))
        if command
        else small_command(folder / "small", arguments.processes, arguments.train_iters, arguments.flags.split())
    )
    plan = Plan(
        faults=tuple(faults),
        rounds=arguments.rounds,
        seed=arguments.seed,
        at_iteration=arguments.at_iteration,
        every_seconds=arguments.every_seconds,
        for_seconds=arguments.for_seconds,
        patience_s=arguments.patience_seconds,
        tolerance=arguments.tolerance,
    )
    campaign = Campaign(attacked, plan, folder, lambda line: print(line, file=sys.stderr, flush=True))
    return campaign, arguments.reference, arguments.json


def main(argv: list[str] | None = None) -> int:
    """Run all rounds and return the exit status: 0 if every check passed, 1 if one failed, 2 for wrong usage."""
    held = False

    def attack() -> None:
        nonlocal held
        campaign, reference, path = parse_arguments(sys.argv[1:] if argv is None else argv)
        report = campaign.run(reference)
        print(report.to_text())
        if path is not None:
            path.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
        held = report.held

    # Exit through the cleanup code on SIGTERM, so that the training run is ended too.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return exit_status_of(attack) or (0 if held else 1)
    finally:
        signal.signal(signal.SIGTERM, previous)
