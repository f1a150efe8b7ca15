"""Run a command by its name, wherever the package is installed: ``python -m megatron.commands NAME …``."""

from __future__ import annotations

import importlib
import sys

from megatron.training.process.process_exit import run_program

COMMANDS = {
    "adopt": "adopt",
    "calibrate": "planning.calibrate",
    "checkpoint.convert": "checkpoint.convert",
    "checkpoint.diff": "checkpoint.diff",
    "checkpoint.inspect": "checkpoint.inspect",
    "clean_dataset": "data.clean_dataset",
    "dashboard": "pictures.dashboard",
    "doctor": "reliability.doctor",
    "explain": "planning.explain",
    "gpu_dry_run": "planning.gpu_dry_run",
    "inject_faults": "reliability.inject_faults",
    "inspect_batch": "data.inspect_batch",
    "inspect_dataset": "data.inspect_dataset",
    "merge_datasets": "data.merge_datasets",
    "plan": "planning.plan",
    "plot": "pictures.plot",
    "preprocess_data": "data.preprocess_data",
    "read_flight": "reliability.read_flight",
    "report_theoretical_memory": "planning.report_theoretical_memory",
    "run_text_generation_server": "generation.run_text_generation_server",
    "text_generation_cli": "generation.text_generation_cli",
    "verify_parallelism": "reliability.verify_parallelism",
    "visualize_pipeline": "planning.visualize_pipeline",
}
"""Where each command is, by its name."""


def main() -> int:
    """Run the command that the first word names on the words that follow, and return its exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m megatron.commands NAME …, NAME one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"megatron.commands.{COMMANDS[sys.argv[1]]}").main(sys.argv[2:])
    return status


if __name__ == "__main__":
    run_program(main)
