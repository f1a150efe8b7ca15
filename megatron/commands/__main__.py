"""Run ``python -m megatron.commands NAME …``, the former name of ``python -m megatron NAME …``."""

from __future__ import annotations

import sys

from megatron.cli.__main__ import run

if __name__ == "__main__":
    print(
        "warning: python -m megatron.commands has been renamed to python -m megatron; the old name will be removed",
        file=sys.stderr,
    )
    run()
