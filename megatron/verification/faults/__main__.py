"""Entry point of ``python -m megatron.verification.faults``: run `megatron.cli.chaos`."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    # The command line depends on this package, so it is imported by name instead of by an import statement.
    sys.exit(importlib.import_module("megatron.cli.chaos").main())
