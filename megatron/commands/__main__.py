"""Run a command by its name, wherever the package is installed: ``python -m megatron.commands NAME …``."""

from __future__ import annotations

import importlib
import sys

from megatron.training.process.process_exit import run_program

COMMANDS = (
    "adopt",
    "calibrate",
    "checkpoint.convert",
    "checkpoint.diff",
    "checkpoint.inspect",
    "clean_dataset",
    "doctor",
    "explain",
    "gpu_dry_run",
    "inject_faults",
    "inspect_batch",
    "inspect_dataset",
    "merge_datasets",
    "plan",
    "preprocess_data",
    "read_flight",
    "report_theoretical_memory",
    "run_text_generation_server",
    "text_generation_cli",
    "verify_parallelism",
    "visualize_pipeline",
)


def main() -> int:
    """Run the command that the first word names on the words that follow, and return its exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m megatron.commands NAME …, NAME one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"megatron.commands.{sys.argv[1]}").main(sys.argv[2:])
    return status


if __name__ == "__main__":
    run_program(main)
