"""Convert a checkpoint between layouts and formats, one tensor at a time, and check the result."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run the command, by default on the words of the command line, and return its exit status."""
    from megatron.commands.convert_arguments import parse_arguments

    arguments = parse_arguments(argv)
    # A wrong flag is answered before torch is imported.
    from megatron.commands.command_line import exit_status_of
    from megatron.conversion.conversion import convert

    for note in arguments.notes:
        print(note, flush=True)
    return exit_status_of(lambda: convert(arguments.values))
