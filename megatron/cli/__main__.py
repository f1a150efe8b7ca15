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

COMMANDS = {
    "train": "train",
    "preprocess": "preprocess_data",
    "generate": "text_generation_cli",
    "serve": "serve",
    "chat": "chat",
    "evaluate": "evaluate",
    "convert": "convert",
    "inspect": "inspect_checkpoint",
    "plan": "plan",
    "verify": "verify_parallelism",
    "doctor": "doctor.doctor",
    "plot": "plot",
    "dashboard": "dashboard",
    "adopt": "adopt.adopt",
    # By the names of the scripts in tools/.
    "calibrate": "calibrate",
    "chaos": "chaos",
    "checkpoint.convert": "convert",
    "checkpoint.diff": "diff_checkpoints",
    "checkpoint.inspect": "inspect_checkpoint",
    "clean_dataset": "clean_dataset",
    "explain": "explain",
    "hang-report": "hang_report",
    "inspect_batch": "inspect_batch",
    "inspect_dataset": "inspect_dataset",
    "merge_datasets": "merge_datasets",
    "preprocess_data": "preprocess_data",
    "report_theoretical_memory": "report_theoretical_memory",
    "run_text_generation_server": "run_text_generation_server",
    "simulate": "simulate",
    "text_generation_cli": "text_generation_cli",
    "verify_parallelism": "verify_parallelism",
    "visualize_pipeline": "visualize_pipeline",
}
"""Where each command is, by its name."""
DEPRECATED = {"gpu_dry_run": "simulate", "inject_faults": "chaos", "read_flight": "hang-report"}
"""The current names of commands by their names of an earlier release."""

_HELP = ("-h", "--help")
_COMPLETION = "--print-completion"


def main() -> int:
    """Run the command that the first word names on the words that follow, and return its exit status."""
    words = sys.argv[1:]
    if words and words[0] in DEPRECATED:
        from megatron.config import deprecation_warning

        current = DEPRECATED[words[0]]
        print(deprecation_warning(f"megatron {words[0]}", f"megatron {current}"), file=sys.stderr)
        words = sys.argv[1:] = [current, *words[1:]]  # the help shows the name of the command
    if words and words[0] in COMMANDS:
        module = importlib.import_module(f"megatron.cli.{COMMANDS[words[0]]}")
        # A run that loses the reader of its log says so; other commands end as programs do behind `| head`.
        with contextlib.nullcontext() if words[0] == "train" else reader_may_leave():
            status: int = module.main(words[1:])
        return status
    if words and words[0] in _HELP:
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
    """Be the installed command ``megatron``."""
    run_program(main)


def _usage(words: Sequence[str]) -> str:
    """Return one line on what can be typed in place of words that name no command."""
    if not words:
        return f"usage: {dispatcher() or 'megatron'} NAME …, NAME one of {', '.join(COMMANDS)}"
    nearest = difflib.get_close_matches(words[0], COMMANDS, n=1)
    instead = f"did you mean {nearest[0]}?" if nearest else f"give one of {', '.join(COMMANDS)}"
    return f"error: there is no command {words[0]!r}; {instead}"


def _overview() -> str:
    """Return what each command does: the first sentence of its file, which is not imported for that."""
    program = dispatcher() or "megatron"
    lines = [f"usage: {program} NAME …   ({program} NAME --help says more)", ""]
    for name, place in COMMANDS.items():
        source = (Path(__file__).parent / (place.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:<28}{first}")
    shells = f"{program} {_COMPLETION} bash|zsh prints what completes these names in a shell"
    return "\n".join([*lines, "", shells])


if __name__ == "__main__":
    run()
