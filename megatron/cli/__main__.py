"""Run a command by its name: ``megatron NAME …``, or ``python -m megatron NAME …`` from a checkout."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron.cli.arguments import dispatcher
from megatron.core.broken_pipe import reader_may_leave
from megatron.training import run_program

GROUPS = {
    "Train": {
        "train": "train",
        "plan": "plan",
        "explain": "explain",
        "simulate": "simulate",
        "adopt": "adopt.adopt",
    },
    "Data": {
        "preprocess": "preprocess_data",
        "clean-dataset": "clean_dataset",
        "merge-datasets": "merge_datasets",
        "inspect-dataset": "inspect_dataset",
        "inspect-batch": "inspect_batch",
    },
    "Checkpoint": {
        "convert": "convert",
        "inspect": "inspect_checkpoint",
        "diff": "diff_checkpoints",
    },
    "Inference": {
        "generate": "text_generation_cli",
        "chat": "chat",
        "serve": "serve",
        "run-text-generation-server": "run_text_generation_server",
        "evaluate": "evaluate",
    },
    "Debug": {
        "doctor": "doctor.doctor",
        "verify": "verify_parallelism",
        "hang-report": "hang_report",
        "chaos": "chaos",
        "plot": "plot",
        "dashboard": "dashboard",
        "visualize-pipeline": "visualize_pipeline",
        "calibrate": "calibrate",
        "report-theoretical-memory": "report_theoretical_memory",
    },
}
"""Module of each command, in the groups of the list that ``megatron`` prints."""
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}
"""Module of each command."""
SCRIPTS = {
    "checkpoint.convert": "convert",
    "checkpoint.diff": "diff",
    "checkpoint.inspect": "inspect",
    "clean_dataset": "clean-dataset",
    "inspect_batch": "inspect-batch",
    "inspect_dataset": "inspect-dataset",
    "merge_datasets": "merge-datasets",
    "preprocess_data": "preprocess",
    "report_theoretical_memory": "report-theoretical-memory",
    "run_text_generation_server": "run-text-generation-server",
    "text_generation_cli": "generate",
    "verify_parallelism": "verify",
    "visualize_pipeline": "visualize-pipeline",
}
"""Command of each script in ``tools/``; the script's name is also accepted."""
DEPRECATED = {"gpu_dry_run": "simulate", "inject_faults": "chaos", "read_flight": "hang-report"}
"""Current name of each command that was renamed."""

_HELP = ("-h", "--help")
_COMPLETION = "--print-completion"


def main() -> int:
    """Run the command named by the first word with the remaining words, and return its exit status."""
    words = sys.argv[1:]
    if words and words[0] in DEPRECATED:
        from megatron.config import deprecation_warning

        current = DEPRECATED[words[0]]
        print(deprecation_warning(f"megatron {words[0]}", f"megatron {current}"), file=sys.stderr)
        words = sys.argv[1:] = [current, *words[1:]]  # the help shows the name of the command
    if words and words[0] in SCRIPTS:
        words = sys.argv[1:] = [SCRIPTS[words[0]], *words[1:]]
    if words and words[0] in COMMANDS:
        module = importlib.import_module(f"megatron.cli.{COMMANDS[words[0]]}")
        # Training reports a closed standard output. Other commands end silently, as is usual before `| head`.
        with contextlib.nullcontext() if words[0] == "train" else reader_may_leave():
            status: int = module.main(words[1:])
        return status
    if not words or words[0] in _HELP:
        with reader_may_leave():
            print(_overview())
        return 0
    if words == ["--version"]:
        print(importlib.metadata.version("megatron-gpt"))
        return 0
    if words and words[0] == _COMPLETION:
        from megatron.cli.completion import print_completion

        with reader_may_leave():
            return print_completion(words[1:], COMMANDS)
    print(_usage(words), file=sys.stderr)
    return 2


def run() -> NoReturn:
    """Run the installed command ``megatron``."""
    run_program(main)


def _usage(words: Sequence[str]) -> str:
    """Return the error line for an unknown command, with the nearest name."""
    nearest = difflib.get_close_matches(words[0], COMMANDS, n=1)
    instead = f"did you mean {nearest[0]}?" if nearest else f"{dispatcher() or 'megatron'} lists the commands"
    return f"error: there is no command {words[0]!r}; {instead}"


def _overview() -> str:
    """Return the list of commands by group, each with the first line of its module's docstring.

    The modules are parsed, not imported.
    """
    program = dispatcher() or "megatron"
    lines = [f"usage: {program} COMMAND …   ({program} COMMAND --help shows its options)"]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, place in group.items():
            source = (Path(__file__).parent / (place.replace(".", "/") + ".py")).read_text(encoding="utf-8")
            first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            lines.append(f"  {name:<28}{first}")
    return "\n".join([*lines, "", f"{program} {_COMPLETION} bash|zsh prints a completion script."])


if __name__ == "__main__":
    run()
