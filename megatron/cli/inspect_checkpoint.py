"""List the parameters, layout, progress and configuration of a checkpoint of any format."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run the command with ``argv`` (default: the command line) and return its exit status."""
    from megatron.cli.arguments import (
        Parser,
        add_told_settings,
        declare_checkpoint_folder,
        declare_script,
        exit_status_of,
        stored_folder,
        told_settings,
    )

    parser = Parser(prog="inspect.py", description=__doc__, allow_abbrev=False)
    declare_checkpoint_folder(parser, "--load", help="folder of a run, an iteration or a model", type=stored_folder)
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to list (the latest)")
    parser.add_argument("--all", action="store_true", help="list every tensor and every setting")
    parser.add_argument("--config", action="store_true", help="list every setting, also those at their defaults")
    parser.add_argument("--no-tensors", action="store_true", help="do not list tensors or parameters")
    parser.add_argument("--verify", action="store_true", help="read every tensor and verify its checksums")
    declare_script(parser)
    add_told_settings(parser)
    arguments = parser.parse_args(argv)
    told = told_settings(arguments)
    directory = vars(arguments).pop("load")
    from megatron.checkpoint import inspect_checkpoint

    return exit_status_of(lambda: inspect_checkpoint(directory, **vars(arguments), told=told))
