"""Run ``python -m megatron.commands NAME …``, the former name of ``python -m megatron NAME …``."""

from __future__ import annotations

import sys

from megatron.cli.__main__ import run

if __name__ == "__main__":
    print("warning: python -m megatron.commands is python -m megatron now; the old name will go", file=sys.stderr)
    run()
