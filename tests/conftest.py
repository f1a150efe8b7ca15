"""Settings that must hold before any test imports torch."""

from __future__ import annotations

import os

# Two cores are shared by up to eight ranks; and a fork that follows multi-threaded work can hang for good.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests say themselves which device they want; the default ones run on the CPU of any machine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
