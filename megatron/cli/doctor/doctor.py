"""Check a node before a run, and suggest fixes.

python tools/doctor.py --save checkpoints/gpt --data-path corpus_text_document
torchrun --nproc-per-node 8 tools/doctor.py        also checks the communication between ranks

Each line is ok, a warning (slow or risky), wrong (a run would fail), or skipped. The exit status is 1 if anything is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from megatron.cli.arguments import Parser, local_folder
from megatron.training import launch_environment_or_exit


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="doctor.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--save", type=local_folder, metavar="DIR", help="checkpoint folder; 64 MiB are written to test it"
    )
    parser.add_argument("--data-path", nargs="+", default=[], metavar="PREFIX", help="prefixes of token files")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), help="torch.distributed backend (nccl on GPUs, otherwise gloo)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    arguments = build_parser().parse_args(argv)
    launch = launch_environment_or_exit()
    from megatron.cli.doctor.examination import Request, examine
    from megatron.cli.doctor.host_checks import to_json

    prefixes = [word for word in arguments.data_path if not _is_weight(word)]
    findings = examine(Request(os.environ, launch, arguments.save, prefixes, arguments.backend))
    report = to_json(findings)
    counts = report["counts"]
    if launch.rank == 0:
        if arguments.json:
            print(json.dumps(report, indent=1))
        else:
            print("\n".join(finding.describe() for finding in findings))
            print(", ".join(f"{count} {status}" for status, count in counts.items()))
    # Only rank 0 reports failure: torchrun would end rank 0 as soon as another rank failed.
    return 1 if counts["wrong"] and launch.rank == 0 else 0


def _is_weight(word: str) -> bool:
    """Return whether a word of ``--data-path`` is a weight, as in ``0.3 first 0.7 second``."""
    try:
        float(word)
    except ValueError:
        return False
    return True
