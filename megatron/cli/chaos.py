"""Inject faults into a training run, restart it until it ends, and check that nothing was lost.

megatron chaos --folder fault_trials --kill any --kill launcher --rounds 10
megatron chaos --folder /scratch/faults --stop any -- torchrun --nproc_per_node 8 pretrain_gpt.py …

Without a command a small model is trained on made-up data. A command takes training flags at its end: it is given
--save, --load and --metrics-jsonl in folders of its own, and nothing that it names is written to.
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
    ("kill", "RANK", "kill a rank without a warning; 'any', 'all', or the 'launcher' alone"),
    ("stop", "RANK", "stop a rank as SIGSTOP does; 'any'"),
    ("slow", "RANK:FACTOR", "let a rank run for one part in FACTOR of the time, for a while; 'any:FACTOR'"),
    ("corrupt", "WHAT", f"{', '.join(CORRUPTIBLE)}: a byte of the newest, the data (a copy), a number of a rank"),
    ("partition", "RANK", "end all TCP connections of a rank; 'any'"),
)
NUMBERS = ("rounds", "processes", "train_iters", "at_iteration", "every_seconds", "for_seconds", "patience_seconds")


def build_parser() -> Parser:
    """Return the parser of this tool."""
    parser = Parser(
        prog="megatron chaos",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- COMMAND …]",
    )
    faults = parser.add_argument_group("faults", "Each may be given again; every round draws one of all.")
    for kind, metavar, text in FLAGS:
        faults.add_argument(f"--{kind}", action="append", default=[], metavar=metavar, help=text)
    faults.add_argument(
        "--fill-disk", action="store_true", help="let no rank write files longer than logs, for a while"
    )
    when = parser.add_argument_group("when")
    when.add_argument("--rounds", type=int, default=5, metavar="N", help="faults in all (5)")
    when.add_argument("--at-iteration", type=int, metavar="N", help="when N iterations are done since a start")
    when.add_argument(
        "--every-seconds", type=float, default=5.0, metavar="X", help="about X s after the first step (5)"
    )
    when.add_argument(
        "--for-seconds", type=float, default=5.0, metavar="X", help="how long slowness and full disks last"
    )
    when.add_argument("--seed", type=int, default=0, metavar="N", help="of which, when and where (0)")
    run = parser.add_argument_group("the run")
    run.add_argument("--folder", type=Path, required=True, metavar="DIR", help="new folder for all that is written")
    run.add_argument("--processes", type=int, default=2, metavar="N", help="of the small run (2)")
    run.add_argument("--train-iters", type=int, default=300, metavar="N", help="of the small run (300)")
    run.add_argument("--flags", default="", metavar="TEXT", help="more flags of the small run, in one word")
    run.add_argument(
        "--reference", type=Path, metavar="FILE", help="metrics of an uninterrupted run, made first if absent"
    )
    run.add_argument(
        "--patience-seconds", type=float, default=600.0, metavar="X", help="for a start, and for an end (600)"
    )
    run.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="of the final loss, relative (0: all bits)"
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="write the report here, too")
    return parser


def parse_arguments(argv: Sequence[str]) -> tuple[Campaign, Path | None, Path | None]:
    """Return what is to be done, the metrics to compare with, and where the report goes.

    Raises:
        ConfigurationError: a value cannot be used.
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
        raise ConfigurationError("no fault is asked for; give --kill any, say")
    for name in NUMBERS:
        if values[name] is not None and not (math.isfinite(values[name]) and values[name] > 0):
            raise ConfigurationError(f"--{name.replace('_', '-')} {values[name]} is not greater than 0")
    if not (math.isfinite(arguments.tolerance) and arguments.tolerance >= 0):
        raise ConfigurationError(f"--tolerance {arguments.tolerance} is not a number of 0 or more")
    given = [name for name in ("processes", "train_iters", "flags") if values[name] != parser.get_default(name)]
    if command and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigurationError(f"{flags}: of the small run, which a command after -- replaces; leave one out")
    if arguments.reference is not None and not arguments.reference.is_file():
        raise ConfigurationError(f"--reference {arguments.reference} is no file; name a metrics.jsonl, or leave it out")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ConfigurationError(f"--json {arguments.json}: there is no such folder; make it, or name another")
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
    """Do all rounds and return the exit status: 0 where all held, 1 where something did not, 2 for wrong usage."""
    held = False

    def attack() -> None:
        nonlocal held
        campaign, reference, path = parse_arguments(sys.argv[1:] if argv is None else argv)
        report = campaign.run(reference)
        print(report.to_text())
        if path is not None:
            path.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
        held = report.held

    # What was started is ended when this is.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return exit_status_of(attack) or (0 if held else 1)
    finally:
        signal.signal(signal.SIGTERM, previous)
