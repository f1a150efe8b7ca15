"""Be the command ``megatron`` where it is not installed: ``python -m megatron NAME …``."""

from __future__ import annotations

from megatron.cli.__main__ import run

if __name__ == "__main__":
    run()
