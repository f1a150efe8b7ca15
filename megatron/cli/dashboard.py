"""Show the runs of a folder in a browser: status, metrics and checkpoints, compared and live.

megatron dashboard checkpoints

The server listens on localhost by default, and the page requires the token in the printed address.
"""

from __future__ import annotations

import argparse
import re
import secrets
from pathlib import Path

from megatron.cli.arguments import Parser
from megatron.plotting import DashboardServer, address

_LARGEST_PORT = 65535


def build_parser() -> Parser:
    """Declare the flags."""
    parser = Parser(
        prog="dashboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder with the --save folders of runs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this host only)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (a free port)")
    parser.add_argument(
        "--token", default="", help="access token in the URL (by default a new random token at every start)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C and return the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not arguments.folder.is_dir():
        parser.error(f"{arguments.folder} is not a folder; pass a folder that runs save to")
    if not 0 <= arguments.port <= _LARGEST_PORT:
        parser.error(f"--port {arguments.port} is not between 0 and {_LARGEST_PORT}")
    if arguments.token and not re.fullmatch(r"[\w-]{8,}", arguments.token, re.ASCII):
        parser.error("--token must be at least 8 letters, digits, - or _")
    token = arguments.token or secrets.token_urlsafe(16)
    try:
        server = DashboardServer(arguments.folder, arguments.host, arguments.port, token)
    except OSError as error:
        parser.error(f"--host {arguments.host} --port {arguments.port}: {error.strerror}; use a different host or port")
    with server:
        print(f"open {address(server)} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
