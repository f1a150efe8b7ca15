"""Run one part of a GPU window in this process: python -m tests.gpu.window.run_part NUMBER --findings FILE …"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from tests.gpu.window.plan import PARTS
from tests.gpu.window.runner import UNAVAILABLE_STATUS


def main(argv: list[str] | None = None) -> int:
    """Run a part and return the exit status; a machine without a GPU, or without torch, has a status of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--findings", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--crash", action="store_true")
    arguments = parser.parse_args(argv)
    part = next(each for each in PARTS if each.number == arguments.number)
    if arguments.crash:
        os.kill(os.getpid(), signal.SIGSEGV)
    if (reason := _why_unavailable()) is not None:
        print(reason)
        return UNAVAILABLE_STATUS
    # After the check: on a machine without torch these modules cannot be imported.
    from tests.gpu.window.window import Window

    window = Window(part, arguments.findings, arguments.seconds, small=arguments.small)
    importlib.import_module(f"tests.gpu.window.parts.{part.module}").run(window)
    return 0


def _why_unavailable() -> str | None:
    """Return why no part can run here, or None."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"torch cannot be imported: {error}"
    if torch.cuda.is_available():
        return None
    build = "a CPU build" if torch.version.cuda is None else f"a build for CUDA {torch.version.cuda}"
    return f"torch {torch.__version__} is {build} and finds no CUDA device"


if __name__ == "__main__":
    sys.exit(main())
