"""Compare two checkpoints of any layout and format.

The exit status is 0 if they are equal, 1 if they differ, and 2 for wrong usage.
"""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    from megatron.cli.arguments import (
        Parser,
        add_told_settings,
        declare_script,
        exit_status_of,
        stored_folder,
        told_settings,
    )

    parser = Parser(prog="diff.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("first", type=stored_folder, metavar="A", help="folder of a run, an iteration or a model")
    parser.add_argument("second", type=stored_folder, metavar="B", help="folder to compare with")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of both (the latest of each)")
    parser.add_argument("--weights-only", action="store_true", help="ignore optimizer state and training progress")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="R",
        help="largest difference that counts as equal, relative to the tensor's largest value (0: bitwise)",
    )
    declare_script(parser)
    add_told_settings(parser)
    arguments = parser.parse_args(argv)
    told = told_settings(arguments)
    if not 0 <= arguments.tolerance < float("inf"):
        parser.error(f"--tolerance {arguments.tolerance} is not a number of 0 or more")
    from megatron.checkpoint import diff_checkpoints

    is_equal: list[bool] = []
    if exit_status_of(lambda: is_equal.append(diff_checkpoints(**vars(arguments), told=told))) != 0:
        return 2  # not 1, which means that the checkpoints differ
    return 0 if all(is_equal) else 1
