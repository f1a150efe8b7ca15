"""Run `megatron.cli.chaos` by the name of the room that does the work."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    # Commands stand above this room, which therefore names the module and does not import it.
    sys.exit(importlib.import_module("megatron.cli.chaos").main())
