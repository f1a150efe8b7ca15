"""Convert a checkpoint between layouts and formats, one tensor at a time, and check the result."""

from __future__ import annotations

import os
import sys

# This folder's inspect.py must not be found in place of Python's own.
sys.path = [
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    *(path for path in sys.path if os.path.abspath(path or os.curdir) != os.path.dirname(os.path.abspath(__file__))),
]


def main(argv: list[str] | None = None) -> int:
    """Run the command, by default on the words of the command line, and return its exit status."""
    from tools.checkpoint.convert_arguments import parse_arguments

    arguments = parse_arguments(argv)
    # A wrong flag is answered before torch is imported.
    from tools.checkpoint.conversion import convert
    from tools.command_line import exit_status_of

    for note in arguments.notes:
        print(note, flush=True)
    return exit_status_of(lambda: convert(arguments.values))


if __name__ == "__main__":
    sys.exit(main())
