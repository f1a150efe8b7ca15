"""The flags that every server of text generation has."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def add_server_flags(parser: argparse.ArgumentParser, port: int) -> None:
    """Declare where a server listens, by default at ``port``, and what it takes."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine only)")
    parser.add_argument(
        "--port", type=int, default=port, metavar="N", help=f"port to listen at ({port}); 0: a free one"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of requests that bring none (1234)")
    parser.add_argument(
        "--max-tokens-to-oom",
        type=int,
        default=12000,
        metavar="N",
        help="most prompts that run together x (longest prompt + tokens to generate); larger requests are refused "
        "(12000)",
    )
    parser.add_argument(
        "--hang-report-seconds",
        type=int,
        metavar="N",
        help="report a process that holds up the others for this long, and end all (60; 0: never)",
    )


def server_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the values of these flags, one line each."""
    if not 0 <= arguments.port < 2**16:
        yield f"--port {arguments.port} is not between 0 and {2**16 - 1}"
    if arguments.seed < 0:
        yield f"--seed {arguments.seed} is negative"
    if arguments.hang_report_seconds is not None and arguments.hang_report_seconds < 0:
        yield f"--hang-report-seconds {arguments.hang_report_seconds} is negative"
    if arguments.max_tokens_to_oom < 1:
        yield f"--max-tokens-to-oom {arguments.max_tokens_to_oom} is not positive"
