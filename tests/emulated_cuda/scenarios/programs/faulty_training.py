"""Train with one of the faults of the tests, which is given in front of the flags as ``name=value``."""

from __future__ import annotations

import sys

from megatron.training.exit_reason import run_program
from tests.harness.faults import Faults, run_with_faults

if __name__ == "__main__":
    name, _, value = sys.argv[1].partition("=")
    known = (int(value),) if name == "nan_loss_at" else int(value)
    run_program(lambda: run_with_faults(sys.argv[2:], Faults(**{name: known})))  # type: ignore[arg-type]
