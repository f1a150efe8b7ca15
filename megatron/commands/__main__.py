"""Run a command by its name: ``megatron NAME …``, or ``python -m megatron.commands NAME …`` from a checkout."""

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

from megatron.commands.arguments.parser import dispatcher
from megatron.core.broken_pipe import reader_may_leave
from megatron.training.exit_reason import run_program

COMMANDS = {
    "train": "training.train",
    "preprocess": "data.preprocess_data",
    "generate": "generation.text_generation_cli",
    "serve": "generation.serve",
    "chat": "generation.chat",
    "evaluate": "generation.evaluate",
    "convert": "checkpoint.convert",
    "inspect": "checkpoint.inspect",
    "plan": "planning.plan",
    "verify": "reliability.verify_parallelism",
    "doctor": "reliability.doctor",
    "plot": "pictures.plot",
    "dashboard": "pictures.dashboard",
    "adopt": "adopt",
    # By the names of the scripts in tools/.
    "calibrate": "planning.calibrate",
    "checkpoint.convert": "checkpoint.convert",
    "checkpoint.diff": "checkpoint.diff",
    "checkpoint.inspect": "checkpoint.inspect",
    "clean_dataset": "data.clean_dataset",
    "explain": "planning.explain",
    "gpu_dry_run": "planning.gpu_dry_run",
    "inject_faults": "reliability.inject_faults",
    "inspect_batch": "data.inspect_batch",
    "inspect_dataset": "data.inspect_dataset",
    "merge_datasets": "data.merge_datasets",
    "preprocess_data": "data.preprocess_data",
    "read_flight": "reliability.read_flight",
    "report_theoretical_memory": "planning.report_theoretical_memory",
    "run_text_generation_server": "generation.run_text_generation_server",
    "text_generation_cli": "generation.text_generation_cli",
    "verify_parallelism": "reliability.verify_parallelism",
    "visualize_pipeline": "planning.visualize_pipeline",
}
"""Where each command is, by its name."""

_HELP = ("-h", "--help")
_COMPLETION = "--print-completion"


def main() -> int:
    """Run the command that the first word names on the words that follow, and return its exit status."""
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        module = importlib.import_module(f"megatron.commands.{COMMANDS[words[0]]}")
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
        from megatron.commands.arguments.completion import print_completion

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
